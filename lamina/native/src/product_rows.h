// Which kernels compute a product: one row at a time, several rows over weights that stay in the thread's cache, or
// panels (product_panels.h). Nothing here depends on the format.
#pragma once
#include "product_panels.h"

namespace {

constexpr int MOST_FEW_ROWS = 8;  // the largest few_rows of simd_*.h

inline Decoded take_decoded(Scratch& scratch, int64_t in) {
    return {scratch.take<uint8_t>(in), scratch.take<float>(in / 16), scratch.take<float>(in / 16)};
}

inline int64_t decoded_bytes(int64_t in) { return in + in / 2 + 256; }

// Float32 activations: rows of the weight as float32, OUTS at a time, times the activation rows.
template <class S, class ToFloat>
void float_rows(const Product& p, ToFloat&& to_float, int64_t begin, int64_t end) {
    constexpr int OUTS = S::tile_outs;
    static thread_local Scratch scratch;
    int64_t stride = (p.in + 15) / 16 * 16 + 16, bytes = 4 * stride;
    scratch.reset(OUTS * bytes);
    float* values = scratch.take<float>(OUTS * stride);
    for (int64_t o = begin; o < end; o += OUTS) {
        int count = int(end - o < OUTS ? end - o : OUTS);
        for (int i = 0; i < count; i++) to_float(o + i, values + i * stride);
        int64_t r = 0;
        for (; r + 4 <= p.rows; r += 4) plain_tile<S, FORMAT_FLOAT32, OUTS, 4>(p, values, bytes, o, count, r);
        for (; r < p.rows; r++) plain_tile<S, FORMAT_FLOAT32, OUTS, 1>(p, values, bytes, o, count, r);
    }
}

template <class S, class ToFloat>
void several_float_rows(const Product& p, ToFloat&& to_float, int64_t begin, int64_t end) {
    if (p.rows >= S::Wide::least_rows) float_panels<typename S::Wide>(p, to_float, begin, end);
    else float_rows<S>(p, to_float, begin, end);
}

template <class S, int format>
void plain(const Product& p, int64_t begin, int64_t end) {
    if (p.rows == 1) return plain_one_row<S, format>(p, 0, begin, end);
    several_float_rows<S>(p, [&](int64_t output, float* to) { widen_row<S, format>(p, output, to); }, begin, end);
}

template <class S>
void packed_float(const Product& p, const Kernels& k, int64_t begin, int64_t end) {
    static thread_local Scratch scratch;
    scratch.reset(decoded_bytes(p.in));
    Decoded w = take_decoded(scratch, p.in);
    several_float_rows<S>(p, [&](int64_t output, float* to) {
        k.decode_row(p, output, w);
        if (k.is_signed) dequantize_row<S, true>(w, k.has_min, k.by_16, p.in, to);
        else dequantize_row<S, false>(w, k.has_min, k.by_16, p.in, to);
    }, begin, end);
}

// Row r of the activations as one_row reads it; `scratch` has room for its scales and sums.
inline Activations one_activation_row(const Product& p, const Kernels& k, int64_t r, Scratch& scratch) {
    int64_t width = k.by_16 ? 16 : 32, count = p.in / width;
    const float *xs = p.qx_scales + r * (p.in / 32), *x = p.x + r * p.x_stride;
    const int8_t* codes = p.qx + r * p.in;
    float *scales = scratch.take<float>(k.in_pairs ? 2 * count : count), *sums = k.in_pairs ? scales + 1 : scratch.take<float>(count);
    int step = k.in_pairs ? 2 : 1;
    const int32_t* code_sums = p.qx_sums + r * (p.in / 16);
    for (int64_t g = 0; g < count; g++) {
        float scale = p.activations == 1 ? xs[g * width / 32] : 1, sum = 0;
        if (p.activations == 1) {
            sum = scale * float(k.by_16 ? code_sums[g] : code_sums[2 * g] + code_sums[2 * g + 1]);
        } else if (k.has_min) {
            for (int64_t i = g * width; i < (g + 1) * width; i++) sum += x[i];
        }
        scales[step * g] = scale;
        sums[step * g] = sum;
    }
    return {codes, x, scales, sums};
}

// A few rows: each passes over outputs whose weights stay in the first cache, as if it were the only one.
inline void few_rows(const Product& p, const Kernels& k, int64_t begin, int64_t end) {
    static thread_local Scratch scratch;
    int64_t strip = p.rows == 1 ? end - begin : (12 << 10) / row_bytes(p.format, p.in) / 4 * 4;
    if (strip < 4) strip = 4;
    Activations x[MOST_FEW_ROWS];
    scratch.reset(p.rows * (p.in + 256));
    for (int64_t r = 0; r < p.rows; r++) x[r] = one_activation_row(p, k, r, scratch);
    bool far = p.rows == 1 && is_far(rows_ahead(4, row_bytes(p.format, p.in)));
    Kernels::OneRow* one_row = p.activations == 0 ? k.float_row : far ? k.int8_row_far : k.int8_row;
    for (int64_t o = begin; o < end; o += strip)
        for (int64_t r = 0; r < p.rows; r++) one_row(p, x[r], r, o, o + strip < end ? o + strip : end);
}

// The activations of all rows, with sums of groups of 32 (or 16: by_16) values.
inline Activations activation_rows(const Product& p, const Kernels& k) {
    static thread_local Scratch scratch;
    const int64_t groups = p.rows * (p.in / 32), count = k.by_16 ? 2 * groups : groups;
    scratch.reset(4 * count + 64);
    float* sums = scratch.take<float>(count);
    const int32_t* of_16 = p.qx_sums;
    const float* scales = p.qx_scales;
    if (k.by_16) {
        for (int64_t g = 0; g < count; g++) sums[g] = scales[g / 2] * float(of_16[g]);
    } else {
        for (int64_t g = 0; g < count; g++) sums[g] = scales[g] * float(of_16[2 * g] + of_16[2 * g + 1]);
    }
    return {p.qx, nullptr, p.qx_scales, sums};
}

template <class S>
void product(const Product& p, int64_t begin, int64_t end) {
    switch (p.format) {
        case FORMAT_FLOAT32: return plain<S, FORMAT_FLOAT32>(p, begin, end);
        case FORMAT_BFLOAT16: return plain<S, FORMAT_BFLOAT16>(p, begin, end);
        case FORMAT_FLOAT16: return plain<S, FORMAT_FLOAT16>(p, begin, end);
        case FORMAT_FP8: return plain<S, FORMAT_FP8>(p, begin, end);
    }
    Kernels k = kernels<S>(p);
    if (p.rows <= S::few_rows) return few_rows(p, k, begin, end);
    if (p.activations == 0) return packed_float<S>(p, k, begin, end);
    int8_panels<typename S::Wide>(p, k, activation_rows(p, k), begin, end);
}

}  // namespace
