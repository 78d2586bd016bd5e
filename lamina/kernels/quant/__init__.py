"""Quantized keys and values inside kernels."""
