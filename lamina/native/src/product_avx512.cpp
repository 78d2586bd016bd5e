// Products with AVX-512 (F, BW, VL, DQ) and VNNI.
#include "product_rows.h"
#include "simd_avx512.h"

extern const ProductPath product_avx512 = {product<Avx512>, Avx512::quantize};
