"""Native CPU code: C++ kernels in `src/`, built by the system's compiler and loaded with ctypes."""
