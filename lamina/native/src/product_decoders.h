// The weight formats decoded with SIMD operations (S: simd_*.h), 32 codes at a time: value = scale * code + minimum.
//
// A decoder stands for one row of a weight, the first until `go_to`. Formats with one scale per block of 32 values give the scales of four blocks
// at once, as pairs (scale, minimum): `pairs`. Where the minimum is the scale times a constant, it is `offset`, and the
// pair holds the scale twice. Formats with blocks of 256 values give all scales of a block: `scales`.
#pragma once
#include "product_formats.h"

namespace {

template <int BYTES, int GROUPS>
struct Blocks {  // rows of GGUF blocks of BYTES bytes, of GROUPS groups of 32 values each
    static constexpr int bytes = BYTES, groups = GROUPS;
    const uint8_t* row;
    int64_t row_bytes;
    Blocks() = default;
    explicit Blocks(const Product& p) : row(static_cast<const uint8_t*>(p.codes)), row_bytes(p.in / (32 * GROUPS) * BYTES) {}
    void go_to(int64_t output) { row += output * row_bytes; }
    const uint8_t* at(int64_t b) const { return row + b * BYTES; }
};

template <class S, int BYTES, bool SIGNED, int OFFSET>
struct Blocks32 : Blocks<BYTES, 1> {
    using Blocks<BYTES, 1>::Blocks;
    static constexpr int offset = OFFSET;
    static constexpr bool is_signed = SIGNED, by_16 = false, has_min = OFFSET != 0;
};

template <class S, int BYTES, bool SIGNED, bool BY_16, bool HAS_MIN>
struct Blocks256 : Blocks<BYTES, 8> {
    using Blocks<BYTES, 8>::Blocks;
    static constexpr int offset = 1;
    static constexpr bool is_signed = SIGNED, by_16 = BY_16, has_min = HAS_MIN;
};

#define LAMINA_TYPES                 \
    using Bytes = typename S::Bytes; \
    using Floats = typename S::Floats;

template <class S>
struct Q4_0 : Blocks32<S, 18, false, -8> {
    LAMINA_TYPES
    static constexpr int bits = 4;
    using Blocks32<S, 18, false, -8>::Blocks32;
    template <int g> Bytes codes(int64_t b) const { return S::nibbles(this->at(b) + 2); }
    Floats pairs(const uint8_t* a, const uint8_t* b, const uint8_t* c, const uint8_t* d) const { return S::twice_half(a, b, c, d); }
};

template <class S>
struct Q4_1 : Blocks32<S, 20, false, 1> {
    LAMINA_TYPES
    static constexpr int bits = 4;
    using Blocks32<S, 20, false, 1>::Blocks32;
    template <int g> Bytes codes(int64_t b) const { return S::nibbles(this->at(b) + 4); }
    Floats pairs(const uint8_t* a, const uint8_t* b, const uint8_t* c, const uint8_t* d) const { return S::two_halves(a, b, c, d); }
};

template <class S>
struct Q5_0 : Blocks32<S, 22, false, -16> {
    LAMINA_TYPES
    static constexpr int bits = 5;
    using Blocks32<S, 22, false, -16>::Blocks32;
    template <int g> Bytes codes(int64_t b) const {
        return S::either(S::nibbles(this->at(b) + 6), S::fifth_bits(read<uint32_t>(this->at(b) + 2)));
    }
    Floats pairs(const uint8_t* a, const uint8_t* b, const uint8_t* c, const uint8_t* d) const { return S::twice_half(a, b, c, d); }
};

template <class S>
struct Q5_1 : Blocks32<S, 24, false, 1> {
    LAMINA_TYPES
    static constexpr int bits = 5;
    using Blocks32<S, 24, false, 1>::Blocks32;
    template <int g> Bytes codes(int64_t b) const {
        return S::either(S::nibbles(this->at(b) + 8), S::fifth_bits(read<uint32_t>(this->at(b) + 4)));
    }
    Floats pairs(const uint8_t* a, const uint8_t* b, const uint8_t* c, const uint8_t* d) const { return S::two_halves(a, b, c, d); }
};

template <class S>
struct Q8_0 : Blocks32<S, 34, true, 0> {
    LAMINA_TYPES
    static constexpr int bits = 8;
    using Blocks32<S, 34, true, 0>::Blocks32;
    template <int g> Bytes codes(int64_t b) const { return S::load_bytes(this->at(b) + 2); }
    Floats pairs(const uint8_t* a, const uint8_t* b, const uint8_t* c, const uint8_t* d) const { return S::twice_half(a, b, c, d); }
};

template <class S>
struct IQ4_NL : Blocks32<S, 18, true, 0> {
    LAMINA_TYPES
    static constexpr int bits = 8;
    using Blocks32<S, 18, true, 0>::Blocks32;
    template <int g> Bytes codes(int64_t b) const { return S::look_up(iq4_table, S::nibbles(this->at(b) + 2)); }
    Floats pairs(const uint8_t* a, const uint8_t* b, const uint8_t* c, const uint8_t* d) const { return S::twice_half(a, b, c, d); }
};

template <class S>
struct MXFP4 : Blocks32<S, 17, true, 0> {
    LAMINA_TYPES
    static constexpr int bits = 8;
    using Blocks32<S, 17, true, 0>::Blocks32;
    template <int g> Bytes codes(int64_t b) const { return S::look_up(mxfp4_table, S::nibbles(this->at(b) + 1)); }
    Floats pairs(const uint8_t* a, const uint8_t* b, const uint8_t* c, const uint8_t* d) const {
        return S::twice(exponents.half[*a], exponents.half[*b], exponents.half[*c], exponents.half[*d]);
    }
};

template <class S>
struct IQ4_XS : Blocks256<S, 136, true, false, false> {
    LAMINA_TYPES
    static constexpr int bits = 8;
    using Blocks256<S, 136, true, false, false>::Blocks256;
    template <int g> Bytes codes(int64_t b) const { return S::look_up(iq4_table, S::nibbles(this->at(b) + 8 + 16 * g)); }
    void scales(int64_t b, Floats* scale, Floats*) const {
        const uint8_t* at = this->at(b);
        uint32_t low = read<uint32_t>(at + 4), high = read<uint16_t>(at + 2);
        // group g: bits 4g.. of low, and bits 2g.. of high above them
        scale[0] = S::multiply(S::all(S::half(at)), S::bit_fields(low, high));
    }
};

template <class S>
struct Q2_K : Blocks256<S, 84, false, true, true> {
    LAMINA_TYPES
    static constexpr int bits = 2;
    using Blocks256<S, 84, false, true, true>::Blocks256;
    template <int g> Bytes codes(int64_t b) const {
        return S::template right<2 * (g % 4)>(S::load_bytes(this->at(b) + 16 + 32 * (g / 4)), 3);
    }
    void scales(int64_t b, Floats* scale, Floats* min) const {
        const uint8_t* at = this->at(b);
        uint64_t both[2] = {read<uint64_t>(at), read<uint64_t>(at + 8)}, low = 0x0f0f0f0f0f0f0f0f;
        for (int i = 0; i < 2; i++) {
            scale[i] = S::multiply(S::all(S::half(at + 80)), S::from_uint8(both[i] & low));
            min[i] = S::multiply(S::all(-S::half(at + 82)), S::from_uint8(both[i] >> 4 & low));
        }
    }
};

template <class S>
struct Q3_K : Blocks256<S, 110, false, true, true> {
    LAMINA_TYPES
    static constexpr int bits = 3;
    using Blocks256<S, 110, false, true, true>::Blocks256;
    template <int g> Bytes codes(int64_t b) const {  // without the offset -4
        Bytes low = S::template right<2 * (g % 4)>(S::load_bytes(this->at(b) + 32 + 32 * (g / 4)), 3);
        Bytes high = S::load_bytes(this->at(b));  // bit g
        high = g >= 2 ? S::template right<g >= 2 ? g - 2 : 0>(high, 4) : S::template left<g >= 2 ? 0 : 2 - g>(high, 4);
        return S::either(low, high);
    }
    void scales(int64_t b, Floats* scale, Floats* min) const {
        uint64_t both[2];  // of 8 bytes each, plus 32
        q3_scales(this->at(b) + 96, both);
        float d = S::half(this->at(b) + 108);
        for (int i = 0; i < 2; i++) {
            Floats scales = S::add(S::from_uint8(both[i]), S::all(-32.0f));
            scale[i] = S::multiply(S::all(d), scales);
            min[i] = S::multiply(S::all(-4 * d), scales);
        }
    }
};

template <class S>
inline void scales_of_6_bits(const uint8_t* block, typename S::Floats* scale, typename S::Floats* min) {
    uint64_t scales, mins;
    k_scales(block + 4, &scales, &mins);
    scale[0] = S::multiply(S::all(S::half(block)), S::from_uint8(scales));
    min[0] = S::multiply(S::all(-S::half(block + 2)), S::from_uint8(mins));
}

template <class S>
struct Q4_K : Blocks256<S, 144, false, false, true> {
    LAMINA_TYPES
    static constexpr int bits = 4;
    using Blocks256<S, 144, false, false, true>::Blocks256;
    template <int g> Bytes codes(int64_t b) const {
        return S::template right<4 * (g % 2)>(S::load_bytes(this->at(b) + 16 + 32 * (g / 2)), 15);
    }
    void scales(int64_t b, Floats* scale, Floats* min) const { scales_of_6_bits<S>(this->at(b), scale, min); }
};

template <class S>
struct Q5_K : Blocks256<S, 176, false, false, true> {
    LAMINA_TYPES
    static constexpr int bits = 5;
    using Blocks256<S, 176, false, false, true>::Blocks256;
    template <int g> Bytes codes(int64_t b) const {
        Bytes low = S::template right<4 * (g % 2)>(S::load_bytes(this->at(b) + 48 + 32 * (g / 2)), 15);
        Bytes high = S::load_bytes(this->at(b) + 16);
        high = g >= 4 ? S::template right<g >= 4 ? g - 4 : 0>(high, 16) : S::template left<g >= 4 ? 0 : 4 - g>(high, 16);
        return S::either(low, high);
    }
    void scales(int64_t b, Floats* scale, Floats* min) const { scales_of_6_bits<S>(this->at(b), scale, min); }
};

template <class S>
struct Q6_K : Blocks256<S, 210, false, true, true> {
    LAMINA_TYPES
    static constexpr int bits = 6;
    using Blocks256<S, 210, false, true, true>::Blocks256;
    template <int g> Bytes codes(int64_t b) const {  // without the offset -32
        constexpr int quarter = g % 4, eighth = g / 4;
        Bytes low = S::load_bytes(this->at(b) + 64 * eighth + 32 * (quarter % 2));
        Bytes high = S::load_bytes(this->at(b) + 128 + 32 * eighth);
        low = S::template right<4 * (quarter / 2)>(low, 15);
        high = quarter == 3 ? S::template right<2>(high, 0x30) : S::template left<quarter == 3 ? 0 : 4 - 2 * quarter>(high, 0x30);
        return S::either(low, high);
    }
    void scales(int64_t b, Floats* scale, Floats* min) const {
        float d = S::half(this->at(b) + 208);
        for (int i = 0; i < 2; i++) {
            Floats scales = S::from_int8(read<uint64_t>(this->at(b) + 192 + 8 * i));
            scale[i] = S::multiply(S::all(d), scales);
            min[i] = S::multiply(S::all(-32 * d), scales);
        }
    }
};

// Codes, scales and zeros in tensors of their own. Codes of 8 bits with zeros are unsigned in memory; less 128 they are
// signed, and zero - 128 is their zero. `at` is the index of a scale.
template <class S, int BITS, bool has_zeros, int scale_type>
struct IntGroups {
    LAMINA_TYPES
    static constexpr int bits = BITS;
    static constexpr int bytes = 4 * bits, groups = 1, offset = has_zeros ? 1 : bits == 4 ? -8 : 0;
    static constexpr bool is_signed = bits == 8, by_16 = false, has_min = offset != 0;
    const uint8_t *row, *zeros;
    const void* scales;
    int64_t first = 0, per_row;  // scale of the row's first group; scales of a row
    uint64_t inverse;  // of the groups of 32 that share a scale: b * inverse / 2^32 is the scale of group b < 2^16
    int64_t row_bytes;
    IntGroups() = default;
    explicit IntGroups(const Product& p)
        : row(static_cast<const uint8_t*>(p.codes)),
          zeros(static_cast<const uint8_t*>(p.zeros)),
          scales(p.scales),
          per_row(p.in / p.group),
          inverse(((uint64_t(1) << 32) + uint64_t(p.group / 32) - 1) / uint64_t(p.group / 32)),
          row_bytes(p.in / 8 * bits) {}
    void go_to(int64_t output) {
        row += output * row_bytes;
        first += output * per_row;
    }
    template <int g> Bytes codes(int64_t b) const {
        if constexpr (bits == 4) return S::nibbles(row + 16 * b);
        Bytes codes = S::load_bytes(row + 32 * b);
        return has_zeros ? S::exclusive(codes, S::bytes(0x80)) : codes;
    }
    int64_t at(int64_t b) const { return first + int64_t(uint64_t(b) * inverse >> 32); }
    float scale(int64_t at) const {
        if (scale_type == SCALE_FLOAT32) return static_cast<const float*>(scales)[at];
        const uint16_t* stored = static_cast<const uint16_t*>(scales) + at;
        return scale_type == SCALE_FLOAT16 ? S::half(stored) : from_bfloat16(*stored);
    }
    float zero(int64_t at) const { return float(int(bits == 8 ? 128 : 0) - int(zeros[at])); }
    Floats pairs(int64_t a, int64_t b, int64_t c, int64_t d) const {
        if constexpr (has_zeros) {
            return S::four_pairs(scale(a), scale(b), scale(c), scale(d), zero(a), zero(b), zero(c), zero(d));
        } else if constexpr (scale_type == SCALE_FLOAT16) {
            const uint16_t* all = static_cast<const uint16_t*>(scales);
            return S::twice_half(all + a, all + b, all + c, all + d);
        } else {
            return S::twice(scale(a), scale(b), scale(c), scale(d));
        }
    }
};

#undef LAMINA_TYPES

}  // namespace
