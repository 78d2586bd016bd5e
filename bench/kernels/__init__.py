"""Checks and timings of the kernels on a GPU, one module for each package: `python -m bench.kernels.products` …"""
