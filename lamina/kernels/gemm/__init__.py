"""Matrix products for few tokens (GEMV and skinny GEMM), mixtures of experts, and the norms fused with them."""
