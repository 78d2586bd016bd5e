// The operations of simd_avx2.h in NEON registers, with the dot product instructions of ARMv8.2: 32 bytes and 8 floats
// are two registers each.
#pragma once
#include <arm_neon.h>

#include "product_formats.h"

namespace {

// A panel is 8 outputs: 4 inputs of each in two registers.
struct WideNeon {
    struct Floats { float32x4_t low, high; };
    static constexpr int lanes = 8, rows = 4, least_rows = 8;  // rows of a tile; rows from which on float panels are faster
    static constexpr bool sums_in_32_bits = true, unsigned_codes = false;
    static Floats zero() { return all(0); }
    static Floats all(float value) { return {vdupq_n_f32(value), vdupq_n_f32(value)}; }
    static Floats load(const float* at) { return {vld1q_f32(at), vld1q_f32(at + 4)}; }
    static Floats multiply(Floats a, Floats b) { return {vmulq_f32(a.low, b.low), vmulq_f32(a.high, b.high)}; }
    static Floats multiply_add(Floats a, Floats b, Floats c) { return {vfmaq_f32(c.low, a.low, b.low), vfmaq_f32(c.high, a.high, b.high)}; }
    static Floats load_some(const float* at, int count) {
        float each[8] = {};
        std::memcpy(each, at, size_t(count < 8 ? count : 8) * 4);
        return load(each);
    }
    static void store_some(float* to, Floats a, int count) {
        float each[8];
        vst1q_f32(each, a.low), vst1q_f32(each + 4, a.high);
        std::memcpy(to, each, size_t(count < 8 ? count : 8) * 4);
    }

    // out[r] = the dot products of 4 * steps inputs of row r with the panel's codes [steps, 8, 4].
    template <class C, int ROWS, int steps>
    static void dots(const uint8_t* w, const int8_t* x, int64_t stride, Floats* out) {
        int32x4_t low[ROWS], high[ROWS];
        for (int r = 0; r < ROWS; r++) low[r] = high[r] = vdupq_n_s32(0);
#pragma GCC unroll 8
        for (int i = 0; i < steps; i++) {
            int8x16_t first = vld1q_s8(reinterpret_cast<const int8_t*>(w + 32 * i));
            int8x16_t second = vld1q_s8(reinterpret_cast<const int8_t*>(w + 32 * i + 16));
#pragma GCC unroll 4
            for (int r = 0; r < ROWS; r++) {
                int8x16_t v = vreinterpretq_s8_s32(vdupq_n_s32(read<int32_t>(x + r * stride + 4 * i)));
                low[r] = vdotq_s32(low[r], first, v);
                high[r] = vdotq_s32(high[r], second, v);
            }
        }
        for (int r = 0; r < ROWS; r++) out[r] = {vcvtq_f32_s32(low[r]), vcvtq_f32_s32(high[r])};
    }

    // to[stride * j + i] = rows[i][at + j] for i, j < 8
    static void transpose(const void* const* rows, int64_t at, int32_t* to, int64_t stride) {
        for (int i = 0; i < 8; i += 4)
            for (int j = 0; j < 8; j += 4) {
                int32x4_t a[4], b[4];
                for (int k = 0; k < 4; k++) a[k] = vld1q_s32(static_cast<const int32_t*>(rows[i + k]) + at + j);
                for (int k = 0; k < 4; k += 2) b[k] = vtrn1q_s32(a[k], a[k + 1]), b[k + 1] = vtrn2q_s32(a[k], a[k + 1]);
                for (int k = 0; k < 2; k++) {
                    int64x2_t top = vreinterpretq_s64_s32(b[k]), bottom = vreinterpretq_s64_s32(b[k + 2]);
                    vst1q_s32(to + (j + k) * stride + i, vreinterpretq_s32_s64(vtrn1q_s64(top, bottom)));
                    vst1q_s32(to + (j + k + 2) * stride + i, vreinterpretq_s32_s64(vtrn2q_s64(top, bottom)));
                }
            }
    }
};

struct Neon {
    struct Bytes { uint8x16_t low, high; };
    struct Floats { float32x4_t low, high; };
    static constexpr int lanes = 8;
    static constexpr int tile_outs = 4;
    static constexpr int64_t few_rows = 3;
    using Wide = WideNeon;

    static Bytes load_bytes(const void* at) {
        const uint8_t* from = static_cast<const uint8_t*>(at);
        return {vld1q_u8(from), vld1q_u8(from + 16)};
    }
    static void store_bytes(void* at, Bytes a) {
        vst1q_u8(static_cast<uint8_t*>(at), a.low);
        vst1q_u8(static_cast<uint8_t*>(at) + 16, a.high);
    }
    static Bytes bytes(uint8_t value) { return {vdupq_n_u8(value), vdupq_n_u8(value)}; }
    static Bytes both(Bytes a, Bytes b) { return {vandq_u8(a.low, b.low), vandq_u8(a.high, b.high)}; }
    static Bytes either(Bytes a, Bytes b) { return {vorrq_u8(a.low, b.low), vorrq_u8(a.high, b.high)}; }
    static Bytes exclusive(Bytes a, Bytes b) { return {veorq_u8(a.low, b.low), veorq_u8(a.high, b.high)}; }
    template <int n>
    static Bytes right(Bytes a, uint8_t mask) {
        if constexpr (n > 0) a = {vshrq_n_u8(a.low, n), vshrq_n_u8(a.high, n)};
        return both(a, bytes(mask));
    }
    template <int n>
    static Bytes left(Bytes a, uint8_t mask) { return both({vshlq_n_u8(a.low, n), vshlq_n_u8(a.high, n)}, bytes(mask)); }

    static Bytes nibbles(const void* at) {
        uint8x16_t pairs = vld1q_u8(static_cast<const uint8_t*>(at));
        return {vandq_u8(pairs, vdupq_n_u8(15)), vshrq_n_u8(pairs, 4)};
    }
    static Bytes look_up(const int8_t* table, Bytes index) {
        uint8x16_t values = vreinterpretq_u8_s8(vld1q_s8(table));
        return {vqtbl1q_u8(values, index.low), vqtbl1q_u8(values, index.high)};
    }
    static Bytes fifth_bits(uint32_t bits) {
        uint8x16_t each = vreinterpretq_u8_u64(vdupq_n_u64(0x8040201008040201)), sixteen = vdupq_n_u8(16);
        uint8x16_t low = vcombine_u8(vdup_n_u8(uint8_t(bits)), vdup_n_u8(uint8_t(bits >> 8)));
        uint8x16_t high = vcombine_u8(vdup_n_u8(uint8_t(bits >> 16)), vdup_n_u8(uint8_t(bits >> 24)));
        return {vandq_u8(vtstq_u8(low, each), sixteen), vandq_u8(vtstq_u8(high, each), sixteen)};
    }

    static Floats zero() { return all(0); }
    static Floats all(float value) { return {vdupq_n_f32(value), vdupq_n_f32(value)}; }
    static Floats load(const float* at) { return {vld1q_f32(at), vld1q_f32(at + 4)}; }
    static void store(float* at, Floats a) {
        vst1q_f32(at, a.low);
        vst1q_f32(at + 4, a.high);
    }
    static Floats multiply(Floats a, Floats b) { return {vmulq_f32(a.low, b.low), vmulq_f32(a.high, b.high)}; }
    static Floats add(Floats a, Floats b) { return {vaddq_f32(a.low, b.low), vaddq_f32(a.high, b.high)}; }
    static Floats multiply_add(Floats a, Floats b, Floats c) { return {vfmaq_f32(c.low, a.low, b.low), vfmaq_f32(c.high, a.high, b.high)}; }
    static float sum(Floats a) { return vaddvq_f32(vaddq_f32(a.low, a.high)); }

    static Floats from_halves(uint16x8_t bits) {
        float16x8_t halves = vreinterpretq_f16_u16(bits);
        return {vcvt_f32_f16(vget_low_f16(halves)), vcvt_high_f32_f16(halves)};
    }
    static float half(const void* at) { return vgetq_lane_f32(vcvt_f32_f16(vreinterpret_f16_u16(vdup_n_u16(read<uint16_t>(at)))), 0); }
    static Floats twice_half(const void* a, const void* b, const void* c, const void* d) {
        uint16_t each[4] = {read<uint16_t>(a), read<uint16_t>(b), read<uint16_t>(c), read<uint16_t>(d)};
        uint16x4_t all = vld1_u16(each);
        return from_halves(vcombine_u16(vzip1_u16(all, all), vzip2_u16(all, all)));
    }
    static Floats two_halves(const void* a, const void* b, const void* c, const void* d) {
        uint32_t each[4] = {read<uint32_t>(a), read<uint32_t>(b), read<uint32_t>(c), read<uint32_t>(d)};
        return from_halves(vreinterpretq_u16_u32(vld1q_u32(each)));
    }
    static Floats twice(float a, float b, float c, float d) {
        float each[8] = {a, a, b, b, c, c, d, d};
        return load(each);
    }
    static Floats four_pairs(float a, float b, float c, float d, float e, float f, float g, float h) {
        float each[8] = {a, a * e, b, b * f, c, c * g, d, d * h};
        return load(each);
    }
    static Floats from_uint16(uint16x8_t wide) {
        return {vcvtq_f32_u32(vmovl_u16(vget_low_u16(wide))), vcvtq_f32_u32(vmovl_high_u16(wide))};
    }
    static Floats from_int16(int16x8_t wide) {
        return {vcvtq_f32_s32(vmovl_s16(vget_low_s16(wide))), vcvtq_f32_s32(vmovl_high_s16(wide))};
    }
    static Floats from_uint8(uint64_t eight) { return from_uint16(vmovl_u8(vcreate_u8(eight))); }
    static Floats from_int8(uint64_t eight) { return from_int16(vmovl_s8(vcreate_s8(eight))); }
    static Floats bit_fields(uint32_t low, uint32_t high) {
        uint64_t all = 0;
        for (int g = 0; g < 8; g++) all |= uint64_t((low >> 4 * g & 15) | (high >> 2 * g & 3) << 4) << 8 * g;
        return add(from_uint8(all), Neon::all(-32));
    }
    static Floats pair(const float* at) {
        float32x4_t twice = vreinterpretq_f32_u64(vdupq_n_u64(read<uint64_t>(at)));
        return {twice, twice};
    }
    static Floats halves(const float* at) { return {vdupq_n_f32(at[0]), vdupq_n_f32(at[1])}; }

    static Floats dot_signed(Bytes codes, Bytes x) {
        int32x4_t none = vdupq_n_s32(0);
        return {vcvtq_f32_s32(vdotq_s32(none, vreinterpretq_s8_u8(codes.low), vreinterpretq_s8_u8(x.low))),
                vcvtq_f32_s32(vdotq_s32(none, vreinterpretq_s8_u8(codes.high), vreinterpretq_s8_u8(x.high)))};
    }
    static Floats dot_unsigned(Bytes codes, Bytes x) { return dot_signed(codes, x); }  // codes are at most 127

    template <int i, bool is_signed>
    static Floats widen(Bytes codes) {
        uint8x16_t half = i < 2 ? codes.low : codes.high;
        uint8x8_t eight = i % 2 ? vget_high_u8(half) : vget_low_u8(half);
        return is_signed ? from_int16(vmovl_s8(vreinterpret_s8_u8(eight))) : from_uint16(vmovl_u8(eight));
    }

    static Floats load_bfloat16(const uint16_t* at) {
        uint16x8_t bits = vld1q_u16(at);
        return {vreinterpretq_f32_u32(vshll_n_u16(vget_low_u16(bits), 16)), vreinterpretq_f32_u32(vshll_high_n_u16(bits, 16))};
    }
    static Floats load_half(const uint16_t* at) { return from_halves(vld1q_u16(at)); }
    static Floats load_e4m3(const uint8_t* at) {
        int16x8_t wide = vshlq_n_s16(vmovl_s8(vreinterpret_s8_u8(vld1_u8(at))), 7);
        return from_halves(vandq_u16(vreinterpretq_u16_s16(wide), vdupq_n_u16(0xbfff)));
    }

    static void quantize(const float* x, int8_t* codes, float* scale, int32_t* sums) {
        float32x4_t v[8], largest = vdupq_n_f32(0);
        for (int i = 0; i < 8; i++) {
            v[i] = vld1q_f32(x + 4 * i);
            largest = vmaxq_f32(largest, vabsq_f32(v[i]));  // a NaN stays
        }
        float most = vmaxvq_f32(largest);
        if (!(most <= 3.402823466e38f)) return product_reference.quantize(x, codes, scale, sums);
        *scale = most / 127;
        float inverse = most > 1e-30f ? 127 / most : 0;
        int16x8_t total[2] = {vdupq_n_s16(0), vdupq_n_s16(0)};
        for (int i = 0; i < 8; i += 2) {
            int32x4_t low = vcvtnq_s32_f32(vmulq_n_f32(v[i], inverse)), high = vcvtnq_s32_f32(vmulq_n_f32(v[i + 1], inverse));
            int16x8_t eight = vcombine_s16(vmovn_s32(low), vmovn_s32(high));
            total[i / 4] = vaddq_s16(total[i / 4], eight);
            vst1_s8(codes + 4 * i, vmovn_s16(eight));
        }
        sums[0] = vaddlvq_s16(total[0]), sums[1] = vaddlvq_s16(total[1]);
    }

    template <bool far>
    static void prefetch(const void* at) { __builtin_prefetch(at, 0, far ? 2 : 3); }
};

}  // namespace
