// Many activation rows with AVX-512 VNNI: panels of 16 outputs, one output per lane.
//
// A panel's codes are decoded once and transposed, so that one register holds 4 inputs of 16 outputs. Eight VNNI
// instructions then sum a group of 32 inputs of 16 outputs, and scales are applied once per group, not once per 4 values.
#pragma once
#include <immintrin.h>

#include "product_rows.h"

namespace {

struct Panel {
    uint8_t* codes;  // [in / 4, 16, 4], unsigned
    float *scales, *mins;  // [in / 32 (or in / 16), 16]; mins are multiplied by what `Activations::sums` are divided by
};

// to[16 * j + i] = rows[i][j] for j < count, rounded up to 16.
inline void transpose_16(const int32_t* const* rows, int64_t count, int32_t* to) {
    for (int64_t j = 0; j < count; j += 16) {
        __m512i a[16], b[16];
        for (int i = 0; i < 16; i++) a[i] = _mm512_loadu_si512(rows[i] + j);
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
            _mm512_storeu_si512(to + 16 * (j + k), _mm512_shuffle_i32x4(low, high, 0x88));
            _mm512_storeu_si512(to + 16 * (j + 4 + k), _mm512_shuffle_i32x4(low_odd, high_odd, 0x88));
            _mm512_storeu_si512(to + 16 * (j + 8 + k), _mm512_shuffle_i32x4(low, high, 0xdd));
            _mm512_storeu_si512(to + 16 * (j + 12 + k), _mm512_shuffle_i32x4(low_odd, high_odd, 0xdd));
        }
    }
}

template <int ROWS, bool by_16>
void panel_tile(const Product& p, const Activations& x, const Panel& w, bool has_min, int64_t output, __mmask16 outputs, int64_t r0) {
    int64_t groups = p.in / 32, parts = by_16 ? 2 : 1;
    const int8_t* codes = x.codes + r0 * p.in;
    const float *scales = x.scales + r0 * groups, *sums = x.sums + r0 * groups * parts;
    __m512 acc[ROWS];
    for (int r = 0; r < ROWS; r++) acc[r] = _mm512_setzero_ps();
    for (int64_t g = 0; g < groups; g++) {
        __m512i c[8];
#pragma GCC unroll 8
        for (int i = 0; i < 8; i++) c[i] = _mm512_load_si512(w.codes + 64 * (8 * g + i));
#pragma GCC unroll 2
        for (int part = 0; part < (by_16 ? 2 : 1); part++) {
            int64_t at = g * parts + part;
            __m512 scale = _mm512_load_ps(w.scales + 16 * at), min = _mm512_setzero_ps();
            if (has_min) min = _mm512_load_ps(w.mins + 16 * at);
#pragma GCC unroll 8
            for (int r = 0; r < ROWS; r++) {
                const int8_t* v = codes + r * p.in + 32 * g + 16 * part;
                __m512i dot = _mm512_setzero_si512();
#pragma GCC unroll 8
                for (int i = 0; i < (by_16 ? 4 : 8); i++)
                    dot = _mm512_dpbusd_epi32(dot, c[4 * part + i], _mm512_set1_epi32(read<int32_t>(v + 4 * i)));
                __m512 xs = _mm512_set1_ps(scales[r * groups + g]);
                acc[r] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dot), _mm512_mul_ps(scale, xs), acc[r]);
                if (has_min) acc[r] = _mm512_fmadd_ps(min, _mm512_set1_ps(sums[r * groups * parts + at]), acc[r]);
            }
        }
    }
    for (int r = 0; r < ROWS; r++) _mm512_mask_storeu_ps(p.y + (r0 + r) * p.y_stride + output, outputs, acc[r]);
}

template <bool by_16>
void panel_rows(const Product& p, const Activations& x, const Panel& w, bool has_min, int64_t output, __mmask16 outputs) {
    int64_t r = 0;
    for (; r + 8 <= p.rows; r += 8) panel_tile<8, by_16>(p, x, w, has_min, output, outputs, r);
    if (r + 4 <= p.rows) panel_tile<4, by_16>(p, x, w, has_min, output, outputs, r), r += 4;
    if (r + 2 <= p.rows) panel_tile<2, by_16>(p, x, w, has_min, output, outputs, r), r += 2;
    if (r < p.rows) panel_tile<1, by_16>(p, x, w, has_min, output, outputs, r);
}

inline void panels(const Product& p, const Kernels& k, const Activations& x, int64_t begin, int64_t end) {
    static thread_local Scratch scratch;
    int64_t count = k.by_16 ? p.in / 16 : p.in / 32, padded = (count + 15) / 16 * 16, in = (p.in + 63) / 64 * 64;
    scratch.reset(2 * 16 * in + 4 * 16 * 4 * padded);
    Decoded rows[16];
    for (Decoded& row : rows) row = {scratch.take<uint8_t>(in), scratch.take<float>(padded), scratch.take<float>(padded)};
    Panel w = {scratch.take<uint8_t>(16 * in), scratch.take<float>(16 * padded), scratch.take<float>(16 * padded)};
    bool has_min = k.has_min || k.is_signed;
    __m512 spread = _mm512_set1_ps(k.by_16 ? 4 : 8);
    for (int64_t o = begin; o < end; o += 16) {
        int64_t here = end - o < 16 ? end - o : 16;
        const int32_t *codes[16], *scales[16], *mins[16];
        for (int i = 0; i < 16; i++) {
            const Decoded& row = rows[i < here ? i : 0];
            if (i < here) k.decode_row(p, o + i, row);
            codes[i] = reinterpret_cast<const int32_t*>(row.codes);
            scales[i] = reinterpret_cast<const int32_t*>(row.scales);
            mins[i] = reinterpret_cast<const int32_t*>(row.mins);
        }
        transpose_16(codes, p.in / 4, reinterpret_cast<int32_t*>(w.codes));
        transpose_16(scales, count, reinterpret_cast<int32_t*>(w.scales));
        if (k.has_min) transpose_16(mins, count, reinterpret_cast<int32_t*>(w.mins));
        if (k.is_signed)  // codes + 128, and 128 * scale less
            for (int64_t i = 0; i < 16 * p.in; i += 64)
                _mm512_store_si512(w.codes + i, _mm512_xor_si512(_mm512_load_si512(w.codes + i), _mm512_set1_epi8(char(128))));
        for (int64_t i = 0; has_min && i < 16 * count; i += 16) {
            __m512 min = k.has_min ? _mm512_load_ps(w.mins + i) : _mm512_setzero_ps();
            if (k.is_signed) min = _mm512_fnmadd_ps(_mm512_set1_ps(128), _mm512_load_ps(w.scales + i), min);
            _mm512_store_ps(w.mins + i, _mm512_mul_ps(min, spread));
        }
        __mmask16 outputs = __mmask16((1u << here) - 1);
        if (k.by_16) panel_rows<true>(p, x, w, has_min, o, outputs);
        else panel_rows<false>(p, x, w, has_min, o, outputs);
    }
}

}  // namespace
