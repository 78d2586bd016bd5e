// The kernels for avx2.
#include "kernels.h"

lamina::KernelTable lamina::kernels_avx2() { return ALL; }
