// The operations of simd_avx2.h with the instructions that AVX-512 VL and VNNI add for 32 bytes, and panels of 64 bytes.
//
// One vector is computed on 32-byte registers: memory is the limit there, and Zen 4 runs 64-byte operations in two
// halves. Many vectors use 64-byte registers.
#pragma once
#include "simd_avx2.h"

namespace {

// A panel is 16 outputs: 4 inputs of each in 64 bytes. VNNI multiplies unsigned codes; signed ones have 128 added.
struct WideAvx512 {
    using Floats = __m512;
    static constexpr int lanes = 16, rows = 8, least_rows = 12;
    static constexpr bool sums_in_32_bits = true, unsigned_codes = true;
    static Floats zero() { return _mm512_setzero_ps(); }
    static Floats all(float value) { return _mm512_set1_ps(value); }
    static Floats load(const float* at) { return _mm512_load_ps(at); }
    static Floats multiply(Floats a, Floats b) { return _mm512_mul_ps(a, b); }
    static Floats multiply_add(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
    static Floats load_some(const float* at, int count) { return _mm512_maskz_loadu_ps(__mmask16((1u << count) - 1), at); }
    static void store_some(float* to, Floats a, int count) { _mm512_mask_storeu_ps(to, __mmask16((1u << count) - 1), a); }

    // out[r] = the dot products of 4 * steps inputs of row r with the panel's codes [steps, 16, 4].
    template <class C, int ROWS, int steps>
    static void dots(const uint8_t* w, const int8_t* x, int64_t stride, Floats* out) {
        __m512i c[steps];
#pragma GCC unroll 8
        for (int i = 0; i < steps; i++) c[i] = _mm512_load_si512(w + 64 * i);
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; r++) {
            __m512i dot = _mm512_setzero_si512();
#pragma GCC unroll 8
            for (int i = 0; i < steps; i++)
                dot = _mm512_dpbusd_epi32(dot, c[i], _mm512_set1_epi32(read<int32_t>(x + r * stride + 4 * i)));
            out[r] = _mm512_cvtepi32_ps(dot);
        }
    }

    // to[stride * j + i] = rows[i][at + j] for i, j < 16
    static void transpose(const void* const* rows, int64_t at, int32_t* to, int64_t stride) {
        __m512i a[16], b[16];
        for (int i = 0; i < 16; i++) a[i] = _mm512_loadu_si512(static_cast<const int32_t*>(rows[i]) + at);
        for (int i = 0; i < 16; i += 2) {
            b[i] = _mm512_unpacklo_epi32(a[i], a[i + 1]);
            b[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 1]);
        }
        for (int i = 0; i < 16; i += 4) {  // a[i + k]: element k of each 16 bytes of rows i..i+3
            a[i] = _mm512_unpacklo_epi64(b[i], b[i + 2]);
            a[i + 1] = _mm512_unpackhi_epi64(b[i], b[i + 2]);
            a[i + 2] = _mm512_unpacklo_epi64(b[i + 1], b[i + 3]);
            a[i + 3] = _mm512_unpackhi_epi64(b[i + 1], b[i + 3]);
        }
        for (int k = 0; k < 4; k++) {
            __m512i low = _mm512_shuffle_i32x4(a[k], a[4 + k], 0x88), high = _mm512_shuffle_i32x4(a[8 + k], a[12 + k], 0x88);
            __m512i low_odd = _mm512_shuffle_i32x4(a[k], a[4 + k], 0xdd), high_odd = _mm512_shuffle_i32x4(a[8 + k], a[12 + k], 0xdd);
            _mm512_storeu_si512(to + k * stride, _mm512_shuffle_i32x4(low, high, 0x88));
            _mm512_storeu_si512(to + (4 + k) * stride, _mm512_shuffle_i32x4(low_odd, high_odd, 0x88));
            _mm512_storeu_si512(to + (8 + k) * stride, _mm512_shuffle_i32x4(low, high, 0xdd));
            _mm512_storeu_si512(to + (12 + k) * stride, _mm512_shuffle_i32x4(low_odd, high_odd, 0xdd));
        }
    }
};

struct Avx512 : Avx2 {
    using Wide = WideAvx512;
    static constexpr int tile_outs = 4;
    static constexpr int64_t few_rows = 3;
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
