// The kernels for the instructions that every processor of this kind has.
#include "kernels.h"

lamina::KernelTable lamina::kernels_baseline() { return ALL; }
