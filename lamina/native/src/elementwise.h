// Elementwise operations on strided tensors of float32, bfloat16 or float16, computed in float32.
#pragma once
#include "activation.h"

namespace {

enum Elementwise : int64_t {
  COPY, ADD, SUB, MUL, DIV, NEG, SQUARE, SQRT, RSQRT, EXP, LOG, SOFTPLUS, CLAMP, MAXIMUM, MINIMUM, ADDCMUL, POW, ABS,
  ACTIVATE,  // alpha: the activation
  SIN, COS, LERP
};

constexpr int64_t MOST_DIMS = 6, CHUNK = 256, PIECE = 8192;

struct ElementwiseArgs {
  const void* in[3];    // null: not used
  void* out;
  int64_t op, dims, numel, in_type[3], out_type;
  int64_t size[MOST_DIMS], in_stride[3][MOST_DIMS], out_stride[MOST_DIMS];  // innermost last
  double alpha, beta;   // numbers of the operation
};

static inline int64_t inner_of(const ElementwiseArgs* a) { return a->size[MOST_DIMS - 1]; }

static int64_t elementwise_units(const ElementwiseArgs* a) { return (a->numel + PIECE - 1) / PIECE; }

static inline void gather(float* to, const void* from, int64_t type, int64_t at, int64_t stride, int64_t n) {
  with_type(type, from, [&](auto* p) {
    p += at;
    if (stride == 1) for (int64_t i = 0; i < n; ++i) to[i] = value(p[i]);
    else for (int64_t i = 0; i < n; ++i) to[i] = value(p[i * stride]);
  });
}

static inline void apply(int64_t op, float* x, const float* y, const float* z, int64_t n, float alpha, float beta) {
  switch (op) {
    case ADD: for (int64_t i = 0; i < n; ++i) x[i] += alpha * y[i]; break;
    case SUB: for (int64_t i = 0; i < n; ++i) x[i] -= alpha * y[i]; break;
    case MUL: for (int64_t i = 0; i < n; ++i) x[i] *= y[i]; break;
    case DIV: for (int64_t i = 0; i < n; ++i) x[i] /= y[i]; break;
    case NEG: for (int64_t i = 0; i < n; ++i) x[i] = -x[i]; break;
    case SQUARE: for (int64_t i = 0; i < n; ++i) x[i] *= x[i]; break;
    case SQRT: for (int64_t i = 0; i < n; ++i) x[i] = sqrtf(x[i]); break;
    case RSQRT: for (int64_t i = 0; i < n; ++i) x[i] = 1.0f / sqrtf(x[i]); break;
    case EXP: for (int64_t i = 0; i < n; ++i) x[i] = expf(x[i]); break;
    case LOG: for (int64_t i = 0; i < n; ++i) x[i] = logf(x[i]); break;
    case SOFTPLUS: for (int64_t i = 0; i < n; ++i) x[i] = x[i] * alpha > beta ? x[i] : log1pf(expf(x[i] * alpha)) / alpha; break;
    case CLAMP: for (int64_t i = 0; i < n; ++i) x[i] = x[i] < alpha ? alpha : x[i] > beta ? beta : x[i]; break;
    case MAXIMUM: for (int64_t i = 0; i < n; ++i) x[i] = x[i] != x[i] || x[i] > y[i] ? x[i] : y[i]; break;
    case MINIMUM: for (int64_t i = 0; i < n; ++i) x[i] = x[i] != x[i] || x[i] < y[i] ? x[i] : y[i]; break;
    case ADDCMUL: for (int64_t i = 0; i < n; ++i) x[i] += alpha * y[i] * z[i]; break;
    case POW: for (int64_t i = 0; i < n; ++i) x[i] = powf(x[i], alpha); break;
    case ABS: for (int64_t i = 0; i < n; ++i) x[i] = fabsf(x[i]); break;
    case ACTIVATE: activate(x, n, int64_t(alpha)); break;
    case SIN: for (int64_t i = 0; i < n; ++i) x[i] = sinf(x[i]); break;
    case COS: for (int64_t i = 0; i < n; ++i) x[i] = cosf(x[i]); break;
    default: break;
  }
}

// Piece i: elements i · PIECE … + PIECE in row-major order.
static void elementwise_run(const ElementwiseArgs* a, int64_t unit) {
  int64_t at = unit * PIECE, end = at + PIECE < a->numel ? at + PIECE : a->numel, inner = inner_of(a);
  float x[CHUNK], y[CHUNK], z[CHUNK], *const values[3] = {x, y, z};
  while (at < end) {
    int64_t rest = at, place[3] = {0, 0, 0}, to = 0, column = at % inner;
    for (int64_t d = MOST_DIMS - 1; d >= 0; --d) {
      int64_t index = rest % a->size[d];
      rest /= a->size[d];
      for (int i = 0; i < 3; ++i) place[i] += index * a->in_stride[i][d];
      to += index * a->out_stride[d];
    }
    int64_t n = inner - column < end - at ? inner - column : end - at;
    n = n < CHUNK ? n : CHUNK;
    for (int i = 0; i < 3; ++i)
      if (a->in[i]) gather(values[i], a->in[i], a->in_type[i], place[i], a->in_stride[i][MOST_DIMS - 1], n);
    apply(a->op, x, y, z, n, float(a->alpha), float(a->beta));
    int64_t stride = a->out_stride[MOST_DIMS - 1];
    with_type(a->out_type, a->out, [&](auto* p) {
      for (int64_t i = 0; i < n; ++i) put(p + to + i * stride, x[i]);
    });
    at += n;
  }
}

// -- reductions of the last axis ----------------------------------------------------------------------------------------

enum Reduction : int64_t { SUM, MEAN, LARGEST };

struct ReduceArgs {
  const float* x;   // [rows, width], rows at x_row
  float* out;       // [rows]
  int64_t rows, width, x_row, op;
};

static int64_t reduce_units(const ReduceArgs* a) { return 1; }

static void reduce_run(const ReduceArgs* a, int64_t) {
  for (int64_t row = 0; row < a->rows; ++row) {
    const float* x = a->x + row * a->x_row;
    float y = a->op == LARGEST ? -INFINITY : 0.0f;
    if (a->op == LARGEST)
      for (int64_t i = 0; i < a->width; ++i) y = x[i] > y || x[i] != x[i] ? x[i] : y;
    else {
      vf total = zeros();
      int64_t i = 0;
      for (; i + LANES <= a->width; i += LANES) total = total + load(x + i);
      y = sum(total);
      for (; i < a->width; ++i) y += x[i];
      if (a->op == MEAN) y /= float(a->width);
    }
    a->out[row] = y;
  }
}

}  // namespace
