// Layouts of the weight formats, and scalar conversions. Everything has internal linkage: files that include this are
// compiled for different instructions, and the linker must not exchange their functions.
#pragma once
#include <cstdint>
#include <cstring>

#include "products.h"

namespace {

struct Layout {
    int values;  // values per block; 1 for plain formats
    int bytes;   // bytes per block of codes
};

inline Layout layout(int32_t format) {
    switch (format) {
        case FORMAT_FLOAT32: return {1, 4};
        case FORMAT_BFLOAT16:
        case FORMAT_FLOAT16: return {1, 2};
        case FORMAT_FP8: return {1, 1};
        case FORMAT_INT8: return {32, 32};
        case FORMAT_INT4: return {32, 16};
        case FORMAT_Q4_0: return {32, 18};
        case FORMAT_Q4_1: return {32, 20};
        case FORMAT_Q5_0: return {32, 22};
        case FORMAT_Q5_1: return {32, 24};
        case FORMAT_Q8_0: return {32, 34};
        case FORMAT_Q2_K: return {256, 84};
        case FORMAT_Q3_K: return {256, 110};
        case FORMAT_Q4_K: return {256, 144};
        case FORMAT_Q5_K: return {256, 176};
        case FORMAT_Q6_K: return {256, 210};
        case FORMAT_IQ4_NL: return {32, 18};
        case FORMAT_IQ4_XS: return {256, 136};
        case FORMAT_MXFP4: return {32, 17};
    }
    return {0, 0};
}

inline int64_t row_bytes(int32_t format, int64_t in) {
    Layout of = layout(format);
    return of.values ? in / of.values * of.bytes : 0;
}

inline bool is_float_format(int32_t format) { return format <= FORMAT_FP8; }

template <class T>
inline T read(const void* at) {
    T value;
    std::memcpy(&value, at, sizeof value);
    return value;
}

inline float float_from_bits(uint32_t bits) { return read<float>(&bits); }

inline float from_bfloat16(uint16_t bits) { return float_from_bits(uint32_t(bits) << 16); }

inline float from_half(uint16_t bits) {
    uint32_t sign = uint32_t(bits & 0x8000) << 16, rest = bits & 0x7fff;
    if (rest >= 0x7c00) return float_from_bits(sign | 0x7f800000 | (rest & 0x3ff) << 13);
    if (rest >= 0x0400) return float_from_bits(sign | ((rest << 13) + (112u << 23)));
    float magnitude = float(rest) * 0x1p-24f;  // subnormal
    return sign ? -magnitude : magnitude;
}

// An e4m3 code's bits as float16 are the same value times 2^-8, subnormal or not.
inline float from_e4m3(uint8_t code) { return from_half(uint16_t((code & 0x80) << 8 | (code & 0x7f) << 7)) * 256.0f; }

// The scale of a block of MXFP4: half of the power of two, since the table below holds doubled values.
inline float from_e8m0_half(uint8_t exponent) {
    return float_from_bits(exponent < 2 ? 0x00200000u << exponent : uint32_t(exponent - 1) << 23);
}

inline float read_scale(const void* scales, int32_t type, int64_t at) {
    if (type == SCALE_FLOAT32) return static_cast<const float*>(scales)[at];
    uint16_t bits = static_cast<const uint16_t*>(scales)[at];
    return type == SCALE_FLOAT16 ? from_half(bits) : from_bfloat16(bits);
}

alignas(16) const int8_t iq4_table[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
alignas(16) const int8_t mxfp4_table[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

// from_e8m0_half of every exponent.
struct Exponents {
    float half[256];
    constexpr Exponents() : half() {
        float value = 0x1p-128f;  // exponent 0
        for (int i = 0; i < 255; i++, value *= 2) half[i] = value;
        half[255] = value;  // NaN in the specification; GGUF has no NaN blocks
    }
};
constexpr Exponents exponents;

// The 8 scales and 8 minimums of 6 bits of Q4_K and Q5_K. Bytes 0-3 and 4-7 hold the low 6 bits of the first four of
// each; bytes 8-11 hold 4 bits of the last four of each, whose upper 2 bits are those of bytes 0-3 and 4-7.
inline void k_scales(const uint8_t* packed, uint64_t* scales, uint64_t* mins) {  // 8 bytes each
    uint32_t a = read<uint32_t>(packed), b = read<uint32_t>(packed + 4), c = read<uint32_t>(packed + 8);
    *scales = (a & 0x3f3f3f3f) | uint64_t((c & 0x0f0f0f0f) | (a >> 2 & 0x30303030)) << 32;
    *mins = (b & 0x3f3f3f3f) | uint64_t((c >> 4 & 0x0f0f0f0f) | (b >> 2 & 0x30303030)) << 32;
}

// The 16 scales of 6 bits of Q3_K, plus 32: 4 low bits in bytes 0-7 (scales i and i + 8 in byte i), 2 high bits in bytes
// 8-11 (scales i, i + 4, i + 8, i + 12 in byte 8 + i).
inline void q3_scales(const uint8_t* packed, uint64_t scales[2]) {
    uint64_t low = read<uint64_t>(packed), nibbles = 0x0f0f0f0f0f0f0f0f;
    uint32_t high = read<uint32_t>(packed + 8);
    scales[0] = (low & nibbles) | uint64_t(high & 0x03030303) << 4 | uint64_t(high >> 2 & 0x03030303) << 36;
    scales[1] = (low >> 4 & nibbles) | uint64_t(high >> 4 & 0x03030303) << 4 | uint64_t(high >> 6 & 0x03030303) << 36;
}

}  // namespace
