"""Attention and storage of 17 to 512 new tokens per row over any cache, found through its tables: captured prompts."""
