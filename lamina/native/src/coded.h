// Keys, values and latents that a codec stores in fewer bits: lamina/cache/codec/formats.py defines the formats.
//
// Groups of 32 values, each with a scale and an offset; keys and values are rotated first, group by group, by a Hadamard
// matrix. Attention does not rotate tokens back: q · k = q · mean + (H q) · (scale · code + offset), and the output over
// rotated values is rotated back once.
#pragma once
#include "entry.h"

namespace {

constexpr int64_t CODED_GROUP = 32, LAYOUT_FP8 = 9;  // layouts: 8, 6, 5 or 4 bits, and LAYOUT_FP8

struct Coding {
  const float* mean;            // [heads, dim] subtracted from keys, or null
  int64_t layout, rotate, dim;
};

// The three parts of one field of an entry.
struct CodedStore {
  uint8_t *codes, *high;
  float16* scales;
};

static inline CodedStore coded_store(const int64_t* table, bool values) {
  return {reinterpret_cast<uint8_t*>(table[values ? V_STORE : K_STORE]),
          reinterpret_cast<uint8_t*>(table[values ? V_HIGH : K_HIGH]),
          reinterpret_cast<float16*>(table[values ? V_SCALES : K_SCALES])};
}

static inline int64_t low_bytes(int64_t n, int64_t bits) { return bits == 8 ? n : (n + 1) / 2; }
static inline int64_t high_bytes(int64_t n, int64_t bits) { return bits == 8 ? 0 : (bits - 4) * ((n + 7) / 8); }
static inline int64_t code_bytes(const Coding* c) {
  if (c->layout >= 8) return c->dim;
  return c->dim / CODED_GROUP * 16 + low_bytes(c->dim % CODED_GROUP, c->layout);
}
static inline int64_t plane_bytes(const Coding* c) {
  if (c->layout >= 8 || c->layout == 4) return 0;
  return c->dim / CODED_GROUP * high_bytes(CODED_GROUP, c->layout) + high_bytes(c->dim % CODED_GROUP, c->layout);
}
static inline int64_t scale_count(const Coding* c) {
  return c->layout == LAYOUT_FP8 ? 1 : 2 * ((c->dim + CODED_GROUP - 1) / CODED_GROUP);
}

// Multiplies every whole group by the Hadamard matrix / √32, which is its own inverse.
static inline void rotate_groups(float* x, int64_t dim) {
  for (int64_t g = 0; g + CODED_GROUP <= dim; g += CODED_GROUP) {
    float* y = x + g;
    for (int64_t half = 1; half < CODED_GROUP; half *= 2)
      for (int64_t i = 0; i < CODED_GROUP; i += 2 * half)
        for (int64_t j = i; j < i + half; ++j) {
          float a = y[j], b = y[j + half];
          y[j] = a + b, y[j + half] = a - b;
        }
    for (int64_t i = 0; i < CODED_GROUP; ++i) y[i] *= 0.17677669529663687f;
  }
}

static inline float to_half(float x, float16* stored) {
  x = x > 65504.0f ? 65504.0f : x < -65504.0f ? -65504.0f : x;
  put(stored, x);
  return value(*stored);
}
static inline float half_above(float x, float16* stored) {  // a float16 that is at least x
  return to_half(x * (1 + 0.0009765625f) + 2.98023223876953125e-8f, stored);
}

static inline float from_e4m3(uint8_t code) {
  uint32_t magnitude = code & 127;
  float x = magnitude >= 8 ? 0.0f : float(magnitude) * 0.001953125f;  // subnormal: a multiple of 2^-9
  if (magnitude >= 8) {
    uint32_t bits = (magnitude << 20) + (120u << 23);
    memcpy(&x, &bits, 4);
  }
  if (magnitude == 127) x = NAN;
  return code & 128 ? -x : x;
}
static inline uint8_t to_e4m3(float x) {  // |x| ≤ 448, to the nearest, ties to even
  uint8_t sign = x < 0 ? 128 : 0;
  float a = fabsf(x);
  if (a < 0.015625f) return uint8_t(sign | uint8_t(rintf(a * 512.0f)));
  uint32_t bits;
  memcpy(&bits, &a, 4);
  bits += 0x7ffffu + (bits >> 20 & 1);
  return uint8_t(sign | uint8_t((bits >> 20) - (120u << 3)));
}

// Quantizes one vector, which is changed, into cell `cell` of a store. mean: that of its head, or null
static inline void encode_vector(const Coding* c, float* x, const float* mean, CodedStore store, int64_t cell) {
  if (mean)
    for (int64_t i = 0; i < c->dim; ++i) x[i] -= mean[i];
  uint8_t *codes = store.codes + cell * code_bytes(c), *high = store.high + cell * plane_bytes(c);
  float16* scales = store.scales + cell * scale_count(c);
  if (c->layout == LAYOUT_FP8) {
    float most = 0;
    for (int64_t i = 0; i < c->dim; ++i) most = fabsf(x[i]) > most ? fabsf(x[i]) : most;
    float scale = half_above(most / 448, scales), inverse = scale > 0 ? 1 / scale : 0;
    for (int64_t i = 0; i < c->dim; ++i) {
      float y = x[i] * inverse;
      codes[i] = to_e4m3(y > 448 ? 448 : y < -448 ? -448 : y);
    }
    return;
  }
  if (c->rotate) rotate_groups(x, c->dim);
  const int64_t bits = c->layout;
  const float largest = float((1 << bits) - 1);
  for (int64_t begin = 0; begin < c->dim; begin += CODED_GROUP, scales += 2) {
    const int64_t n = c->dim - begin < CODED_GROUP ? c->dim - begin : CODED_GROUP;
    const float* y = x + begin;
    float least = y[0], most = y[0];
    for (int64_t i = 1; i < n; ++i) least = y[i] < least ? y[i] : least, most = y[i] > most ? y[i] : most;
    float offset = to_half(least - fabsf(least) / 1024, scales + 1);
    float scale = half_above((most - offset) / largest, scales), inverse = scale > 0 ? 1 / scale : 0;
    uint8_t found[CODED_GROUP] = {};
    for (int64_t i = 0; i < n; ++i) {
      float code = rintf((y[i] - offset) * inverse);
      found[i] = uint8_t(code < 0 ? 0 : code > largest ? largest : code);
    }
    if (bits == 8) {
      memcpy(codes, found, size_t(n)), codes += n;
      continue;
    }
    const int64_t half = (n + 1) / 2;
    for (int64_t i = 0; i < half; ++i) codes[i] = uint8_t((found[i] & 15) | (i + half < n ? found[i + half] & 15 : 0) << 4);
    codes += half;
    for (int64_t at = 4; at < bits; ++at)
      for (int64_t m = 0; m < (n + 7) / 8; ++m) {
        uint8_t byte = 0;
        for (int64_t j = 0; j < 8 && 8 * m + j < n; ++j) byte |= uint8_t((found[8 * m + j] >> at & 1) << j);
        *high++ = byte;
      }
  }
}

// The vector in a cell as it was quantized, without mean, still rotated.
static inline void decode_vector(const Coding* c, CodedStore store, int64_t cell, float* x) {
  const uint8_t *codes = store.codes + cell * code_bytes(c), *high = store.high + cell * plane_bytes(c);
  const float16* scales = store.scales + cell * scale_count(c);
  if (c->layout == LAYOUT_FP8) {
    const float scale = value(*scales);
    for (int64_t i = 0; i < c->dim; ++i) x[i] = from_e4m3(codes[i]) * scale;
    return;
  }
  const int64_t bits = c->layout, planes = bits == 8 ? 0 : bits - 4;
  for (int64_t begin = 0; begin < c->dim; begin += CODED_GROUP, scales += 2) {
    const float scale = value(scales[0]), offset = value(scales[1]);
    float* y = x + begin;
    if (c->dim - begin >= CODED_GROUP && bits == 8) {
      for (int64_t i = 0; i < CODED_GROUP; ++i) y[i] = float(codes[i]) * scale + offset;
      codes += CODED_GROUP;
      continue;
    }
    if (c->dim - begin >= CODED_GROUP && bits == 4) {
      for (int64_t i = 0; i < 16; ++i) y[i] = float(codes[i] & 15) * scale + offset;
      for (int64_t i = 0; i < 16; ++i) y[i + 16] = float(codes[i] >> 4) * scale + offset;
      codes += 16;
      continue;
    }
    const int64_t n = c->dim - begin < CODED_GROUP ? c->dim - begin : CODED_GROUP, half = low_bytes(n, bits);
    const int64_t plane = (n + 7) / 8;
    for (int64_t i = 0; i < n; ++i) {
      int code = bits == 8 ? codes[i] : i < half ? codes[i] & 15 : codes[i - half] >> 4;
      for (int64_t at = 0; at < planes; ++at) code |= (high[at * plane + i / 8] >> i % 8 & 1) << (4 + at);
      y[i] = float(code) * scale + offset;
    }
    codes += half, high += planes * plane;
  }
}

}  // namespace
