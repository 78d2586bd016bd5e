// Vectors of float32 in the widest registers that a file may use, by the compiler's vector extension.
//
// Everything here is static or in an unnamed namespace: each file is compiled for other instructions, and the linker
// must not pick one version for all.
#pragma once
#include <math.h>
#include <cstdint>
#include <cstring>
#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace {

#if defined(__AVX512F__)
constexpr int LANES = 16;
#elif defined(__AVX2__)
constexpr int LANES = 8;
#else
constexpr int LANES = 4;
#endif

typedef float vf __attribute__((vector_size(4 * LANES)));
typedef int32_t vi __attribute__((vector_size(4 * LANES)));
typedef uint32_t vu __attribute__((vector_size(4 * LANES)));
typedef uint16_t vh __attribute__((vector_size(2 * LANES)));

// How values are stored: the number in a field `…_type` of a kernel's arguments.
enum Type : int64_t { FLOAT32 = 0, BFLOAT16 = 1, FLOAT16 = 2 };
struct bfloat16 { uint16_t bits; };
struct float16 { uint16_t bits; };

static inline vf zeros() { return vf{}; }
static inline vf all(float x) { return vf{} + x; }

static inline vf load(const float* p) { vf v; memcpy(&v, p, sizeof v); return v; }
static inline vf load(const bfloat16* p) {
  vh h; memcpy(&h, p, sizeof h);
  vu wide = __builtin_convertvector(h, vu) << 16;
  vf v; memcpy(&v, &wide, sizeof v); return v;
}
static inline void store(float* p, vf v) { memcpy(p, &v, sizeof v); }

static inline float value(float x) { return x; }
static inline float value(bfloat16 x) { uint32_t bits = uint32_t(x.bits) << 16; float f; memcpy(&f, &bits, 4); return f; }
static inline float value(float16 x) {
  uint32_t h = x.bits, sign = (h & 0x8000u) << 16, magnitude = h & 0x7fffu, bits;
  if (magnitude >= 0x7c00u) bits = sign | 0x7f800000u | (magnitude & 0x3ffu) << 13;  // infinity, NaN
  else if (magnitude >= 0x400u) bits = sign | ((magnitude << 13) + 0x38000000u);
  else {  // a subnormal is a multiple of 2^-24
    float f = float(magnitude) * 5.9604644775390625e-8f;
    memcpy(&bits, &f, 4), bits |= sign;
  }
  float f; memcpy(&f, &bits, 4); return f;
}
static inline vf load(const float16* p) {
  float f[LANES];
  for (int i = 0; i < LANES; ++i) f[i] = value(p[i]);
  return load(f);
}

static inline void put(float* p, float x) { *p = x; }
static inline void put(bfloat16* p, float x) {
  uint32_t bits; memcpy(&bits, &x, 4);
  if (x != x) bits = 0x7fc00000u;
  else bits += 0x7fffu + (bits >> 16 & 1);  // to the nearest, ties to even
  p->bits = uint16_t(bits >> 16);
}
static inline void put(float16* p, float x) {
  uint32_t bits; memcpy(&bits, &x, 4);
  uint32_t sign = bits >> 16 & 0x8000u, magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) p->bits = uint16_t(sign | 0x7e00u);
  else if (magnitude >= 0x477ff000u) p->bits = uint16_t(sign | 0x7c00u);
  else if (magnitude < 0x38800000u) {  // subnormal: the sum below rounds to a multiple of 2^-24
    float f; memcpy(&f, &magnitude, 4);
    f += 0.5f; memcpy(&magnitude, &f, 4);
    p->bits = uint16_t(sign | (magnitude - 0x3f000000u));
  } else p->bits = uint16_t(sign | ((magnitude - 0x38000000u + 0xfffu + (magnitude >> 13 & 1)) >> 13));
}

// Calls f with a pointer of the type that `type` names.
template <class F> static inline void with_type(int64_t type, void* p, F f) {
  if (type == FLOAT32) f(static_cast<float*>(p));
  else if (type == BFLOAT16) f(static_cast<bfloat16*>(p));
  else f(static_cast<float16*>(p));
}
template <class F> static inline void with_type(int64_t type, const void* p, F f) {
  if (type == FLOAT32) f(static_cast<const float*>(p));
  else if (type == BFLOAT16) f(static_cast<const bfloat16*>(p));
  else f(static_cast<const float16*>(p));
}
static inline int64_t bytes_of(int64_t type) { return type == FLOAT32 ? 4 : 2; }

static inline float sum(vf v) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_ps(v);
#elif defined(__AVX2__)
  __m128 half = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  half = _mm_add_ps(half, _mm_movehl_ps(half, half));
  return _mm_cvtss_f32(_mm_add_ss(half, _mm_movehdup_ps(half)));
#else
  return (v[0] + v[2]) + (v[1] + v[3]);
#endif
}

// The sums of four vectors: together they take half of the time of one after the other.
static inline void sums(const vf* v, float* to) {
#if defined(__AVX512F__)
  __m512 a = _mm512_add_ps(_mm512_unpacklo_ps(v[0], v[1]), _mm512_unpackhi_ps(v[0], v[1]));
  __m512 b = _mm512_add_ps(_mm512_unpacklo_ps(v[2], v[3]), _mm512_unpackhi_ps(v[2], v[3]));
  a = _mm512_add_ps(_mm512_shuffle_ps(a, b, 0x44), _mm512_shuffle_ps(a, b, 0xee));
  __m256 c = _mm256_add_ps(_mm512_castps512_ps256(a), _mm512_extractf32x8_ps(a, 1));
  _mm_storeu_ps(to, _mm_add_ps(_mm256_castps256_ps128(c), _mm256_extractf128_ps(c, 1)));
#elif defined(__AVX2__)
  __m256 a = _mm256_hadd_ps(_mm256_hadd_ps(v[0], v[1]), _mm256_hadd_ps(v[2], v[3]));
  _mm_storeu_ps(to, _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1)));
#else
  for (int i = 0; i < 4; ++i) to[i] = sum(v[i]);
#endif
}

static inline vf select(vi which, vf a, vf b) {
  vi x, y; memcpy(&x, &a, sizeof x), memcpy(&y, &b, sizeof y);
  x = (which & x) | (~which & y);
  vf v; memcpy(&v, &x, sizeof v); return v;
}
static inline vf larger(vf a, vf b) { return select(a > b, a, b); }

// e^x to about one unit in the last place; 0 below -87.3, infinity above 88.7. NaN stays NaN.
static inline vf exp_of(vf x) {
  const vf rounder = all(12582912.0f);  // 1.5 · 2^23
  vf bounded = select(x < all(-88.0f), all(-88.0f), select(x > all(88.8f), all(88.8f), x));
  vf n = (bounded * all(1.44269504088896341f) + rounder) - rounder;
  vf r = bounded - n * all(0.693359375f);
  r = r - n * all(-2.12194440e-4f);
  vf p = all(1.9875691500e-4f);
  p = p * r + all(1.3981999507e-3f);
  p = p * r + all(8.3334519073e-3f);
  p = p * r + all(4.1665795894e-2f);
  p = p * r + all(1.6666665459e-1f);
  p = p * r + all(5.0000001201e-1f);
  p = p * (r * r) + r + all(1.0f);
  vi half = __builtin_convertvector(n * all(0.5f), vi);  // in two steps: 2^128 alone is no float
  vi rest = __builtin_convertvector(n, vi) - half;
  vi one = (half + 127) << 23, two = (rest + 127) << 23;
  vf a, b; memcpy(&a, &one, sizeof a), memcpy(&b, &two, sizeof b);
  vf y = p * a * b;
  y = select(x < all(-87.33f), zeros(), y);
  return select(x != x, x, y);
}

static inline vf sigmoid_of(vf x) { return all(1.0f) / (all(1.0f) + exp_of(-x)); }

}  // namespace
