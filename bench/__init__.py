"""Benchmarks and checks that are run by hand; their results lie in bench/results."""
