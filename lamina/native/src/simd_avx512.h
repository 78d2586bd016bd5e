// The operations of simd_avx2.h with the instructions that AVX-512 VL and VNNI add for 32 bytes.
//
// One vector is computed on 32-byte registers: memory is the limit there, and Zen 4 runs 64-byte operations in two
// halves. Many vectors use 64-byte registers (panel_avx512.h).
#pragma once
#include "panel_avx512.h"
#include "simd_avx2.h"

namespace {

struct Avx512 : Avx2 {
    static constexpr int tile_outs = 4;
    static constexpr int64_t few_rows = 3;
    static constexpr bool has_panels = true;
    static void panels(const Product& p, const Kernels& k, const Activations& x, int64_t begin, int64_t end) { ::panels(p, k, x, begin, end); }

    static Floats dot_unsigned(Bytes codes, Bytes x) {
        return _mm256_cvtepi32_ps(_mm256_dpbusd_epi32(_mm256_setzero_si256(), codes, x));
    }
    // Codes + 128 are unsigned; 128 times the sum of x is subtracted.
    static Floats dot_signed(Bytes codes, Bytes x) {
        __m256i shifted = _mm256_dpbusd_epi32(_mm256_setzero_si256(), exclusive(codes, bytes(128)), x);
        return _mm256_cvtepi32_ps(_mm256_sub_epi32(shifted, _mm256_dpbusd_epi32(_mm256_setzero_si256(), bytes(128), x)));
    }
    static Bytes fifth_bits(uint32_t bits) { return _mm256_maskz_set1_epi8(__mmask32(bits), 16); }
};

}  // namespace
