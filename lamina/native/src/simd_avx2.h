// 32 bytes and 8 floats in AVX2 registers: the operations that the product kernels are written in.
//
// Lane i of the 8 sums of a dot product holds values 4i..4i+3, so lanes 0-3 belong to the first 16 values.
#pragma once
#include <immintrin.h>

#include "product_formats.h"

namespace {

// A panel is 8 outputs: 4 inputs of each in 32 bytes. Products are added in 16 bits as far as they fit there.
struct WideAvx2 {
    using Floats = __m256;
    static constexpr int lanes = 8, rows = 4, least_rows = 32;  // rows of a tile; rows from which on float panels are faster
    static constexpr bool sums_in_32_bits = false, unsigned_codes = false;
    static Floats zero() { return _mm256_setzero_ps(); }
    static Floats all(float value) { return _mm256_set1_ps(value); }
    static Floats load(const float* at) { return _mm256_load_ps(at); }
    static Floats multiply(Floats a, Floats b) { return _mm256_mul_ps(a, b); }
    static Floats multiply_add(Floats a, Floats b, Floats c) { return _mm256_fmadd_ps(a, b, c); }
    static __m256i first(int count) { return _mm256_cmpgt_epi32(_mm256_set1_epi32(count), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7)); }
    static Floats load_some(const float* at, int count) { return _mm256_maskload_ps(at, first(count)); }
    static void store_some(float* to, Floats a, int count) {
        if (count >= 8) _mm256_storeu_ps(to, a);
        else _mm256_maskstore_ps(to, first(count), a);
    }

    // out[r] = the dot products of 4 * steps inputs of row r with the panel's codes [steps, 8, 4].
    template <class C, int ROWS, int steps>
    static void dots(const uint8_t* w, const int8_t* x, int64_t stride, Floats* out) {
        constexpr int terms = C::terms < steps ? C::terms : steps;
        __m256i total[ROWS];
        for (int r = 0; r < ROWS; r++) total[r] = _mm256_setzero_si256();
#pragma GCC unroll 1  // unrolled, the compiler would load all codes at once, for which there are too few registers
        for (int i = 0; i < steps; i += terms) {
            __m256i some[ROWS];
            for (int r = 0; r < ROWS; r++) some[r] = _mm256_setzero_si256();
#pragma GCC unroll 2
            for (int k = i; k < i + terms; k++) {
                __m256i c = _mm256_load_si256(reinterpret_cast<const __m256i*>(w + 32 * k));
#pragma GCC unroll 8
                for (int r = 0; r < ROWS; r++) {
                    __m256i v = _mm256_set1_epi32(read<int32_t>(x + r * stride + 4 * k));
                    if (C::is_signed) v = _mm256_maddubs_epi16(_mm256_abs_epi8(c), _mm256_sign_epi8(v, c));
                    else v = _mm256_maddubs_epi16(c, v);
                    some[r] = terms == 1 ? v : _mm256_add_epi16(some[r], v);
                }
            }
#pragma GCC unroll 8
            for (int r = 0; r < ROWS; r++) total[r] = _mm256_add_epi32(total[r], _mm256_madd_epi16(some[r], _mm256_set1_epi16(1)));
        }
        for (int r = 0; r < ROWS; r++) out[r] = _mm256_cvtepi32_ps(total[r]);
    }

    // to[stride * j + i] = rows[i][at + j] for i, j < 8
    static void transpose(const void* const* rows, int64_t at, int32_t* to, int64_t stride) {
        __m256 a[8], b[8];
        for (int i = 0; i < 8; i++) a[i] = _mm256_loadu_ps(static_cast<const float*>(rows[i]) + at);
        for (int i = 0; i < 8; i += 2) {
            b[i] = _mm256_unpacklo_ps(a[i], a[i + 1]);
            b[i + 1] = _mm256_unpackhi_ps(a[i], a[i + 1]);
        }
        for (int i = 0; i < 8; i += 4)  // a[i + k]: elements k and k + 4 of rows i..i+3
            for (int k = 0; k < 2; k++) {
                a[i + 2 * k] = _mm256_shuffle_ps(b[i + k], b[i + 2 + k], 0x44);
                a[i + 2 * k + 1] = _mm256_shuffle_ps(b[i + k], b[i + 2 + k], 0xee);
            }
        for (int k = 0; k < 4; k++) {
            float* out = reinterpret_cast<float*>(to) + k * stride;
            _mm256_storeu_ps(out, _mm256_permute2f128_ps(a[k], a[4 + k], 0x20));
            _mm256_storeu_ps(out + 4 * stride, _mm256_permute2f128_ps(a[k], a[4 + k], 0x31));
        }
    }
};

struct Avx2 {
    using Bytes = __m256i;
    using Floats = __m256;
    static constexpr int lanes = 8;
    static constexpr int tile_outs = 2;       // outputs per float tile of four rows: 16 registers hold no more
    static constexpr int64_t few_rows = 3;    // up to here, rows are computed one by one
    using Wide = WideAvx2;

    static Bytes load_bytes(const void* at) { return _mm256_loadu_si256(static_cast<const __m256i*>(at)); }
    static void store_bytes(void* at, Bytes a) { _mm256_storeu_si256(static_cast<__m256i*>(at), a); }
    static Bytes bytes(uint8_t value) { return _mm256_set1_epi8(char(value)); }
    static Bytes both(Bytes a, Bytes b) { return _mm256_and_si256(a, b); }
    static Bytes either(Bytes a, Bytes b) { return _mm256_or_si256(a, b); }
    static Bytes subtract(Bytes a, Bytes b) { return _mm256_sub_epi8(a, b); }
    static Bytes exclusive(Bytes a, Bytes b) { return _mm256_xor_si256(a, b); }
    template <int n>
    static Bytes right(Bytes a, uint8_t mask) { return both(_mm256_srli_epi16(a, n), bytes(mask)); }
    template <int n>
    static Bytes left(Bytes a, uint8_t mask) { return both(_mm256_slli_epi16(a, n), bytes(mask)); }

    // The low nibbles of 16 bytes, then the high ones.
    static Bytes nibbles(const void* at) {
        __m256i twice = _mm256_broadcastsi128_si256(_mm_loadu_si128(static_cast<const __m128i*>(at)));
        return both(_mm256_srlv_epi32(twice, _mm256_setr_epi32(0, 0, 0, 0, 4, 4, 4, 4)), bytes(15));
    }
    static Bytes look_up(const int8_t* table, Bytes index) {
        return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(_mm_load_si128(reinterpret_cast<const __m128i*>(table))), index);
    }
    // Byte i is 16 if bit i is set.
    static Bytes fifth_bits(uint32_t bits) {
        __m256i spread = _mm256_shuffle_epi8(_mm256_set1_epi32(int(bits)), _mm256_setr_epi64x(0, 0x0101010101010101,  //
                                                                     0x0202020202020202, 0x0303030303030303));
        __m256i each = _mm256_set1_epi64x(int64_t(0x8040201008040201));
        return both(_mm256_cmpeq_epi8(both(spread, each), each), bytes(16));
    }

    static Floats zero() { return _mm256_setzero_ps(); }
    static Floats all(float value) { return _mm256_set1_ps(value); }
    static Floats load(const float* at) { return _mm256_loadu_ps(at); }
    static void store(float* at, Floats a) { _mm256_storeu_ps(at, a); }
    static Floats multiply(Floats a, Floats b) { return _mm256_mul_ps(a, b); }
    static Floats add(Floats a, Floats b) { return _mm256_add_ps(a, b); }
    static Floats multiply_add(Floats a, Floats b, Floats c) { return _mm256_fmadd_ps(a, b, c); }
    static float sum(Floats a) {
        __m128 four = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
        four = _mm_add_ps(four, _mm_movehl_ps(four, four));
        return _mm_cvtss_f32(_mm_add_ss(four, _mm_movehdup_ps(four)));
    }
    static float half(const void* at) { return _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(read<uint16_t>(at)))); }

    // The float16 at each of four places, twice in a row.
    static Floats twice_half(const void* a, const void* b, const void* c, const void* d) {
        __m128i all = _mm_cvtsi32_si128(read<uint16_t>(a));
        all = _mm_insert_epi16(all, read<int16_t>(b), 1);
        all = _mm_insert_epi16(all, read<int16_t>(c), 2);
        all = _mm_insert_epi16(all, read<int16_t>(d), 3);
        return _mm256_cvtph_ps(_mm_unpacklo_epi16(all, all));
    }
    // Two float16 at each of four places.
    static Floats two_halves(const void* a, const void* b, const void* c, const void* d) {
        __m128i all = _mm_cvtsi32_si128(read<int32_t>(a));
        all = _mm_insert_epi32(all, read<int32_t>(b), 1);
        all = _mm_insert_epi32(all, read<int32_t>(c), 2);
        return _mm256_cvtph_ps(_mm_insert_epi32(all, read<int32_t>(d), 3));
    }
    static Floats twice(float a, float b, float c, float d) { return interleave(_mm_setr_ps(a, b, c, d), _mm_setr_ps(a, b, c, d)); }
    // a, a * e, b, b * f, …
    static Floats four_pairs(float a, float b, float c, float d, float e, float f, float g, float h) {
        __m128 scales = _mm_setr_ps(a, b, c, d);
        return interleave(scales, _mm_mul_ps(scales, _mm_setr_ps(e, f, g, h)));
    }
    static Floats interleave(__m128 a, __m128 b) {
        return _mm256_insertf128_ps(_mm256_castps128_ps256(_mm_unpacklo_ps(a, b)), _mm_unpackhi_ps(a, b), 1);
    }
    static Floats from_uint8(uint64_t bytes) { return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_cvtsi64_si128(int64_t(bytes)))); }
    static Floats from_int8(uint64_t bytes) { return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_cvtsi64_si128(int64_t(bytes)))); }
    // Eight integers of 6 bits, less 32: 4 low bits of each in `low`, 2 high bits in `high`.
    static Floats bit_fields(uint32_t low, uint32_t high) {
        __m256i four = _mm256_srlv_epi32(_mm256_set1_epi32(int(low)), _mm256_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28));
        __m256i two = _mm256_srlv_epi32(_mm256_set1_epi32(int(high)), _mm256_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14));
        four = both(four, _mm256_set1_epi32(15));
        two = _mm256_slli_epi32(both(two, _mm256_set1_epi32(3)), 4);
        return _mm256_cvtepi32_ps(_mm256_sub_epi32(either(four, two), _mm256_set1_epi32(32)));
    }
    // Pairs of floats, four times.
    static Floats pair(const float* at) { return _mm256_castpd_ps(_mm256_broadcast_sd(reinterpret_cast<const double*>(at))); }
    // at[0] in lanes 0-3, at[1] in lanes 4-7.
    static Floats halves(const float* at) { return _mm256_permutevar8x32_ps(pair(at), _mm256_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1)); }

    // Dot products of unsigned codes up to 127 with signed ones, 4 values per lane.
    static Floats dot_unsigned(Bytes codes, Bytes x) {
        __m256i pairs = _mm256_maddubs_epi16(codes, x);
        return _mm256_cvtepi32_ps(_mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
    }
    // |code| * (sign of code) * x: at most 2 * 128 * 127 in 16 bits.
    static Floats dot_signed(Bytes codes, Bytes x) {
        return dot_unsigned(_mm256_abs_epi8(codes), _mm256_sign_epi8(x, codes));
    }

    // Codes 8i..8i+7 as floats.
    template <int i, bool is_signed>
    static Floats widen(Bytes codes) {
        __m128i half = i < 2 ? _mm256_castsi256_si128(codes) : _mm256_extracti128_si256(codes, 1);
        if (i % 2) half = _mm_unpackhi_epi64(half, half);
        return _mm256_cvtepi32_ps(is_signed ? _mm256_cvtepi8_epi32(half) : _mm256_cvtepu8_epi32(half));
    }

    static Floats load_bfloat16(const uint16_t* at) {
        __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at)));
        return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
    }
    static Floats load_half(const uint16_t* at) { return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at))); }
    // 8 e4m3 codes times 2^-8: sign, exponent and mantissa in the fields of float16. Sign-extended and shifted, the sign
    // is in bits 15 and 14, of which the second is cleared.
    static Floats load_e4m3(const uint8_t* at) {
        __m128i wide = _mm_cvtepi8_epi16(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(at)));
        return _mm256_cvtph_ps(_mm_and_si128(_mm_slli_epi16(wide, 7), _mm_set1_epi16(int16_t(0xbfff))));
    }

    static void quantize(const float* x, int8_t* codes, float* scale, int32_t* sums) {
        __m256 v[4], largest = zero(), sign = all(-0.0f);
        __m256 finite = _mm256_castsi256_ps(_mm256_set1_epi32(-1)), limit = all(3.402823466e38f);
        for (int i = 0; i < 4; i++) {
            v[i] = load(x + 8 * i);
            __m256 magnitude = _mm256_andnot_ps(sign, v[i]);
            largest = _mm256_max_ps(largest, magnitude);
            finite = _mm256_and_ps(finite, _mm256_cmp_ps(magnitude, limit, _CMP_LE_OQ));
        }
        if (_mm256_movemask_ps(finite) != 255) return product_reference.quantize(x, codes, scale, sums);
        __m128 most_of_4 = _mm_max_ps(_mm256_castps256_ps128(largest), _mm256_extractf128_ps(largest, 1));
        most_of_4 = _mm_max_ps(most_of_4, _mm_movehl_ps(most_of_4, most_of_4));
        float most = _mm_cvtss_f32(_mm_max_ss(most_of_4, _mm_movehdup_ps(most_of_4)));
        *scale = most / 127;
        __m256 inverse = all(most > 1e-30f ? 127 / most : 0);
        __m256i q[4];
        for (int i = 0; i < 4; i++) q[i] = _mm256_cvtps_epi32(multiply(v[i], inverse));
        // packs works within 16-byte halves: dwords of the result come in the order 0 2 4 6, 1 3 5 7
        __m256i packed = _mm256_packs_epi16(_mm256_packs_epi32(q[0], q[1]), _mm256_packs_epi32(q[2], q[3]));
        packed = _mm256_permutevar8x32_epi32(packed, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(codes), packed);
        __m256i both = _mm256_hadd_epi32(_mm256_add_epi32(q[0], q[1]), _mm256_add_epi32(q[2], q[3]));
        __m128i four = _mm_add_epi32(_mm256_castsi256_si128(both), _mm256_extracti128_si256(both, 1));
        _mm_storel_epi64(reinterpret_cast<__m128i*>(sums), _mm_hadd_epi32(four, four));
    }

    // Into the first cache, or only into the second.
    template <bool far>
    static void prefetch(const void* at) { _mm_prefetch(static_cast<const char*>(at), far ? _MM_HINT_T1 : _MM_HINT_T0); }
};

}  // namespace
