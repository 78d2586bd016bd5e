"""Weights of a transformers model in memory, shared with a Lamina model."""
