// The kernels for avx512.
#include "kernels.h"

lamina::KernelTable lamina::kernels_avx512() { return ALL; }
