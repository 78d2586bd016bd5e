"""The bridge to transformers: its models with Lamina's caches. Only this package imports transformers."""
