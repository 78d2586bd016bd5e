// Recurrent layers, one token per row: the short convolution on its ring of inputs, and one kernel for each rule on the
// states that the cache keeps (float32, in place). A row whose count is 0 keeps its state and gives zeros.
// The references are the `step` functions of lamina/recurrence.
#pragma once
#include "activation.h"
#include "entry.h"
#include "scratch.h"

namespace {

// -- short convolution ------------------------------------------------------------------------------------------------

struct ConvolveArgs {
  const float* x;                // [rows, channels], rows at x_row
  const void *weight, *bias;     // [channels, kernel], [channels] or null
  const float *inward, *outward; // [rows, channels] or null: factors of the input and of the output
  float* out;                    // [rows, channels]
  const int64_t* table;          // its store is the ring of inputs [rows, slots, channels]
  int64_t rows, channels, kernel, x_row, in_row, out_row, act, weight_type, bias_type, store_type;
};

constexpr int64_t CHANNELS = 512;  // of one piece of work

static int64_t convolve_units(const ConvolveArgs* a) { return a->rows * ((a->channels + CHANNELS - 1) / CHANNELS); }

static void convolve_run(const ConvolveArgs* a, int64_t unit) {
  const int64_t row = unit % a->rows, begin = unit / a->rows * CHANNELS, kernel = a->kernel;
  const int64_t n = a->channels - begin < CHANNELS ? a->channels - begin : CHANNELS;
  float* out = a->out + row * a->channels + begin;
  if (count_of(a->table, row) == 0) { memset(out, 0, size_t(n) * 4); return; }
  const int64_t length = length_of(a->table, row), ring = a->table[RING];
  float input[CHANNELS], total[CHANNELS];
  const float* x = a->x + row * a->x_row + begin;
  for (int64_t i = 0; i < n; ++i) input[i] = a->inward ? x[i] * a->inward[row * a->in_row + begin + i] : x[i];
  for (int64_t i = 0; i < n; ++i) total[i] = 0;
  if (a->bias) with_type(a->bias_type, a->bias, [&](auto* b) { for (int64_t i = 0; i < n; ++i) total[i] = value(b[begin + i]); });
  with_type(a->store_type, reinterpret_cast<void*>(a->table[K_STORE]), [&](auto* store) {
    auto* inputs = store + row * a->table[SLOTS] * a->channels + begin;
    with_type(a->weight_type, a->weight, [&](auto* weight) {
      auto* taps = weight + begin * kernel;
      for (int64_t tap = 0; tap < kernel - 1; ++tap) {
        int64_t position = length - (kernel - 1) + tap;
        if (position < 0) continue;
        auto* old = inputs + (ring ? position % ring : position) * a->channels;
        for (int64_t i = 0; i < n; ++i) total[i] += value(old[i]) * value(taps[i * kernel + tap]);
      }
      for (int64_t i = 0; i < n; ++i) total[i] += input[i] * value(taps[i * kernel + kernel - 1]);
    });
    auto* own = inputs + (ring ? length % ring : length) * a->channels;
    for (int64_t i = 0; i < n; ++i) put(own + i, input[i]);
  });
  activate(total, n, a->act);
  for (int64_t i = 0; i < n; ++i) out[i] = a->outward ? total[i] * a->outward[row * a->out_row + begin + i] : total[i];
}

static inline float* state_of(const int64_t* table) { return reinterpret_cast<float*>(table[K_STORE]); }

// -- rules from outside the package: PyTorch computes them, between these two copies ---------------------------------

struct StateArgs {
  float* state;          // [rows, values] of the program
  const int64_t* table;  // states [rows, values] of the cache
  int64_t rows, values, write;  // write 1: into the cache, for rows that have not ended; 0: out of it
};

static int64_t state_units(const StateArgs* a) { return a->rows; }

static void state_run(const StateArgs* a, int64_t row) {
  float *own = a->state + row * a->values, *kept = state_of(a->table) + row * a->values;
  if (!a->write) memcpy(own, kept, size_t(a->values) * 4);
  else if (count_of(a->table, row)) memcpy(kept, own, size_t(a->values) * 4);
}

// -- rewinding: the base states and the logs of inputs of a cache with slack (lamina/cache/layers/recurrent.py) ------

constexpr int MOST_INPUTS = 5;

struct LogArgs {
  const float* input[MOST_INPUTS];  // [rows, size], rows at `stride`: of the new tokens, in the rule's order
  const int64_t* table;             // its logs are [rows, 2 · slack, size] each
  int64_t rows, count, stride[MOST_INPUTS], size[MOST_INPUTS], type[MOST_INPUTS];
};

// Writes the new token's inputs into the logs, once the rule has run: `move_base` may read what they replace.
static int64_t log_units(const LogArgs* a) { return a->table[SLACK] ? a->rows : 0; }

static void log_run(const LogArgs* a, int64_t row) {
  if (count_of(a->table, row) == 0) return;
  const int64_t kept = 2 * a->table[SLACK], slot = row * kept + length_of(a->table, row) % kept;
  for (int64_t i = 0; i < a->count; ++i)
    with_type(a->type[i], reinterpret_cast<void*>(a->table[LOGS + i]), [&](auto* log) {
      for (int64_t j = 0; j < a->size[i]; ++j) put(log + slot * a->size[i] + j, a->input[i][row * a->stride[i] + j]);
    });
}

// Where the log of a row would overflow, moves its base state to `slack` tokens behind the new length. Each piece of the
// rule's work does so for the part of the state that is its own: `update` runs it for one token.
template <class Args>
static void move_base(const Args* a, int64_t row, int64_t unit, void (*update)(const Args*, int64_t)) {
  const int64_t slack = a->table[SLACK], kept = 2 * slack;
  if (slack == 0) return;
  const int64_t base = reinterpret_cast<const int64_t*>(a->table[BASES])[row], after = length_of(a->table, row) + 1;
  if (after - base <= kept) return;
  int64_t table[COLUMNS];
  memcpy(table, a->table, sizeof table);
  table[K_STORE] = table[BASE_STATE], table[SLACK] = 0;
  Args one = *a;
  one.table = table;
  const LogArgs* log = a->log;
  static thread_local Scratch scratch;
  int64_t bytes = 0;
  for (int64_t i = 0; i < log->count; ++i) bytes += log->size[i] * 4 + 64;
  for (int64_t position = base; position < after - slack; ++position) {
    const int64_t slot = row * kept + position % kept;
    const float* inputs[MOST_INPUTS];
    scratch.reset(bytes);
    for (int64_t i = 0; i < log->count; ++i)
      with_type(log->type[i], reinterpret_cast<const void*>(table[LOGS + i]), [&](auto* logged) {
        float* x = scratch.take<float>(log->size[i]);
        for (int64_t j = 0; j < log->size[i]; ++j) x[j] = value(logged[slot * log->size[i] + j]);
        inputs[i] = x;
      });
    one.read(inputs);
    update(&one, unit);
  }
}

// -- SSD: h = exp(dt A) h + dt x Bᵀ, y = h C ---------------------------------------------------------------------------

struct SsdArgs {
  const float *x, *dt, *b, *c;  // [rows, heads, dim], [rows, heads], [rows, groups, state] twice
  const float* decay;           // A [heads]
  float* out;                   // [rows, heads, dim]
  const int64_t* table;         // states [rows, heads, dim, state]
  const LogArgs* log;
  int64_t rows, heads, dim, state, groups, x_row, dt_row, b_row, c_row;

  void read(const float* const* in) { x = in[0], dt = in[1], b = in[2], c = in[3], x_row = dt_row = b_row = c_row = 0; }
};

static int64_t ssd_units(const SsdArgs* a) { return a->rows * a->heads; }

static void ssd_run(const SsdArgs* a, int64_t unit) {
  const int64_t row = unit / a->heads, head = unit % a->heads, n = a->state, group = head / (a->heads / a->groups);
  float* out = a->out + unit * a->dim;
  if (count_of(a->table, row) == 0) { memset(out, 0, size_t(a->dim) * 4); return; }
  move_base(a, row, unit, ssd_run);
  const float dt = a->dt[row * a->dt_row + head], decay = expf(dt * a->decay[head]);
  const float *x = a->x + row * a->x_row + head * a->dim, *b = a->b + row * a->b_row + group * n, *c = a->c + row * a->c_row + group * n;
  float* h = state_of(a->table) + unit * a->dim * n;
  for (int64_t p = 0; p < a->dim; ++p, h += n) {
    const float added = dt * x[p];
    vf total = zeros();
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) {
      vf next = load(h + i) * decay + load(b + i) * added;
      store(h + i, next), total = total + next * load(c + i);
    }
    float y = sum(total);
    for (; i < n; ++i) h[i] = h[i] * decay + b[i] * added, y += h[i] * c[i];
    out[p] = y;
  }
}

// -- selective scan: h = exp(dt A) h + dt B x, y = C h ------------------------------------------------------------------

struct ScanArgs {
  const float *x, *dt, *b, *c;  // [rows, channels] twice, [rows, state] twice
  const float* decay;           // A [channels, state]
  float* out;                   // [rows, channels]
  const int64_t* table;         // states [rows, channels, state]
  const LogArgs* log;
  int64_t rows, channels, state, x_row, dt_row, b_row, c_row;

  void read(const float* const* in) { x = in[0], dt = in[1], b = in[2], c = in[3], x_row = dt_row = b_row = c_row = 0; }
};

constexpr int64_t MOST_DELTA = 1024;  // values of a head
constexpr int64_t SCANNED = 64;  // channels of one piece of work

static int64_t scan_units(const ScanArgs* a) { return a->rows * ((a->channels + SCANNED - 1) / SCANNED); }

static void scan_run(const ScanArgs* a, int64_t unit) {
  const int64_t row = unit % a->rows, begin = unit / a->rows * SCANNED, n = a->state;
  const int64_t end = begin + SCANNED < a->channels ? begin + SCANNED : a->channels;
  float* out = a->out + row * a->channels;
  if (count_of(a->table, row) == 0) { memset(out + begin, 0, size_t(end - begin) * 4); return; }
  move_base(a, row, unit, scan_run);
  const float *b = a->b + row * a->b_row, *c = a->c + row * a->c_row;
  for (int64_t channel = begin; channel < end; ++channel) {
    const float dt = a->dt[row * a->dt_row + channel], added = dt * a->x[row * a->x_row + channel];
    float* h = state_of(a->table) + (row * a->channels + channel) * n;
    const float* decay = a->decay + channel * n;
    vf total = zeros();
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) {
      vf next = load(h + i) * exp_of(load(decay + i) * dt) + load(b + i) * added;
      store(h + i, next), total = total + next * load(c + i);
    }
    float y = sum(total);
    for (; i < n; ++i) h[i] = h[i] * expf(decay[i] * dt) + b[i] * added, y += h[i] * c[i];
    out[channel] = y;
  }
}

// -- delta rules: S = exp(g) S, u = beta (v - Sᵀk), S = S + k uᵀ, y = Sᵀq -------------------------------------------------

struct DeltaArgs {
  const float *q, *k, *v, *g, *beta;  // [rows, key heads, key dim] twice, [rows, heads, dim], [rows, heads (, key dim)], [rows, heads]
  float* out;                         // [rows, heads, dim]
  const int64_t* table;               // states [rows, heads, key dim, dim]
  const LogArgs* log;
  int64_t rows, heads, key_heads, key_dim, dim, by_channel, q_row, k_row, v_row, g_row, beta_row;

  void read(const float* const* in) {
    q = in[0], k = in[1], v = in[2], g = in[3], beta = in[4], q_row = k_row = v_row = g_row = beta_row = 0;
  }
};

static int64_t delta_units(const DeltaArgs* a) { return a->rows * a->heads; }

// y[j] += factor · x[j]
static inline void add_row(float* y, const float* x, float factor, int64_t n) {
  int64_t j = 0;
  for (; j + LANES <= n; j += LANES) store(y + j, load(y + j) + load(x + j) * factor);
  for (; j < n; ++j) y[j] += x[j] * factor;
}

static void delta_run(const DeltaArgs* a, int64_t unit) {
  const int64_t row = unit / a->heads, head = unit % a->heads, n = a->dim, key_head = head / (a->heads / a->key_heads);
  float* out = a->out + unit * n;
  if (count_of(a->table, row) == 0) { memset(out, 0, size_t(n) * 4); return; }
  move_base(a, row, unit, delta_run);
  memset(out, 0, size_t(n) * 4);
  const float *q = a->q + row * a->q_row + key_head * a->key_dim, *k = a->k + row * a->k_row + key_head * a->key_dim;
  const float* v = a->v + row * a->v_row + head * n;
  const float* g = a->g + row * a->g_row + (a->by_channel ? head * a->key_dim : head);
  float* state = state_of(a->table) + unit * a->key_dim * n;
  const float beta = a->beta[row * a->beta_row + head];
  float u[MOST_DELTA];
  memset(u, 0, size_t(n) * 4);
  for (int64_t i = 0; i < a->key_dim; ++i) {
    float *s = state + i * n, decay = expf(g[a->by_channel ? i : 0]);
    int64_t j = 0;
    for (; j + LANES <= n; j += LANES) {
      vf kept = load(s + j) * decay;
      store(s + j, kept), store(u + j, load(u + j) + kept * k[i]);
    }
    for (; j < n; ++j) s[j] *= decay, u[j] += s[j] * k[i];
  }
  for (int64_t j = 0; j < n; ++j) u[j] = beta * (v[j] - u[j]);
  for (int64_t i = 0; i < a->key_dim; ++i) {
    add_row(state + i * n, u, k[i], n);
    add_row(out, state + i * n, q[i], n);
  }
}

// -- RG-LRU: h = exp(g) h + x, y = h ------------------------------------------------------------------------------------

struct LruArgs {
  const float *x, *g;    // [rows, channels]
  float* out;            // [rows, channels]
  const int64_t* table;  // states [rows, channels]
  const LogArgs* log;
  int64_t rows, channels, x_row, g_row;

  void read(const float* const* in) { x = in[0], g = in[1], x_row = g_row = 0; }
};

static int64_t lru_units(const LruArgs* a) { return a->rows; }

static void lru_run(const LruArgs* a, int64_t row) {
  float *h = state_of(a->table) + row * a->channels, *out = a->out + row * a->channels;
  if (count_of(a->table, row) == 0) { memset(out, 0, size_t(a->channels) * 4); return; }
  move_base(a, row, row, lru_run);
  for (int64_t i = 0; i < a->channels; ++i) {
    h[i] = expf(a->g[row * a->g_row + i]) * h[i] + a->x[row * a->x_row + i];
    out[i] = h[i];
  }
}

// -- WKV of RWKV-4: sums num and den, both divided by exp(top) ------------------------------------------------------------

struct WkvArgs {
  const float *k, *v;        // [rows, channels]
  const float *w, *first;    // [channels]
  float* out;                // [rows, channels]
  const int64_t* table;      // states [rows, 3, channels]: num, den, top; den 0: empty
  const LogArgs* log;
  int64_t rows, channels, k_row, v_row;

  void read(const float* const* in) { k = in[0], v = in[1], k_row = v_row = 0; }
};

static int64_t wkv_units(const WkvArgs* a) { return a->rows; }

static void wkv_run(const WkvArgs* a, int64_t row) {
  const int64_t n = a->channels;
  float *num = state_of(a->table) + row * 3 * n, *den = num + n, *top = den + n, *out = a->out + row * n;
  if (count_of(a->table, row) == 0) { memset(out, 0, size_t(n) * 4); return; }
  move_base(a, row, row, wkv_run);
  for (int64_t i = 0; i < n; ++i) {
    const float k = a->k[row * a->k_row + i], v = a->v[row * a->v_row + i], old = den[i] == 0 ? -INFINITY : top[i];
    float own = k + a->first[i], highest = old > own ? old : own;
    float past = expf(old - highest), now = expf(own - highest);
    out[i] = (past * num[i] + now * v) / (past * den[i] + now);
    float decayed = old + a->w[i];
    highest = decayed > k ? decayed : k;
    past = expf(decayed - highest), now = expf(k - highest);
    num[i] = past * num[i] + now * v, den[i] = past * den[i] + now, top[i] = highest;
  }
}

}  // namespace
