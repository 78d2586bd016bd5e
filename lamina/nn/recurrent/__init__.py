"""Recurrent mixers."""
