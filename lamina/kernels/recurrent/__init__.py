"""Recurrent mixers for few tokens."""
