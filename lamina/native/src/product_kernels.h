// The kernels that depend on the weight format, written once for every set of SIMD operations (S: simd_*.h) and every
// format (F: product_decoders.h): the product with one vector, and decoding for products with several (product_rows.h).
#pragma once
#include <utility>

#include "product_decoders.h"

namespace {

template <class Call, int... g>
inline void each_of(std::integer_sequence<int, g...>, Call&& call) {
    (call(std::integral_constant<int, g>()), ...);
}

// The activations of one row as one_row reads them: codes or floats [in], and for each group of 32 (or 16, for formats
// with scales for 16 values) the scale xs, which is 1 for floats, and the sum of values, xs * (sum of codes). Formats
// with blocks of 32 read them as pairs (xs, sum) in `scales`.
struct Activations {
    const int8_t* codes;
    const float* values;
    const float *scales, *sums;
};

template <class S, bool is_float, bool is_signed>
inline void dots(const Activations& x, int64_t group, typename S::Bytes w, typename S::Floats* low, typename S::Floats* high) {
    if constexpr (is_float) {
        const float* v = x.values + 32 * group;
        *low = S::multiply(S::template widen<0, is_signed>(w), S::load(v));
        *high = S::multiply(S::template widen<2, is_signed>(w), S::load(v + 16));
        *low = S::multiply_add(S::template widen<1, is_signed>(w), S::load(v + 8), *low);
        *high = S::multiply_add(S::template widen<3, is_signed>(w), S::load(v + 24), *high);
    } else {
        auto v = S::load_bytes(x.codes + 32 * group);
        *low = is_signed ? S::dot_signed(w, v) : S::dot_unsigned(w, v);
    }
}

// acc += scale * dot, for the group's scale(s) at `scale`.
template <class S, bool is_float, bool is_signed, bool by_16>
inline typename S::Floats add_group(const Activations& x, int64_t group, typename S::Bytes w, const float* scale, typename S::Floats acc) {
    typename S::Floats low, high;
    dots<S, is_float, is_signed>(x, group, w, &low, &high);
    if constexpr (!is_float) return S::multiply_add(low, by_16 ? S::halves(scale) : S::all(*scale), acc);
    if constexpr (!by_16) return S::multiply_add(S::add(low, high), S::all(*scale), acc);
    return S::multiply_add(high, S::all(scale[1]), S::multiply_add(low, S::all(scale[0]), acc));
}

// Prefetch distance: whole groups of `outputs` rows, about as many bytes as arrive during the latency of memory.
inline int64_t rows_ahead(int outputs, int64_t bytes) {
    const int64_t group = outputs * bytes;
    return (7168 + group - 1) / group * group;
}

// The first cache has no room for rows that far ahead.
inline bool is_far(int64_t ahead) { return ahead > 20000; }

// Outputs begin..end of one activation row: y = sum over groups of scale * xs * dot(codes, x) + minimum * sum. Four
// outputs at once share the work on scales and hide the latency of the sums.
template <class S, class F, bool is_float, bool far>
void one_row(const Product& p, const Activations& x, int64_t r, int64_t begin, int64_t end) {
    constexpr int OUTS = 4;
    using Floats = typename S::Floats;
    int64_t blocks = p.in / (32 * F::groups), ahead = rows_ahead(OUTS, blocks * F::bytes);
    const F first(p);
    for (int64_t output = begin; output < end; output += OUTS) {
        F rows[OUTS];
        Floats acc[OUTS], mins[F::groups == 1 ? 1 : OUTS];
        for (int o = 0; o < OUTS; o++) {
            rows[o] = first;
            rows[o].go_to(output + o < end ? output + o : end - 1);
            acc[o] = S::zero();
        }
        for (Floats& min : mins) min = S::zero();
        for (int64_t b = 0; b < blocks; b++) {
            // the next four rows, in the order of their addresses: what the hardware's prefetcher follows best
            const uint8_t* next = rows[0].row + ahead + b * OUTS * F::bytes;
            for (int i = 0; i < OUTS * F::bytes; i += 64) S::template prefetch<far>(next + i);
            if constexpr (F::groups == 1) {
                float scales[8];  // scale * xs, minimum * sum of each output
                Floats pairs = S::multiply(rows[0].pairs(rows[0].at(b), rows[1].at(b), rows[2].at(b), rows[3].at(b)), S::pair(x.scales + 2 * b));
                if constexpr (F::has_min) mins[0] = S::add(mins[0], pairs);
                S::store(scales, pairs);
#pragma GCC unroll 4
                for (int o = 0; o < OUTS; o++)
                    acc[o] = add_group<S, is_float, F::is_signed, false>(x, b, rows[o].template codes<0>(b), scales + 2 * o, acc[o]);
            } else {
                constexpr int vectors = F::by_16 ? 2 : 1;
                int64_t first = 8 * vectors * b;
#pragma GCC unroll 4
                for (int o = 0; o < OUTS; o++) {
                    float scales[8 * vectors];
                    Floats scale[2], min[2];
                    rows[o].scales(b, scale, min);
#pragma GCC unroll 2
                    for (int i = 0; i < vectors; i++) {
                        S::store(scales + 8 * i, S::multiply(scale[i], S::load(x.scales + first + 8 * i)));
                        if constexpr (F::has_min) mins[o] = S::multiply_add(min[i], S::load(x.sums + first + 8 * i), mins[o]);
                    }
                    each_of(std::make_integer_sequence<int, 8>(), [&](auto index) __attribute__((always_inline)) {
                        constexpr int g = decltype(index)::value;
                        acc[o] = add_group<S, is_float, F::is_signed, F::by_16>(x, 8 * b + g, rows[o].template codes<g>(b), scales + vectors * g, acc[o]);
                    });
                }
            }
        }
        float shared[8] = {};
        if constexpr (F::groups == 1 && F::has_min) S::store(shared, mins[0]);
        for (int o = 0; o < OUTS && output + o < end; o++) {
            float min = F::groups == 1 ? F::offset * shared[2 * o + 1] : S::sum(mins[F::groups == 1 ? 0 : o]);
            p.y[r * p.y_stride + output + o] = S::sum(acc[o]) + (F::has_min ? min : 0);
        }
    }
}

// One row of a weight: codes [in], and for each 32 values (or 16: by_16) the scale and the minimum.
struct Decoded {
    uint8_t* codes;
    float *scales, *mins;
};

template <class S, class F>
void decode_row(const Product& p, int64_t output, const Decoded& to) {
    F row(p);
    row.go_to(output);
    int64_t blocks = p.in / (32 * F::groups);
    if constexpr (F::groups == 1) {
        for (int64_t b = 0; b < blocks; b += 4) {
            int64_t last = blocks - 1, count = blocks - b < 4 ? blocks - b : 4;
            float pairs[8];
            S::store(pairs, row.pairs(row.at(b), row.at(b + 1 < last ? b + 1 : last), row.at(b + 2 < last ? b + 2 : last), row.at(b + 3 < last ? b + 3 : last)));
            for (int i = 0; i < count; i++) {
                S::store_bytes(to.codes + 32 * (b + i), row.template codes<0>(b + i));
                to.scales[b + i] = pairs[2 * i];
                if constexpr (F::has_min) to.mins[b + i] = F::offset * pairs[2 * i + 1];
            }
        }
    } else {
        constexpr int vectors = F::by_16 ? 2 : 1;
        for (int64_t b = 0; b < blocks; b++) {
            typename S::Floats scale[2], min[2];
            row.scales(b, scale, min);
            for (int i = 0; i < vectors; i++) {
                S::store(to.scales + 8 * (vectors * b + i), scale[i]);
                if constexpr (F::has_min) S::store(to.mins + 8 * (vectors * b + i), min[i]);
            }
            each_of(std::make_integer_sequence<int, 8>(), [&](auto index) __attribute__((always_inline)) {
                constexpr int g = decltype(index)::value;
                S::store_bytes(to.codes + 32 * (8 * b + g), row.template codes<g>(b));
            });
        }
    }
}

// What products with a format need.
struct Kernels {
    using OneRow = void(const Product&, const Activations&, int64_t r, int64_t begin, int64_t end);
    OneRow *int8_row, *int8_row_far, *float_row;
    void (*decode_row)(const Product&, int64_t output, const Decoded&);
    bool is_signed, has_min, by_16, in_pairs;
    int bits;  // of a code
};

template <class S, class F>
constexpr Kernels kernels_of() {
    return {one_row<S, F, false, false>, one_row<S, F, false, true>, one_row<S, F, true, false>, decode_row<S, F>, F::is_signed, F::has_min, F::by_16, F::groups == 1, F::bits};
}

template <class S, int bits, bool has_zeros>
Kernels int_kernels(const Product& p) {
    if (p.scale_type == SCALE_FLOAT32) return kernels_of<S, IntGroups<S, bits, has_zeros, SCALE_FLOAT32>>();
    if (p.scale_type == SCALE_FLOAT16) return kernels_of<S, IntGroups<S, bits, has_zeros, SCALE_FLOAT16>>();
    return kernels_of<S, IntGroups<S, bits, has_zeros, SCALE_BFLOAT16>>();
}

template <class S>
Kernels kernels(const Product& p) {
    switch (p.format) {
        case FORMAT_INT8: return p.zeros ? int_kernels<S, 8, true>(p) : int_kernels<S, 8, false>(p);
        case FORMAT_INT4: return p.zeros ? int_kernels<S, 4, true>(p) : int_kernels<S, 4, false>(p);
        case FORMAT_Q4_0: return kernels_of<S, Q4_0<S>>();
        case FORMAT_Q4_1: return kernels_of<S, Q4_1<S>>();
        case FORMAT_Q5_0: return kernels_of<S, Q5_0<S>>();
        case FORMAT_Q5_1: return kernels_of<S, Q5_1<S>>();
        case FORMAT_Q8_0: return kernels_of<S, Q8_0<S>>();
        case FORMAT_Q2_K: return kernels_of<S, Q2_K<S>>();
        case FORMAT_Q3_K: return kernels_of<S, Q3_K<S>>();
        case FORMAT_Q4_K: return kernels_of<S, Q4_K<S>>();
        case FORMAT_Q5_K: return kernels_of<S, Q5_K<S>>();
        case FORMAT_Q6_K: return kernels_of<S, Q6_K<S>>();
        case FORMAT_IQ4_NL: return kernels_of<S, IQ4_NL<S>>();
        case FORMAT_IQ4_XS: return kernels_of<S, IQ4_XS<S>>();
        default: return kernels_of<S, MXFP4<S>>();
    }
}

}  // namespace
