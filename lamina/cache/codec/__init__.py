"""Codecs: in which formats a cache stores the vectors of a token."""
