// Mixtures of experts: the choice of experts from router logits, and the products of the chosen ones.
#pragma once
#include "activation.h"
#include "products.h"

namespace {

// -- the choice, as `Choice` in lamina/nn/moe/router.py ------------------------------------------------------------------

enum Score : int64_t { SOFTMAX, SIGMOID_SCORE, SPARSEMIXER };

struct RouteArgs {
  const float* logits;   // [rows, stride]
  const float* bias;     // [experts] or null: takes part in the choice only
  const float* scales;   // [experts] or null: factors of the weights
  int64_t* chosen;       // [rows, each]
  float* weights;        // [rows, each]
  int64_t rows, stride, experts, each, score, normed, groups, groups_each, group_best;
  double factor, least, eps, jitter;
};

constexpr int64_t MOST_EXPERTS = 1024;

static int64_t route_units(const RouteArgs* a) { return a->rows; }

static inline int64_t largest(const float* x, int64_t n) {
  int64_t best = 0;
  for (int64_t i = 1; i < n; ++i) best = x[i] > x[best] ? i : best;
  return best;
}

static inline void softmax_of(float* to, const float* x, int64_t n) {
  float top = x[largest(x, n)], total = 0;
  for (int64_t i = 0; i < n; ++i) to[i] = x[i] == -INFINITY ? 0.0f : expf(x[i] - top), total += to[i];
  for (int64_t i = 0; i < n; ++i) to[i] /= total;
}

static inline void sparsemixer(const RouteArgs* a, const float* logits, int64_t* chosen, float* weights) {
  float left[MOST_EXPERTS], near[MOST_EXPERTS];
  memcpy(left, logits, size_t(a->experts) * 4);
  for (int64_t k = 0; k < a->each; ++k) {
    int64_t best = largest(left, a->experts);
    float top = left[best];
    for (int64_t i = 0; i < a->experts; ++i) {
      float size = fabsf(logits[i]) > top ? fabsf(logits[i]) : top;
      near[i] = (top - logits[i]) / size > float(2 * a->jitter) ? -INFINITY : left[i];
    }
    softmax_of(near, near, a->experts);
    chosen[k] = best, weights[k] = near[best], left[best] = -INFINITY;
  }
}

static void route_run(const RouteArgs* a, int64_t row) {
  const float* logits = a->logits + row * a->stride;
  int64_t n = a->experts, *chosen = a->chosen + row * a->each;
  float* weights = a->weights + row * a->each;
  if (a->score == SPARSEMIXER) {
    sparsemixer(a, logits, chosen, weights);
  } else {
    float scores[MOST_EXPERTS], merit[MOST_EXPERTS];
    if (a->score == SOFTMAX) softmax_of(scores, logits, n);
    else for (int64_t i = 0; i < n; ++i) scores[i] = sigmoid_of(logits[i]);
    for (int64_t i = 0; i < n; ++i) merit[i] = a->bias ? scores[i] + a->bias[i] : logits[i];
    if (a->groups > 1) {
      int64_t size = n / a->groups;
      float of_group[MOST_EXPERTS];
      bool open[MOST_EXPERTS] = {};
      for (int64_t g = 0; g < a->groups; ++g) {
        float left[MOST_EXPERTS];
        memcpy(left, merit + g * size, size_t(size) * 4);
        of_group[g] = 0;
        for (int64_t k = 0; k < a->group_best; ++k) {
          int64_t best = largest(left, size);
          of_group[g] += left[best], left[best] = -INFINITY;
        }
      }
      for (int64_t k = 0; k < a->groups_each; ++k) {
        int64_t best = largest(of_group, a->groups);
        open[best] = true, of_group[best] = -INFINITY;
      }
      for (int64_t i = 0; i < n; ++i) merit[i] = open[i / size] ? merit[i] : -INFINITY;
    }
    for (int64_t k = 0; k < a->each; ++k) {
      chosen[k] = largest(merit, n);
      weights[k] = scores[chosen[k]], merit[chosen[k]] = -INFINITY;
    }
  }
  if (a->normed) {
    float total = 0;
    for (int64_t k = 0; k < a->each; ++k) total += weights[k];
    total = (total > float(a->least) ? total : float(a->least)) + float(a->eps);
    for (int64_t k = 0; k < a->each; ++k) weights[k] /= total;
  }
  for (int64_t k = 0; k < a->each; ++k) weights[k] *= float(a->factor) * (a->scales ? a->scales[chosen[k]] : 1.0f);
}

// -- products with the matrices of chosen experts -------------------------------------------------------------------------
//
// A pair is a token and one of its experts. The first product gives each pair its inner values, the second multiplies
// them by the down matrix and the pair's weight, and `expert_sum` adds up the pairs of a token.

struct ExpertsArgs {
  const Product* weight;     // of expert 0, in segments; x, y and rows are set here
  const int64_t* steps;      // [segments, 3]: bytes from one expert's codes, scales and zeros to the next's
  const void* bias;          // [experts, outputs or 2 · outputs], or null
  const int64_t* chosen;     // [pairs]
  const float* weights;      // [pairs] or null: factors of the input
  const float* x;            // [pairs / x_each, in]: the input of pair i is row i / x_each
  float* wide;               // scratch [pairs, outputs or 2 · outputs]
  float* out;                // [pairs, outputs]
  int64_t segments, experts, pairs, in, outputs, x_each, gated, act, bias_type, block;
  const int8_t* qx; const float* qx_scales; const int32_t* qx_sums;  // of x, for int8 activations
  double limit, plus, slope; // of the gating; limit 0: none
};

static int64_t experts_units(const ExpertsArgs* a) { return a->pairs * ((a->outputs + a->block - 1) / a->block); }

static inline void expert_outputs(const ExpertsArgs* a, int64_t pair, int64_t expert, float* y, int64_t begin, int64_t end) {
  int64_t first = 0, token = pair / a->x_each;
  for (int64_t s = 0; s < a->segments && first < end; ++s) {
    Product one = a->weight[s];
    int64_t from = begin > first ? begin - first : 0, to = end - first < one.out ? end - first : one.out;
    const int64_t* step = a->steps + 3 * s;
    one.codes = static_cast<const char*>(one.codes) + expert * step[0];
    if (one.scales) one.scales = static_cast<const char*>(one.scales) + expert * step[1];
    if (one.zeros) one.zeros = static_cast<const char*>(one.zeros) + expert * step[2];
    one.rows = 1, one.x = a->x + token * a->in, one.x_stride = a->in, one.y = y + first, one.y_stride = 0;
    if (one.activations)
      one.qx = a->qx + token * a->in, one.qx_scales = a->qx_scales + token * (a->in / 32), one.qx_sums = a->qx_sums + token * (a->in / 16);
    if (from < to) lamina_product(&one, from, to);
    first += one.out;
  }
}

static void experts_run(const ExpertsArgs* a, int64_t unit) {
  const int64_t pair = unit % a->pairs, begin = unit / a->pairs * a->block, n = a->outputs;
  const int64_t end = begin + a->block < n ? begin + a->block : n, expert = a->chosen[pair], width = a->gated ? 2 * n : n;
  float *y = a->wide + pair * width, *out = a->out + pair * n;
  if (expert >= a->experts) return;  // an expert without matrices: `expert_sum` takes the token itself
  expert_outputs(a, pair, expert, y, begin, end);
  if (a->gated) expert_outputs(a, pair, expert, y, n + begin, n + end);
  const float factor = a->weights ? a->weights[pair] : 1.0f;
  auto finish = [&](float* z, int64_t offset) {
    for (int64_t i = begin; i < end; ++i) z[i] *= factor;
    if (a->bias) with_type(a->bias_type, a->bias, [&](auto* b) {
      for (int64_t i = begin; i < end; ++i) z[i] += value(b[expert * width + offset + i]);
    });
  };
  finish(y, 0);
  const float limit = float(a->limit), slope = float(a->slope), plus = float(a->plus);
  if (a->gated) {
    finish(y + n, n);
    if (limit > 0)
      for (int64_t i = begin; i < end; ++i) {
        y[i] = y[i] > limit ? limit : y[i];
        y[n + i] = y[n + i] > limit ? limit : y[n + i] < -limit ? -limit : y[n + i];
      }
    if (slope != 1) for (int64_t i = begin; i < end; ++i) y[i] *= slope;
  }
  activate(y + begin, end - begin, a->act);
  if (a->gated) {
    if (slope != 1) for (int64_t i = begin; i < end; ++i) y[i] /= slope;
    for (int64_t i = begin; i < end; ++i) out[i] = y[i] * (y[n + i] + plus);
  } else if (out != y) {
    memcpy(out + begin, y + begin, size_t(end - begin) * 4);
  }
}

struct ExpertSumArgs {
  const float* pairs;      // [rows, each, width]
  const int64_t* chosen;   // [rows, each]
  const float* weights;    // [rows, each] or null
  const float* x;          // [rows, width]: the result of experts without matrices
  const float* residual;   // [rows, width] or null
  float* out;              // [rows, width]
  int64_t rows, each, width, experts;
};

static int64_t expert_sum_units(const ExpertSumArgs* a) { return a->rows; }

static void expert_sum_run(const ExpertSumArgs* a, int64_t row) {
  float* out = a->out + row * a->width;
  if (a->residual) memcpy(out, a->residual + row * a->width, size_t(a->width) * 4);
  else memset(out, 0, size_t(a->width) * 4);
  for (int64_t k = 0; k < a->each; ++k) {
    int64_t pair = row * a->each + k;
    const float* y = a->chosen[pair] < a->experts ? a->pairs + pair * a->width : a->x + row * a->width;
    const float factor = a->weights ? a->weights[pair] : 1.0f;
    for (int64_t i = 0; i < a->width; ++i) out[i] += factor * y[i];
  }
}

}  // namespace
