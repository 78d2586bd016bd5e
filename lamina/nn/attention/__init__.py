"""Attention blocks and positions."""
