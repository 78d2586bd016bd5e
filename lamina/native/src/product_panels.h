// Many activation rows: panels of outputs, one output per lane, written once for every set of wide registers (W: `Wide`
// in simd_*.h). Nothing here depends on the format.
//
// int8: a panel's codes are decoded once and transposed, so that one register holds 4 inputs of every output. A group of
// 32 inputs is 8 such registers, and scales are applied once per group, not once per 4 values.
// float32: a panel is dequantized once and transposed, two registers of outputs wide, and multiplied as any matrix is: all
// rows pass over as many inputs as fit the first cache before they go on to the next ones; sums stay in y meanwhile.
#pragma once
#include <algorithm>

#include "product_plain.h"
#include "scratch.h"

namespace {

struct Panel {
    uint8_t* codes;  // [in / 4, lanes, 4]
    float *scales, *mins;  // [in / 32 (or in / 16), lanes]; mins are multiplied by `Activations::sums`
};

constexpr int64_t PART_BYTES = 24 << 10;  // of a float32 panel, which the first cache keeps while rows pass over it

// Codes of one kind: how many products of a code and an activation may be added in 16 bits, for `Wide::dots`.
template <bool BY_16, int TERMS, bool SIGNED>
struct Codes {
    static constexpr bool by_16 = BY_16, is_signed = SIGNED;
    static constexpr int terms = TERMS;
};

// Calls f with the kind of these codes. Registers that add products in 32 bits have one kind each for 32 and 16 values.
template <class W, class F>
inline void with_codes(const Kernels& k, F&& f) {
    if constexpr (W::sums_in_32_bits) {
        k.by_16 ? f(Codes<true, 8, false>()) : f(Codes<false, 8, false>());
    } else if (k.by_16) {
        k.bits > 4 ? f(Codes<true, 2, false>()) : f(Codes<true, 8, false>());  // 6 bits; 2 or 3
    } else if (k.is_signed) {
        f(Codes<false, 1, true>());
    } else {
        k.bits > 4 ? f(Codes<false, 4, false>()) : f(Codes<false, 8, false>());  // 5 bits; 4
    }
}

template <class W, class C, int ROWS>
void panel_tile(const Product& p, const Activations& x, const Panel& w, bool has_min, int64_t output, int count, int64_t r0) {
    using Floats = typename W::Floats;
    constexpr int parts = C::by_16 ? 2 : 1, steps = 8 / parts;
    const int64_t groups = p.in / 32;
    const int8_t* codes = x.codes + r0 * p.in;
    const float *scales = x.scales + r0 * groups, *sums = x.sums + r0 * groups * parts;
    Floats acc[ROWS];
    for (int r = 0; r < ROWS; r++) acc[r] = W::zero();
    for (int64_t g = 0; g < groups; g++) {
#pragma GCC unroll 2
        for (int part = 0; part < parts; part++) {
            int64_t at = g * parts + part;
            Floats dot[ROWS];
            W::template dots<C, ROWS, steps>(w.codes + 4 * W::lanes * (8 * g + steps * part), codes + 32 * g + 16 * part, p.in, dot);
            Floats scale = W::load(w.scales + W::lanes * at);
#pragma GCC unroll 8
            for (int r = 0; r < ROWS; r++)
                acc[r] = W::multiply_add(dot[r], W::multiply(scale, W::all(scales[r * groups + g])), acc[r]);
            if (!has_min) continue;
            Floats min = W::load(w.mins + W::lanes * at);
#pragma GCC unroll 8
            for (int r = 0; r < ROWS; r++) acc[r] = W::multiply_add(min, W::all(sums[r * groups * parts + at]), acc[r]);
        }
    }
    for (int r = 0; r < ROWS; r++) W::store_some(p.y + (r0 + r) * p.y_stride + output, acc[r], count);
}

template <class W, class C>
void panel_rows(const Product& p, const Activations& x, const Panel& w, bool has_min, int64_t output, int count) {
    int64_t r = 0;
    for (; r + W::rows <= p.rows; r += W::rows) panel_tile<W, C, W::rows>(p, x, w, has_min, output, count, r);
    if constexpr (W::rows > 4)
        if (r + 4 <= p.rows) panel_tile<W, C, 4>(p, x, w, has_min, output, count, r), r += 4;
    if (r + 2 <= p.rows) panel_tile<W, C, 2>(p, x, w, has_min, output, count, r), r += 2;
    if (r < p.rows) panel_tile<W, C, 1>(p, x, w, has_min, output, count, r);
}

// to[i, j] = rows[j][i] for i < count, rounded up to the lanes; rows of `to` are `stride` values apart.
template <class W>
inline void transpose(const void* const* rows, int64_t count, void* to, int64_t stride) {
    for (int64_t i = 0; i < count; i += W::lanes) W::transpose(rows, i, static_cast<int32_t*>(to) + i * stride, stride);
}

inline int64_t rounded_up(int64_t count, int64_t to) { return (count + to - 1) / to * to; }

// Codes + 128 are unsigned; the minimums then are 128 scales less.
inline void shift(const Panel& w, bool has_min, int64_t codes, int64_t scales) {
    uint8_t* at = w.codes;
    for (int64_t i = 0; i < codes; i++) at[i] ^= 128;
    const float* scale = w.scales;
    float* min = w.mins;
    if (has_min) {
        for (int64_t i = 0; i < scales; i++) min[i] -= 128 * scale[i];
    } else {
        for (int64_t i = 0; i < scales; i++) min[i] = -128 * scale[i];
    }
}

// int8 activations, outputs begin..end.
template <class W>
void int8_panels(const Product& p, const Kernels& k, const Activations& x, int64_t begin, int64_t end) {
    static thread_local Scratch scratch;
    constexpr int lanes = W::lanes;
    int64_t count = k.by_16 ? p.in / 16 : p.in / 32, padded = rounded_up(count, lanes), in = rounded_up(p.in, 4 * lanes);
    scratch.reset(2 * lanes * in + 4 * lanes * 4 * padded + 64 * 3 * (lanes + 1));
    Decoded rows[lanes];
    for (Decoded& row : rows) row = {scratch.take<uint8_t>(in), scratch.take<float>(padded), scratch.take<float>(padded)};
    Panel w = {scratch.take<uint8_t>(lanes * in), scratch.take<float>(lanes * padded), scratch.take<float>(lanes * padded)};
    const bool shifted = W::unsigned_codes && k.is_signed, has_min = k.has_min || shifted;
    for (int64_t o = begin; o < end; o += lanes) {
        int here = int(end - o < lanes ? end - o : lanes);
        const void *codes[lanes], *scales[lanes], *mins[lanes];
        for (int i = 0; i < lanes; i++) {
            const Decoded& row = rows[i < here ? i : 0];
            if (i < here) k.decode_row(p, o + i, row);
            codes[i] = row.codes, scales[i] = row.scales, mins[i] = row.mins;
        }
        transpose<W>(codes, p.in / 4, w.codes, lanes);
        transpose<W>(scales, count, w.scales, lanes);
        if (k.has_min) transpose<W>(mins, count, w.mins, lanes);
        if (shifted) shift(w, k.has_min, lanes * p.in, lanes * count);
        with_codes<W>(k, [&](auto kind) { panel_rows<W, decltype(kind)>(p, x, w, has_min, o, here); });
    }
}

template <class W, int ROWS>
void float_panel_tile(const Product& p, const float* w, int64_t output, int count, int64_t begin, int64_t end, int64_t r0) {
    using Floats = typename W::Floats;
    constexpr int lanes = W::lanes;
    const int low = count < lanes ? count : lanes, high = count - low;
    const float* x[ROWS];
    float* y = p.y + r0 * p.y_stride + output;
    Floats acc[ROWS][2];
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; r++) {
        x[r] = p.x + (r0 + r) * p.x_stride;
        acc[r][0] = begin == 0 ? W::zero() : W::load_some(y + r * p.y_stride, low);
        acc[r][1] = begin == 0 || !high ? W::zero() : W::load_some(y + r * p.y_stride + lanes, high);
    }
    for (int64_t i = begin; i < end; i++) {
        Floats first = W::load(w + 2 * lanes * i), second = W::load(w + 2 * lanes * i + lanes);
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; r++) {
            Floats v = W::all(x[r][i]);
            acc[r][0] = W::multiply_add(first, v, acc[r][0]);
            acc[r][1] = W::multiply_add(second, v, acc[r][1]);
        }
    }
    for (int r = 0; r < ROWS; r++) {
        W::store_some(y + r * p.y_stride, acc[r][0], low);
        if (high) W::store_some(y + r * p.y_stride + lanes, acc[r][1], high);
    }
}

// float32 activations, outputs begin..end. to_float(output, values [in]) dequantizes one row of the weight.
template <class W, class ToFloat>
void float_panels(const Product& p, ToFloat&& to_float, int64_t begin, int64_t end) {
    static thread_local Scratch scratch;
    constexpr int lanes = W::lanes, wide = 2 * lanes;
    int64_t in = rounded_up(p.in, lanes);
    scratch.reset(4 * (lanes + wide) * in + 64 * (lanes + 1));
    float *rows[lanes], *w;
    for (float*& row : rows) row = scratch.take<float>(in), std::fill(row + p.in, row + in, 0.0f);
    w = scratch.take<float>(wide * in);
    for (int64_t o = begin; o < end; o += wide) {
        int here = int(end - o < wide ? end - o : wide);
        for (int half = 0; half < wide && half < here; half += lanes) {
            const void* from[lanes];
            for (int i = 0; i < lanes; i++) {
                if (half + i < here) to_float(o + half + i, rows[i]);
                from[i] = rows[half + i < here ? i : 0];
            }
            transpose<W>(from, p.in, w + half, wide);
        }
        if (here <= lanes)  // lanes that are not stored must not be slow to multiply
            for (int64_t i = 0; i < p.in; i++) std::fill(w + wide * i + lanes, w + wide * (i + 1), 0.0f);
        constexpr int64_t most = PART_BYTES / (4 * wide);
        for (int64_t from = 0; from < p.in; from += most) {
            int64_t to = from + most < p.in ? from + most : p.in, r = 0;
            for (; r + 6 <= p.rows; r += 6) float_panel_tile<W, 6>(p, w, o, here, from, to, r);
            for (; r + 2 <= p.rows; r += 2) float_panel_tile<W, 2>(p, w, o, here, from, to, r);
            if (r < p.rows) float_panel_tile<W, 1>(p, w, o, here, from, to, r);
        }
    }
}

}  // namespace
