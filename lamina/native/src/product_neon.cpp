// Products with NEON and the dot product instructions of ARMv8.2.
#include "product_rows.h"
#include "simd_neon.h"

extern const ProductPath product_neon = {product<Neon>, Neon::quantize};
