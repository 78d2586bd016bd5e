"""Benchmarks and checks that are run by hand; their results are in bench/results."""
