// Norm and RoPE of queries and keys, and storing the new token of each row in its slot.
#pragma once
#include "coded.h"
#include "rows.h"

namespace {

enum Norms : int64_t { NO_NORMS, NORMS_FIRST, NORMS_LAST };

struct HeadsArgs {
  const float *q, *k, *v;          // [B, Hq, D], [B, Hk, D], [B, Hk, DV]; k and v may be null
  float* out;                      // [B, Hq, D]: the queries after norm, RoPE and factor
  const float *cos, *sin;          // [B, pairs], or null
  const void *q_weight, *k_weight; // [D], or null
  const float* factor;             // [B], or null
  const int64_t* table;
  const Coding *k_coding, *v_coding;  // null: not quantized
  int64_t rows, q_heads, k_heads, dim, value_dim;
  int64_t q_row, q_head, k_row, k_head, v_row, v_head, rope_row, factor_row;  // strides
  int64_t pairs, neighbours, norms, weight_type, keep, page, store_type;
  int64_t rotate_queries;          // 1: by the Hadamard matrix, as quantized keys are
  double q_eps, k_eps, q_plus, k_plus;
};

static int64_t heads_units(const HeadsArgs* a) { return a->rows * (a->q_heads + a->k_heads); }

static inline void rotate(float* y, const float* cos, const float* sin, int64_t pairs, int64_t neighbours) {
  if (neighbours)
    for (int64_t i = 0; i < pairs; ++i) {
      float a = y[2 * i], b = y[2 * i + 1];
      y[2 * i] = a * cos[i] - b * sin[i], y[2 * i + 1] = b * cos[i] + a * sin[i];
    }
  else
    for (int64_t i = 0; i < pairs; ++i) {
      float a = y[i], b = y[i + pairs];
      y[i] = a * cos[i] - b * sin[i], y[i + pairs] = b * cos[i] + a * sin[i];
    }
}

// One head: y = rotate(norm(x)), or norm(rotate(x)).
static inline void prepare(
    const HeadsArgs* a, float* y, const float* x, int64_t row, const void* weight, double eps, double plus) {
  if (a->norms == NORMS_FIRST)
    scale_by(y, x, a->dim, 0.0f, inverse_rms(x, a->dim, 0.0f, eps), weight, a->weight_type, float(plus));
  else
    memcpy(y, x, size_t(a->dim) * 4);
  if (a->pairs) rotate(y, a->cos + row * a->rope_row, a->sin + row * a->rope_row, a->pairs, a->neighbours);
  if (a->norms == NORMS_LAST)
    scale_by(y, y, a->dim, 0.0f, inverse_rms(y, a->dim, 0.0f, eps), weight, a->weight_type, float(plus));
}

constexpr int64_t MOST_HEAD = 1024;  // values of a head

// Stores one vector, which may be changed, in a cell.
static inline void put_vector(
    const int64_t* table, bool values, int64_t type, const Coding* coding, int64_t head, int64_t cell, float* x,
    int64_t dim) {
  if (coding) {
    encode_vector(coding, x, coding->mean ? coding->mean + head * dim : nullptr, coded_store(table, values), cell);
    return;
  }
  with_type(type, reinterpret_cast<void*>(table[values ? V_STORE : K_STORE]), [&](auto* store) {
    for (int64_t i = 0; i < dim; ++i) put(store + cell * dim + i, x[i]);
  });
}

static void heads_run(const HeadsArgs* a, int64_t unit) {
  int64_t every = a->q_heads + a->k_heads, row = unit / every, head = unit % every;
  if (count_of(a->table, row) == 0) {
    if (head < a->q_heads) memset(a->out + (row * a->q_heads + head) * a->dim, 0, size_t(a->dim) * 4);
    return;
  }
  if (head < a->q_heads) {
    float* y = a->out + (row * a->q_heads + head) * a->dim;
    prepare(a, y, a->q + row * a->q_row + head * a->q_head, row, a->q_weight, a->q_eps, a->q_plus);
    if (a->factor)
      for (int64_t i = 0; i < a->dim; ++i) y[i] *= a->factor[row * a->factor_row];
    if (a->rotate_queries) rotate_groups(y, a->dim);
    return;
  }
  head -= a->q_heads;
  float key[MOST_HEAD];
  prepare(a, key, a->k + row * a->k_row + head * a->k_head, row, a->k_weight, a->k_eps, a->k_plus);
  const float* v = a->v + row * a->v_row + head * a->v_head;
  int64_t slot = slot_of(a->table, length_of(a->table, row), a->keep);
  int64_t cell = cell_of(a->table, row, head, a->k_heads, slot, a->page);
  put_vector(a->table, false, a->store_type, a->k_coding, head, cell, key, a->dim);
  float new_value[MOST_HEAD];
  memcpy(new_value, v, size_t(a->value_dim) * 4);
  put_vector(a->table, true, a->store_type, a->v_coding, head, cell, new_value, a->value_dim);
}

}  // namespace
