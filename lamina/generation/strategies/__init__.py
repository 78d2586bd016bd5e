"""The ways to search for tokens: captured decoding, beams, speculative decoding, contrastive search, DoLa."""
