"""Lamina models whose blocks are transformers' own, for families that Lamina does not have."""
