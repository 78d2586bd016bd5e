"""The decode step as a native program on a CPU: what a captured CUDA graph is on a GPU."""
