"""Attention modules and position encodings."""
