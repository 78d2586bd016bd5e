// Latent attention (MLA), one token per row: queries into the latent space, storing the new latent and its rotary key,
// and the output back to heads. Attention itself is that of attention.h, over one key head of rank + rope values whose
// first `rank` values are also the values.
#pragma once
#include "heads.h"

namespace {

struct LatentArgs {
  const float* q;            // [rows, heads, nope + rope]
  const float* kv;           // [rows, rank + rope]
  const void* up;            // [heads, nope + value, rank]: projects a latent up to keys and values of a head
  const void* weight;        // [rank] of the norm, or null
  const float *cos, *sin;    // [rows, pairs]
  float* out;                // [rows, heads, rank + rope]
  const int64_t* table;
  const Coding* coding;      // null: not quantized
  int64_t rows, heads, nope, rope, rank, up_head, up_type, weight_type, q_row, q_head, kv_row, rope_row, neighbours;
  int64_t pairs, keep, page, store_type;  // pairs: of the rotary key that are rotated
  double eps, plus;
};

static int64_t latent_units(const LatentArgs* a) { return a->rows * (a->heads + 1); }

static void latent_run(const LatentArgs* a, int64_t unit) {
  const int64_t row = unit / (a->heads + 1), head = unit % (a->heads + 1), width = a->rank + a->rope;
  const float *cos = a->cos + row * a->rope_row, *sin = a->sin + row * a->rope_row;
  const bool live = count_of(a->table, row) != 0;
  if (head < a->heads) {
    float* out = a->out + (row * a->heads + head) * width;
    memset(out, 0, size_t(width) * 4);
    if (!live) return;
    const float* q = a->q + row * a->q_row + head * a->q_head;
    with_type(a->up_type, a->up, [&](auto* up) {
      for (int64_t n = 0; n < a->nope; ++n) {
        auto* w = up + head * a->up_head + n * a->rank;
        int64_t i = 0;
        for (; i + LANES <= a->rank; i += LANES) store(out + i, load(out + i) + load(w + i) * q[n]);
        for (; i < a->rank; ++i) out[i] += value(w[i]) * q[n];
      }
    });
    memcpy(out + a->rank, q + a->nope, size_t(a->rope) * 4);
    rotate(out + a->rank, cos, sin, a->pairs, a->neighbours);
    return;
  }
  if (!live) return;
  float y[MOST_HEAD];
  const float* kv = a->kv + row * a->kv_row;
  scale_by(y, kv, a->rank, 0.0f, inverse_rms(kv, a->rank, 0.0f, a->eps), a->weight, a->weight_type, float(a->plus));
  memcpy(y + a->rank, kv + a->rank, size_t(a->rope) * 4);
  rotate(y + a->rank, cos, sin, a->pairs, a->neighbours);
  int64_t cell = cell_of(a->table, row, 0, 1, slot_of(a->table, length_of(a->table, row), a->keep), a->page);
  put_vector(a->table, false, a->store_type, a->coding, 0, cell, y, width);
}

// out[row, head] = up_v[head] · mix[row, head]
struct LatentOutArgs {
  const float* mix;  // [rows, heads, rank]
  const void* up;    // [heads, value, rank], heads at up_head
  float* out;        // [rows, heads, value]
  int64_t rows, heads, value, rank, up_head, up_type;
};

static int64_t latent_out_units(const LatentOutArgs* a) { return a->rows * a->heads; }

static void latent_out_run(const LatentOutArgs* a, int64_t unit) {
  const float* mix = a->mix + unit * a->rank;
  float* out = a->out + unit * a->value;
  with_type(a->up_type, a->up, [&](auto* up) {
    for (int64_t v = 0; v < a->value; ++v) {
      auto* w = up + unit % a->heads * a->up_head + v * a->rank;
      vf total = zeros();
      int64_t i = 0;
      for (; i + LANES <= a->rank; i += LANES) total = total + load(w + i) * load(mix + i);
      float y = sum(total);
      for (; i < a->rank; ++i) y += value(w[i]) * mix[i];
      out[v] = y;
    }
  });
}

}  // namespace
