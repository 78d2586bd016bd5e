// Products with plain floats and float8, and decoding of rows to float32.
#pragma once
#include "product_kernels.h"

namespace {

template <class S, int format>
inline typename S::Floats load_weights(const void* row, int64_t i) {
    if constexpr (format == FORMAT_FLOAT32) return S::load(static_cast<const float*>(row) + i);
    if constexpr (format == FORMAT_BFLOAT16) return S::load_bfloat16(static_cast<const uint16_t*>(row) + i);
    if constexpr (format == FORMAT_FLOAT16) return S::load_half(static_cast<const uint16_t*>(row) + i);
    if constexpr (format == FORMAT_FP8) return S::load_e4m3(static_cast<const uint8_t*>(row) + i);
}

template <int format>
inline float weight_at(const void* row, int64_t i) {
    if constexpr (format == FORMAT_FLOAT32) return static_cast<const float*>(row)[i];
    if constexpr (format == FORMAT_BFLOAT16) return from_bfloat16(static_cast<const uint16_t*>(row)[i]);
    if constexpr (format == FORMAT_FLOAT16) return from_half(static_cast<const uint16_t*>(row)[i]);
    if constexpr (format == FORMAT_FP8) return from_e4m3(static_cast<const uint8_t*>(row)[i]) * 0x1p-8f;
}

// The scale of a row of float8 for inputs from `begin` on, times 2^8, which load_e4m3 leaves out; 1 for plain floats.
template <int format>
inline float scale_at(const Product& p, int64_t output, int64_t begin) {
    if (format != FORMAT_FP8) return 1;
    int64_t rows = p.scale_out ? p.scale_out : p.out, columns = (p.in + p.group - 1) / p.group;
    return 256 * read_scale(p.scales, p.scale_type, output / rows * columns + begin / p.group);
}

// `count` <= OUTS outputs of ROWS rows. `weights` points to OUTS rows, `bytes` apart.
template <class S, int format, int OUTS, int ROWS>
void plain_tile(const Product& p, const void* weights, int64_t bytes, int64_t output, int count, int64_t r0) {
    using Floats = typename S::Floats;
    constexpr int step = 4 * S::lanes, size = format == FORMAT_FLOAT32 ? 4 : format == FORMAT_FP8 ? 1 : 2;
    const char* rows[OUTS];
    const float* x = p.x + r0 * p.x_stride;
    Floats total[OUTS][ROWS];
    float rest[OUTS][ROWS] = {};
    for (int o = 0; o < OUTS; o++) {
        rows[o] = static_cast<const char*>(weights) + (o < count ? o : count - 1) * bytes;
        for (int r = 0; r < ROWS; r++) total[o][r] = S::zero();
    }
    int64_t group = format == FORMAT_FP8 ? p.group : p.in, ahead = rows_ahead(OUTS, bytes);
    for (int64_t begin = 0; begin < p.in; begin += group) {
        int64_t end = begin + group < p.in ? begin + group : p.in, i = begin;
        Floats acc[OUTS][ROWS];
        for (int o = 0; o < OUTS; o++)
            for (int r = 0; r < ROWS; r++) acc[o][r] = S::zero();
        for (; i + step <= end; i += step) {
            if (ROWS == 1)  // the next rows, in the order of their addresses
                for (int k = 0; k < OUTS * step * size; k += 64) S::template prefetch<false>(rows[0] + ahead + OUTS * i * size + k);
#pragma GCC unroll 4
            for (int k = 0; k < step; k += S::lanes) {
                Floats v[ROWS];
#pragma GCC unroll 4
                for (int r = 0; r < ROWS; r++) v[r] = S::load(x + r * p.x_stride + i + k);
#pragma GCC unroll 4
                for (int o = 0; o < OUTS; o++) {
                    Floats w = load_weights<S, format>(rows[o], i + k);
#pragma GCC unroll 4
                    for (int r = 0; r < ROWS; r++) acc[o][r] = S::multiply_add(w, v[r], acc[o][r]);
                }
            }
        }
        for (int o = 0; o < count; o++) {
            float scale = scale_at<format>(p, output + o, begin);
            for (int r = 0; r < ROWS; r++) {
                for (int64_t k = i; k < end; k++) rest[o][r] += scale * weight_at<format>(rows[o], k) * x[r * p.x_stride + k];
                total[o][r] = S::multiply_add(acc[o][r], S::all(scale), total[o][r]);
            }
        }
    }
    for (int o = 0; o < count; o++)
        for (int r = 0; r < ROWS; r++) p.y[(r0 + r) * p.y_stride + output + o] = S::sum(total[o][r]) + rest[o][r];
}

// One output of one row: the weights are one stream through memory, which is read 4 KiB ahead. Several outputs at a time
// would be several short streams, at 80 % of the bandwidth.
template <class S, int format>
float plain_stream(const Product& p, const char* weights, const float* x) {
    using Floats = typename S::Floats;
    constexpr int step = 4 * S::lanes, size = format == FORMAT_FLOAT32 ? 4 : 2, ahead = 4096;
    Floats acc[4] = {S::zero(), S::zero(), S::zero(), S::zero()};
    int64_t i = 0;
    for (; i + step <= p.in; i += step) {
#pragma GCC unroll 4
        for (int k = 0; k < step * size; k += 64) S::template prefetch<false>(weights + i * size + ahead + k);
#pragma GCC unroll 4
        for (int k = 0; k < 4; k++)
            acc[k] = S::multiply_add(load_weights<S, format>(weights, i + k * S::lanes), S::load(x + i + k * S::lanes), acc[k]);
    }
    float rest = 0;
    for (; i < p.in; i++) rest += weight_at<format>(weights, i) * x[i];
    Floats one = S::all(1);
    return S::sum(S::multiply_add(S::multiply_add(acc[0], one, acc[1]), one, S::multiply_add(acc[2], one, acc[3]))) + rest;
}

template <class S, int format>
void plain_one_row(const Product& p, int64_t r, int64_t begin, int64_t end) {
    int64_t bytes = row_bytes(format, p.in);
    if constexpr (format != FORMAT_FP8) {
        for (int64_t o = begin; o < end; o++) {
            const char* weights = static_cast<const char*>(p.codes) + o * bytes;
            p.y[r * p.y_stride + o] = plain_stream<S, format>(p, weights, p.x + r * p.x_stride);
        }
        return;
    }
    for (int64_t o = begin; o < end; o += 4) {
        const char* weights = static_cast<const char*>(p.codes) + o * bytes;
        plain_tile<S, format, 4, 1>(p, weights, bytes, o, int(end - o < 4 ? end - o : 4), r);
    }
}

// One row of a plain or float8 weight as float32.
template <class S, int format>
void widen_row(const Product& p, int64_t output, float* to) {
    const char* row = static_cast<const char*>(p.codes) + output * row_bytes(format, p.in);
    int64_t group = format == FORMAT_FP8 ? p.group : p.in;
    for (int64_t begin = 0; begin < p.in; begin += group) {
        int64_t end = begin + group < p.in ? begin + group : p.in, i = begin;
        float scale = scale_at<format>(p, output, begin);
        for (; i + S::lanes <= end; i += S::lanes) S::store(to + i, S::multiply(load_weights<S, format>(row, i), S::all(scale)));
        for (; i < end; i++) to[i] = weight_at<format>(row, i) * scale;
    }
}

// One decoded row as float32: scale * code + min.
template <class S, bool is_signed>
void dequantize_row(const Decoded& w, bool has_min, bool by_16, int64_t in, float* to) {
    using Floats = typename S::Floats;
    for (int64_t g = 0; g < in / 32; g++) {
        auto codes = S::load_bytes(w.codes + 32 * g);
        each_of(std::make_integer_sequence<int, 32 / S::lanes>(), [&](auto index) __attribute__((always_inline)) {
            constexpr int i = decltype(index)::value;
            int64_t at = by_16 ? 2 * g + i * S::lanes / 16 : g;
            Floats min = has_min ? S::all(w.mins[at]) : S::zero();
            S::store(to + 32 * g + i * S::lanes, S::multiply_add(S::template widen<i, is_signed>(codes), S::all(w.scales[at]), min));
        });
    }
}

}  // namespace
