"""The kinds of layers: keys and values, latents, token vectors, recurrent states, encoder outputs."""
