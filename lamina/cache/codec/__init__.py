"""Codecs: how the vectors of a token are quantized."""
