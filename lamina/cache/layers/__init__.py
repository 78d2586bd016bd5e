"""The kinds of cache layers: keys and values, latents, token vectors, recurrent states, encoder outputs."""
