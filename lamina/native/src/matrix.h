// Products of few vectors with a weight (products.h), and what stands around them: bias, scale, activation, gate,
// softcap, residual. A thread does all of it for the outputs that it computed.
#pragma once
#include "activation.h"
#include "products.h"

namespace {

// -- int8 activations: groups of 32 values, each with a scale, and the sums of the codes of its halves --------------------------------

struct QuantizeArgs {
  const float* x;       // [rows, in], rows at x_stride
  int8_t* codes;        // [rows, in]
  float* scales;        // [rows, in / 32]
  int32_t* sums;        // [rows, in / 16]
  int64_t rows, in, x_stride;
};

constexpr int64_t GROUPS = 64;  // of one piece of work

static int64_t quantize_units(const QuantizeArgs* a) { return (a->rows * (a->in / 32) + GROUPS - 1) / GROUPS; }

static void quantize_run(const QuantizeArgs* a, int64_t unit) {
  int64_t all_groups = a->rows * (a->in / 32), begin = unit * GROUPS;
  int64_t end = begin + GROUPS < all_groups ? begin + GROUPS : all_groups;
  lamina_quantize_rows(a->x, a->rows, a->in, a->x_stride, a->codes, a->scales, a->sums, begin, end);
}

// -- columns in another order -----------------------------------------------------------------------------------------

struct PermuteArgs {
  const float* x;        // [rows, width], rows at x_stride
  const int32_t* order;  // [width]
  float* out;            // [rows, width]
  int64_t rows, width, x_stride;
};

static int64_t permute_units(const PermuteArgs* a) { return a->rows; }

static void permute_run(const PermuteArgs* a, int64_t row) {
  for (int64_t i = 0; i < a->width; ++i) a->out[row * a->width + i] = a->x[row * a->x_stride + a->order[i]];
}

// -- products ---------------------------------------------------------------------------------------------------------

struct ProductArgs {
  const Product* segments;  // the weight, in segments of rows; their y is `out`, or `wide` where gated
  const void* bias;         // [outputs or 2 · outputs], or null
  const float* scales;      // [outputs], or null
  const float* residual;    // [rows, outputs], or null
  float* out;               // [rows, outputs]
  float* wide;              // scratch [rows, 2 · outputs] where gated
  int64_t count, rows, outputs, bias_type, act, gated, block;  // segments; outputs of one piece of work
  double scale, softcap;    // softcap 0: none
};

static int64_t product_units(const ProductArgs* a) { return (a->outputs + a->block - 1) / a->block; }

// Outputs begin … end of x Wᵀ, whichever segments they are in.
static inline void multiply(const ProductArgs* a, int64_t begin, int64_t end) {
  int64_t first = 0;
  for (int64_t i = 0; i < a->count && first < end; ++i) {
    const Product* one = a->segments + i;
    int64_t from = begin > first ? begin - first : 0, to = end - first < one->out ? end - first : one->out;
    if (from < to) lamina_product(one, from, to);
    first += one->out;
  }
}

static inline void add_bias(const ProductArgs* a, float* y, int64_t begin, int64_t end) {
  if (!a->bias) return;
  with_type(a->bias_type, a->bias, [&](auto* b) {
    for (int64_t i = begin; i < end; ++i) y[i] += value(b[i]);
  });
}

static void product_run(const ProductArgs* a, int64_t unit) {
  const int64_t begin = unit * a->block, n = a->outputs;
  const int64_t end = begin + a->block < n ? begin + a->block : n;
  const float scale = float(a->scale), cap = float(a->softcap);
  float* wide = a->gated ? a->wide : a->out;
  const int64_t stride = a->gated ? 2 * n : n;
  multiply(a, begin, end);
  if (a->gated) multiply(a, n + begin, n + end);
  for (int64_t r = 0; r < a->rows; ++r) {
    float *y = wide + r * stride, *out = a->out + r * n;
    add_bias(a, y, begin, end);
    if (scale != 1)
      for (int64_t i = begin; i < end; ++i) y[i] *= scale;
    if (a->scales)
      for (int64_t i = begin; i < end; ++i) y[i] *= a->scales[i];
    if (a->act) activate(y + begin, end - begin, a->act);
    if (a->gated) {
      add_bias(a, y, n + begin, n + end);
      for (int64_t i = begin; i < end; ++i) out[i] = y[i] * y[n + i];
    }
    if (cap != 0)
      for (int64_t i = begin; i < end; ++i) out[i] = tanhf(out[i] / cap) * cap;
    if (a->residual)
      for (int64_t i = begin; i < end; ++i) out[i] += a->residual[r * n + i];
  }
}

}  // namespace
