// Activations of float32 values, as lamina/activation.py defines them.
#pragma once
#include "vectors.h"

namespace {

enum Act : int64_t { NO_ACT, SILU, RELU, RELU2, GELU, GELU_TANH, QUICK_GELU, TANH, SIGMOID, ACT_COUNT };

static inline float sigmoid_of(float x) { return 1.0f / (1.0f + expf(-x)); }

// In place, n values.
static void activate(float* x, int64_t n, int64_t act) {
  int64_t i = 0;
  switch (act) {
    case SILU:
      for (; i + LANES <= n; i += LANES) { vf v = load(x + i); store(x + i, v * sigmoid_of(v)); }
      for (; i < n; ++i) x[i] *= sigmoid_of(x[i]);
      break;
    case QUICK_GELU:
      for (; i + LANES <= n; i += LANES) { vf v = load(x + i); store(x + i, v * sigmoid_of(v * all(1.702f))); }
      for (; i < n; ++i) x[i] *= sigmoid_of(1.702f * x[i]);
      break;
    case SIGMOID:
      for (; i + LANES <= n; i += LANES) store(x + i, sigmoid_of(load(x + i)));
      for (; i < n; ++i) x[i] = sigmoid_of(x[i]);
      break;
    case GELU_TANH: {  // 0.5 (1 + tanh(u)) = sigmoid(2u)
      const float a = 1.5957691216057308f, b = 0.044715f;
      for (; i + LANES <= n; i += LANES) { vf v = load(x + i); store(x + i, v * sigmoid_of(a * (v + b * v * v * v))); }
      for (; i < n; ++i) x[i] *= sigmoid_of(a * (x[i] + b * x[i] * x[i] * x[i]));
      break;
    }
    case RELU: for (; i < n; ++i) x[i] = x[i] < 0 ? 0 : x[i]; break;
    case RELU2: for (; i < n; ++i) { float y = x[i] < 0 ? 0 : x[i]; x[i] = y * y; } break;
    case GELU: for (; i < n; ++i) x[i] = 0.5f * x[i] * (1 + erff(x[i] * 0.70710678118654752f)); break;
    case TANH: for (; i < n; ++i) x[i] = tanhf(x[i]); break;
    default: break;
  }
}

}  // namespace
