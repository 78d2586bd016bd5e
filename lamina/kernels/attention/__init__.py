"""Decode attention kernels: plain, fused with RoPE, quantized and MLA; RoPE and the projections around them."""
