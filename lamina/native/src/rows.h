// Kernels over the vectors of tokens: embedding lookup, norms, the cos/sin table of RoPE. Activations are float32.
#pragma once
#include "activation.h"
#include "products.h"

namespace {

// -- embedding: out[n] = residual[n] + scale · weight[ids[n]] -------------------------------------------------------

struct EmbedArgs {
  const int64_t* ids;    // [rows]
  const Product* weight; // [vocab, width], in segments of rows
  const float* residual; // [rows, width], or null
  float* out;            // [rows, width]
  int64_t rows, width, vocab, count;  // count: segments
  double scale;
};

static int64_t embed_units(const EmbedArgs* a) { return a->rows; }

static void embed_run(const EmbedArgs* a, int64_t n) {
  int64_t id = a->ids[n] < 0 ? 0 : a->ids[n] < a->vocab ? a->ids[n] : a->vocab - 1;
  const Product* segment = a->weight;
  for (; id >= segment->out; ++segment) id -= segment->out;
  const float scale = float(a->scale);
  float* out = a->out + n * a->width;
  lamina_dequantize(segment, id, id + 1, out);
  if (scale != 1)
    for (int64_t i = 0; i < a->width; ++i) out[i] *= scale;
  if (a->residual)
    for (int64_t i = 0; i < a->width; ++i) out[i] += a->residual[n * a->width + i];
}

// -- norms of rows --------------------------------------------------------------------------------------------------

struct NormArgs {
  const float* x;        // [rows, width], rows at x_stride
  const void* weight;    // [width], or null
  const void* bias;      // [width], or null
  const float* residual; // [rows, width], or null
  float* out;            // [rows, width]
  int64_t rows, width, x_stride, weight_type;
  int64_t centred;       // 1: layer norm, 0: RMS norm
  double eps, plus;      // plus: added to the weight
};

static int64_t norm_units(const NormArgs* a) { return a->rows; }

// 1 / √(mean of squares + eps) of x - shift.
static inline float inverse_rms(const float* x, int64_t width, float shift, double eps) {
  vf squares = zeros(), more = zeros();
  int64_t i = 0;
  for (; i + 2 * LANES <= width; i += 2 * LANES) {
    vf a = load(x + i) - shift, b = load(x + i + LANES) - shift;
    squares = squares + a * a, more = more + b * b;
  }
  float total = sum(squares + more);
  for (; i < width; ++i) total += (x[i] - shift) * (x[i] - shift);
  return 1.0f / sqrtf(total / float(width) + float(eps));
}

static inline float mean_of(const float* x, int64_t width) {
  vf total = zeros();
  int64_t i = 0;
  for (; i + LANES <= width; i += LANES) total = total + load(x + i);
  float all_of_it = sum(total);
  for (; i < width; ++i) all_of_it += x[i];
  return all_of_it / float(width);
}

// out = (x - shift) · factor · (weight + plus), weight may be null.
static inline void scale_by(
    float* out, const float* x, int64_t width, float shift, float factor, const void* weight, int64_t type, float plus) {
  if (!weight) {
    for (int64_t i = 0; i < width; ++i) out[i] = (x[i] - shift) * factor;
    return;
  }
  with_type(type, weight, [&](auto* w) {
    for (int64_t i = 0; i < width; ++i) out[i] = (x[i] - shift) * factor * (value(w[i]) + plus);
  });
}

static void norm_run(const NormArgs* a, int64_t n) {
  const float* x = a->x + n * a->x_stride;
  float* out = a->out + n * a->width;
  float shift = a->centred ? mean_of(x, a->width) : 0.0f;
  float factor = inverse_rms(x, a->width, shift, a->eps);
  scale_by(out, x, a->width, shift, factor, a->weight, a->weight_type, float(a->plus));
  if (a->bias)
    with_type(a->weight_type, a->bias, [&](auto* b) {
      for (int64_t i = 0; i < a->width; ++i) out[i] += value(b[i]);
    });
  if (a->residual)
    for (int64_t i = 0; i < a->width; ++i) out[i] += a->residual[n * a->width + i];
}

// -- norms with a gate: norm(x · act(gate)) or norm(x) · act(gate), of each group of values by itself ------------------

struct GatedNormArgs {
  const float* x;      // [rows, width], rows at x_stride
  const float* gate;   // rows at gate_stride
  const void* weight;  // [width]
  float* out;          // [rows, width]
  int64_t rows, width, x_stride, gate_outer, gate_stride, gate_inner, weight_type, groups, gate_first, sigmoid;
  double eps;
};

static int64_t gated_norm_units(const GatedNormArgs* a) { return a->rows; }

static void gated_norm_run(const GatedNormArgs* a, int64_t n) {
  const float* x = a->x + n * a->x_stride;
  const float* gate = a->gate + n / a->gate_inner * a->gate_outer + n % a->gate_inner * a->gate_stride;
  float* out = a->out + n * a->width;
  float opened[64];
  auto open = [&](int64_t from, int64_t count) {
    for (int64_t i = 0; i < count; ++i) opened[i] = gate[from + i];
    activate(opened, count, a->sigmoid ? SIGMOID : SILU);
  };
  for (int64_t i = 0; i < a->width; i += 64) {
    int64_t count = a->width - i < 64 ? a->width - i : 64;
    if (a->gate_first) open(i, count);
    for (int64_t j = 0; j < count; ++j) out[i + j] = a->gate_first ? x[i + j] * opened[j] : x[i + j];
  }
  int64_t part = a->width / a->groups;
  for (int64_t g = 0; g < a->groups; ++g) {
    float factor = inverse_rms(out + g * part, part, 0.0f, a->eps);
    for (int64_t i = g * part; i < (g + 1) * part; ++i) out[i] *= factor;
  }
  with_type(a->weight_type, a->weight, [&](auto* w) {
    for (int64_t i = 0; i < a->width; ++i) out[i] *= value(w[i]);
  });
  if (a->gate_first) return;
  for (int64_t i = 0; i < a->width; i += 64) {
    int64_t count = a->width - i < 64 ? a->width - i : 64;
    open(i, count);
    for (int64_t j = 0; j < count; ++j) out[i + j] *= opened[j];
  }
}

// -- RoPE: cos and sin of position · frequency ------------------------------------------------------------------------

struct RopeArgs {
  const int64_t* positions;    // [rows]
  const float* frequencies;    // [pairs]
  float *cos, *sin;            // [rows, pairs]
  int64_t rows, pairs;
  double scale;
};

static int64_t rope_units(const RopeArgs* a) { return a->rows; }

static void rope_run(const RopeArgs* a, int64_t n) {
  const float scale = float(a->scale), position = float(a->positions[n]);
  for (int64_t i = 0; i < a->pairs; ++i) {
    float angle = position * a->frequencies[i];
    a->cos[n * a->pairs + i] = cosf(angle) * scale;
    a->sin[n * a->pairs + i] = sinf(angle) * scale;
  }
}

}  // namespace
