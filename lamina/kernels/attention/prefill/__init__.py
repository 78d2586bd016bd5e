"""Attention over a View of keys in any order, without a query × key mask: plain passes of many and of few queries."""
