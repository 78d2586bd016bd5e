"""Captured prompts: passes of 17 to 512 tokens per row in one CUDA graph each, over any cache."""
