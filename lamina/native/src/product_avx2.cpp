// Products with AVX2, FMA and F16C.
#include "product_rows.h"
#include "simd_avx2.h"

extern const ProductPath product_avx2 = {product<Avx2>, Avx2::quantize};
