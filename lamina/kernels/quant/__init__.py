"""Quantized keys and values inside kernels: the layout of codes, quantizing new tokens, dequantizing stored ones."""
