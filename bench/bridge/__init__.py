"""Benchmark and outside tests of `lamina.bridge`: decoding beside transformers' own caches, and its own cache tests."""
