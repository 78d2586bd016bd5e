// Products with several activation rows: rows of the weight are decoded once into memory of the thread that stays in
// its cache, and the activation rows pass over them. Nothing here depends on the format.
#pragma once
#include <cstdlib>
#include <new>

#include "product_plain.h"

namespace {

constexpr int MOST_FEW_ROWS = 8;  // the largest few_rows of simd_*.h

// Memory of one thread that grows as needed, aligned for every register.
class Scratch {
  public:
    ~Scratch() { std::free(memory); }
    template <class T>
    T* take(int64_t count) {  // after reset(): the next `count` elements
        T* taken = reinterpret_cast<T*>(memory + used);
        used += (count * int64_t(sizeof(T)) + 63) / 64 * 64;
        return taken;
    }
    void reset(int64_t bytes) {
        used = 0;
        if (bytes <= size) return;
        std::free(memory);
        size = (bytes + 4095) / 4096 * 4096;
        memory = static_cast<char*>(std::aligned_alloc(64, size_t(size)));
        if (!memory) {
            size = 0;
            throw std::bad_alloc();
        }
    }

  private:
    char* memory = nullptr;
    int64_t size = 0, used = 0;
};

template <class S, bool is_signed, int ROWS>
void decoded_tile(const Product& p, const Activations& x, const Decoded& w, bool has_min, bool by_16, int64_t output, int64_t r0) {
    using Floats = typename S::Floats;
    int64_t groups = p.in / 32;
    const int8_t* codes = x.codes + r0 * p.in;
    const float *scales = x.scales + r0 * groups, *sums = x.sums + r0 * groups * (by_16 ? 2 : 1);
    Floats acc[ROWS];
    for (int r = 0; r < ROWS; r++) acc[r] = S::zero();
    for (int64_t g = 0; g < groups; g++) {
        auto c = S::load_bytes(w.codes + 32 * g);
        Floats scale = by_16 ? S::halves(w.scales + 2 * g) : S::all(w.scales[g]);
#pragma GCC unroll 4
        for (int r = 0; r < ROWS; r++) {
            auto v = S::load_bytes(codes + r * p.in + 32 * g);
            Floats dot = is_signed ? S::dot_signed(c, v) : S::dot_unsigned(c, v);
            acc[r] = S::multiply_add(dot, S::multiply(scale, S::all(scales[r * groups + g])), acc[r]);
        }
        if (!has_min) continue;
        Floats min = by_16 ? S::halves(w.mins + 2 * g) : S::all(w.mins[g]);
#pragma GCC unroll 4
        for (int r = 0; r < ROWS; r++) {
            Floats sum = by_16 ? S::halves(sums + 2 * (r * groups + g)) : S::all(sums[r * groups + g]);
            acc[r] = S::multiply_add(min, sum, acc[r]);
        }
    }
    for (int r = 0; r < ROWS; r++) p.y[(r0 + r) * p.y_stride + output] = S::sum(acc[r]);
}

template <class S, bool is_signed>
void decoded_rows(const Product& p, const Activations& x, const Decoded& w, bool has_min, bool by_16, int64_t output) {
    int64_t r = 0;
    for (; r + 4 <= p.rows; r += 4) decoded_tile<S, is_signed, 4>(p, x, w, has_min, by_16, output, r);
    if (r + 2 <= p.rows) decoded_tile<S, is_signed, 2>(p, x, w, has_min, by_16, output, r), r += 2;
    if (r < p.rows) decoded_tile<S, is_signed, 1>(p, x, w, has_min, by_16, output, r);
}

inline Decoded take_decoded(Scratch& scratch, int64_t in) {
    return {scratch.take<uint8_t>(in), scratch.take<float>(in / 16), scratch.take<float>(in / 16)};
}

inline int64_t decoded_bytes(int64_t in) { return in + in / 2 + 256; }

// Several rows of int8 activations.
template <class S>
void int8_rows(const Product& p, const Kernels& k, const Activations& x, int64_t begin, int64_t end) {
    static thread_local Scratch scratch;
    scratch.reset(decoded_bytes(p.in));
    Decoded w = take_decoded(scratch, p.in);
    for (int64_t o = begin; o < end; o++) {
        k.decode_row(p, o, w);
        if (k.is_signed) decoded_rows<S, true>(p, x, w, k.has_min, k.by_16, o);
        else decoded_rows<S, false>(p, x, w, k.has_min, k.by_16, o);
    }
}

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

template <class S, int format>
void plain(const Product& p, int64_t begin, int64_t end) {
    if (p.rows == 1) return plain_one_row<S, format>(p, 0, begin, end);
    float_rows<S>(p, [&](int64_t output, float* to) { widen_row<S, format>(p, output, to); }, begin, end);
}

template <class S>
void packed_float(const Product& p, const Kernels& k, int64_t begin, int64_t end) {
    static thread_local Scratch scratch;
    scratch.reset(decoded_bytes(p.in));
    Decoded w = take_decoded(scratch, p.in);
    float_rows<S>(p, [&](int64_t output, float* to) {
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
    for (int64_t g = 0; g < count; g++) {
        float scale = p.activations == 1 ? xs[g * width / 32] : 1, sum = 0;
        if (p.activations == 1 && k.has_min && k.by_16) {
            int total = 0;
            for (int i = 0; i < 16; i++) total += codes[16 * g + i];
            sum = scale * float(total);
        } else if (p.activations == 1) {
            sum = scale * float(p.qx_sums[r * count + g]);
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

// The sums of the groups of all rows times their scales, spread over the group's lanes.
template <class S>
Activations activation_rows(const Product& p, const Kernels& k) {
    static thread_local Scratch scratch;
    int64_t groups = p.rows * (p.in / 32), count = k.by_16 ? 2 * groups : groups;
    scratch.reset(4 * count + 64);
    float* sums = scratch.take<float>(count);
    for (int64_t g = 0; g < count; g++) {
        int total = 0;
        if (k.by_16)
            for (int i = 0; i < 16; i++) total += p.qx[16 * g + i];
        else total = p.qx_sums[g];
        sums[g] = p.qx_scales[k.by_16 ? g / 2 : g] * float(total) * (k.by_16 ? 2.0f / S::lanes : 1.0f / S::lanes);
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
    Activations x = activation_rows<S>(p, k);
    if (S::has_panels) return S::panels(p, k, x, begin, end);
    int8_rows<S>(p, k, x, begin, end);
}

}  // namespace
