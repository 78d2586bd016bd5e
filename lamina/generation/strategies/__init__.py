"""Decoding strategies: plain, captured, beams, speculation, contrastive search, DoLa; guidance and token healing."""
