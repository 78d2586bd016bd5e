// Attention of one new token per row over the tokens that are stored: all that it sees, or those that an indexer selected
// (indexer.h). They are divided into splits.
//
// A piece of work is the queries of one key head over one split. Its partial result (largest score, sum, weighted sum)
// goes into scratch memory; the thread that completes the last split of a head merges them.
#pragma once
#include <type_traits>

#include "stored.h"

namespace {

enum Bias : int64_t { NO_BIAS, SLOPES, BUCKETS };

struct AttentionArgs {
  const float* q;              // [B, Hq, D]
  float* out;                  // [B, Hq, DV]
  const int64_t* table;
  const void* sinks;           // [Hq], or null
  const void* bias;            // slopes float32 [Hq], or weight [buckets, Hq]
  const int64_t* bucket_of;    // [farthest + 1]
  const float* gate;           // [B, Hq, DV], or null: its sigmoid multiplies the output
  float* parts;                // scratch [B, Hq, MOST_SPLITS, DV + 2]
  const Coding *k_coding, *v_coding;  // null: not quantized
  int32_t* arrived;            // [B, Hk]: splits that are done; zero between two runs
  const int32_t* chosen;       // [B, top] positions of the tokens that are read, or null: all that are visible
  int64_t rows, q_heads, k_heads, dim, value_dim, window, size, keep, page, store_type, sinks_type, bias_kind, bias_type;
  int64_t farthest, added, gate_row, gate_head, value_stride;  // value_stride 0: the values are the first of each key
  int64_t top;
  double scale, softcap;       // softcap 0: none
};

constexpr int64_t MOST_SPLITS = 32, LEAST_SPLIT = 256;  // tokens

static inline int64_t tokens_per_split(int64_t count) {
  int64_t even = (count + MOST_SPLITS - 1) / MOST_SPLITS;
  even = (even + BLOCK - 1) / BLOCK * BLOCK;
  return even < LEAST_SPLIT ? LEAST_SPLIT : even;
}
static inline int64_t splits_of(int64_t count) {
  int64_t split = tokens_per_split(count);
  return count == 0 ? 1 : (count + split - 1) / split;
}

// The tokens that a row's query reads.
static inline Visible seen_by(const AttentionArgs* a, int64_t row) {
  if (count_of(a->table, row) == 0) return {0, 0, 0};
  Visible seen = visible(a->table, row, a->window, a->size, a->keep, a->added);
  if (a->chosen && seen.count > a->top) seen.count = a->top;
  return seen;
}

static inline TokenList tokens_of(const AttentionArgs* a, int64_t row, int64_t head) {
  const bool listed = a->chosen && length_of(a->table, row) + a->added > a->top;  // else all of them are selected
  return {a->table, listed ? a->chosen + row * a->top : nullptr, seen_by(a, row), row, head, a->k_heads, a->keep, a->page};
}

static int64_t attention_units(const AttentionArgs* a) {
  int64_t most = 1;
  for (int64_t row = 0; row < a->rows; ++row) {
    int64_t splits = splits_of(seen_by(a, row).count);
    most = splits > most ? splits : most;
  }
  return a->rows * a->k_heads * most;
}

// mix[g] = mix[g] · rescale[g] + Σ probs[g, t] · v[t], WIDE vectors of values at a time.
template <int G, int WIDE, class T>
static inline void mix_in(
    float* mix, int64_t dim, int64_t from, const float* rescale, const float* probs, const T* v, int64_t stride,
    int64_t tokens) {
  vf total[G][WIDE];
  for (int g = 0; g < G; ++g)
    for (int w = 0; w < WIDE; ++w) total[g][w] = load(mix + g * dim + from + w * LANES) * rescale[g];
  for (int64_t t = 0; t < tokens; ++t) {
    vf values[WIDE];
    if (WIDE > 1)
      for (int64_t at = 0; at < WIDE * LANES * int64_t(sizeof(T)); at += 64)
        __builtin_prefetch(reinterpret_cast<const char*>(v + t * stride + from) + AHEAD + at);
    for (int w = 0; w < WIDE; ++w) values[w] = load(v + t * stride + from + w * LANES);
    for (int g = 0; g < G; ++g)
      for (int w = 0; w < WIDE; ++w) total[g][w] = total[g][w] + values[w] * probs[g * BLOCK + t];
  }
  for (int g = 0; g < G; ++g)
    for (int w = 0; w < WIDE; ++w) store(mix + g * dim + from + w * LANES, total[g][w]);
}

template <int G, class T>
static inline void mix_all(
    float* mix, int64_t dim, const float* rescale, const float* probs, const T* v, int64_t stride, int64_t tokens) {
  int64_t i = 0;
  for (; i + 4 * LANES <= dim; i += 4 * LANES) mix_in<G, 4>(mix, dim, i, rescale, probs, v, stride, tokens);
  for (; i + LANES <= dim; i += LANES) mix_in<G, 1>(mix, dim, i, rescale, probs, v, stride, tokens);
  for (; i < dim; ++i)
    for (int g = 0; g < G; ++g) {
      float total = mix[g * dim + i] * rescale[g];
      for (int64_t t = 0; t < tokens; ++t) total += probs[g * BLOCK + t] * value(v[t * stride + i]);
      mix[g * dim + i] = total;
    }
}

static inline float bias_of(const AttentionArgs* a, int64_t head, int64_t distance) {
  if (a->bias_kind == SLOPES) return -static_cast<const float*>(a->bias)[head] * float(distance);
  int64_t bucket = a->bucket_of[distance < a->farthest ? distance : a->farthest];
  float found = 0;
  with_type(a->bias_type, a->bias, [&](auto* weight) { found = value(weight[bucket * a->q_heads + head]); });
  return found;
}

// Scores of one block to probabilities e^(score - top), in place; -> top, total and the factor of older sums.
static inline void soften(float* scores, int64_t tokens, float* top, float* total, float* rescale) {
  for (int64_t t = tokens; t % LANES; ++t) scores[t] = -INFINITY;  // fill the last vector
  vf most = all(-INFINITY);
  for (int64_t t = 0; t < tokens; t += LANES) most = larger(load(scores + t), most);
  float parts[LANES], highest = *top;
  store(parts, most);
  for (int i = 0; i < LANES; ++i) highest = parts[i] > highest ? parts[i] : highest;
  if (highest == -INFINITY) highest = -1e30f;
  vf added = zeros();
  for (int64_t t = 0; t < tokens; t += LANES) {
    vf prob = exp_of(load(scores + t) - highest);
    store(scores + t, prob), added = added + prob;
  }
  *rescale = expf(*top - highest);
  *total = *total * *rescale + sum(added);
  *top = highest;
}

// G queries q of one key head over tokens begin … end - 1. shift: added to the scores of a query
template <int G, class Tokens>
__attribute__((noinline)) static void attend_split(
    const AttentionArgs* a, Tokens& from, const float* q, const float* shift, int64_t first_query, int64_t begin,
    int64_t end, float* top, float* total, float* mix) {
  const int64_t position = length_of(a->table, from.list.row);
  const float scale = float(a->scale), cap = float(a->softcap);
  float scores[G * BLOCK], rescale[G];
  for (int64_t j = begin; j < end;) {
    const int64_t tokens = from.fetch(j, end);
    score<G>(q, a->dim, from.at_keys, tokens, scores);
    for (int g = 0; g < G; ++g) {
      float* s = scores + g * BLOCK;
      for (int64_t t = 0; t < tokens; ++t) s[t] = (s[t] + shift[g]) * scale;
      if (cap != 0)
        for (int64_t t = 0; t < tokens; ++t) s[t] = tanhf(s[t] / cap) * cap;
      if (a->bias_kind)
        for (int64_t t = 0; t < tokens; ++t) s[t] += bias_of(a, first_query + g, position - from.list.position(j + t));
      soften(s, tokens, top + g, total + g, rescale + g);
    }
    mix_all<G>(mix, a->value_dim, rescale, scores, from.at_values, from.stride, tokens);
    j += tokens;
  }
}

// The output of one head, from its largest score, sum and weighted sum.
static inline void finish_head(
    const AttentionArgs* a, int64_t row, int64_t head, float top, float total, const float* mix) {
  float* out = a->out + (row * a->q_heads + head) * a->value_dim;
  float rescale = 1.0f;
  if (a->sinks)
    with_type(a->sinks_type, a->sinks, [&](auto* sinks) {
      float sink = value(sinks[head]), highest = sink > top ? sink : top;
      rescale = expf(top - highest), total = total * rescale + expf(sink - highest);
    });
  float factor = total > 0 || total != total ? rescale / total : 0.0f;
  for (int64_t i = 0; i < a->value_dim; ++i) out[i] = mix[i] * factor;
  if (a->v_coding && a->v_coding->rotate && a->v_coding->layout != LAYOUT_FP8) rotate_groups(out, a->value_dim);
  if (a->gate) {
    const float* gate = a->gate + row * a->gate_row + head * a->gate_head;
    for (int64_t i = 0; i < a->value_dim; ++i) out[i] *= sigmoid_of(gate[i]);
  }
}

// Queries as quantized keys take them: rotated, and their products with the mean key.
static inline const float* ready_queries(
    const Coding* coding, const float* q, int64_t head, int64_t many, float* shift, float* rotated) {
  memcpy(rotated, q, size_t(many * coding->dim) * 4);
  for (int64_t g = 0; g < many; ++g) {
    float* x = rotated + g * coding->dim;
    if (coding->mean)
      for (int64_t i = 0; i < coding->dim; ++i) shift[g] += x[i] * coding->mean[head * coding->dim + i];
    if (coding->rotate && coding->layout != LAYOUT_FP8) rotate_groups(x, coding->dim);
  }
  return rotated;
}

template <class Tokens>
__attribute__((noinline)) static void attend_piece(
    const AttentionArgs* a, Tokens& from, int64_t split) {
  const int64_t row = from.list.row, head = from.list.head, count = from.list.seen.count;
  const int64_t splits = splits_of(count), each = tokens_per_split(count), group = a->q_heads / a->k_heads;
  if (split >= splits) return;
  const int64_t begin = split * each, end = begin + each < count ? begin + each : count;
  const int64_t first = head * group, dim = a->value_dim, width = dim + 2;
  float* parts = a->parts + (row * a->q_heads + first) * MOST_SPLITS * width;
  for (int64_t g = 0; g < group;) {
    float top[4] = {-INFINITY, -INFINITY, -INFINITY, -INFINITY}, total[4] = {0, 0, 0, 0}, mix[4 * MOST_HEAD];
    int64_t many = group - g < 4 ? group - g : 4;
    memset(mix, 0, size_t(many * dim) * 4);
    const float* q = a->q + (row * a->q_heads + first + g) * a->dim;
    float shift[4] = {0, 0, 0, 0}, rotated[4 * MOST_HEAD];
    if (a->k_coding) q = ready_queries(a->k_coding, q, head, many, shift, rotated);
    switch (many) {
      case 1: attend_split<1>(a, from, q, shift, first + g, begin, end, top, total, mix); break;
      case 2: attend_split<2>(a, from, q, shift, first + g, begin, end, top, total, mix); break;
      case 3: attend_split<3>(a, from, q, shift, first + g, begin, end, top, total, mix); break;
      default: attend_split<4>(a, from, q, shift, first + g, begin, end, top, total, mix); break;
    }
    for (int64_t i = 0; i < many; ++i) {
      if (splits == 1) {
        finish_head(a, row, first + g + i, top[i], total[i], mix + i * dim);
        continue;
      }
      float* part = parts + ((g + i) * MOST_SPLITS + split) * width;
      part[0] = top[i], part[1] = total[i];
      memcpy(part + 2, mix + i * dim, size_t(dim) * 4);
    }
    g += many;
  }
  if (splits == 1) return;
  int32_t* arrived = a->arrived + row * a->k_heads + head;
  if (__atomic_add_fetch(arrived, 1, __ATOMIC_ACQ_REL) < splits) return;
  __atomic_store_n(arrived, 0, __ATOMIC_RELAXED);
  for (int64_t g = 0; g < group; ++g) {
    float *part = parts + g * MOST_SPLITS * width, top = part[0], total = 0, mix[MOST_HEAD];
    for (int64_t s = 1; s < splits; ++s) top = part[s * width] > top ? part[s * width] : top;
    memset(mix, 0, size_t(dim) * 4);
    for (int64_t s = 0; s < splits; ++s, part += width) {
      float factor = expf(part[0] - top);
      total += part[1] * factor;
      for (int64_t i = 0; i < dim; ++i) mix[i] += part[2 + i] * factor;
    }
    finish_head(a, row, first + g, top, total, mix);
  }
}

static void attention_run(const AttentionArgs* a, int64_t unit) {
  int64_t row = unit % a->rows, rest = unit / a->rows, head = rest % a->k_heads, split = rest / a->k_heads;
  const int64_t stride = a->value_stride ? a->value_stride : a->dim;
  const TokenList list = tokens_of(a, row, head);
  if (list.chosen || a->k_coding || a->v_coding) {
    GatheredTokens from;
    from.list = list, from.type = a->store_type, from.k_coding = a->k_coding, from.v_coding = a->v_coding;
    from.dim = a->dim, from.value_dim = a->value_stride ? a->value_dim : 0, from.stride = stride;
    attend_piece(a, from, split);
    return;
  }
  with_type(a->store_type, reinterpret_cast<const void*>(a->table[K_STORE]), [&](auto* keys) {
    using T = std::remove_cv_t<std::remove_pointer_t<decltype(keys)>>;
    auto* values = a->value_stride ? reinterpret_cast<const T*>(a->table[V_STORE]) : keys;
    StoredTokens<T> from{list, keys, values, a->dim, stride, keys, values};
    attend_piece(a, from, split);
  });
}

}  // namespace
