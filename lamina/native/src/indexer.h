// An indexer, one token per row: the scores of all tokens that are stored, and the list of those with the highest.
//
//   index_scores    Σ over heads of weight · relu(q · k) for each token that the new one sees, itself included
//   select_tokens   the positions of the highest scores, ascending: attention.h reads these tokens alone
//
// Scores go to a buffer whose address and room are in the entry's table, since a program serves any number of tokens.
// Rows of up to `top` tokens have no scores: all of their tokens are selected. Keys are stored in a line.
// The reference is lamina/attention/indexer.py.
#pragma once
#include "stored.h"

namespace {

static inline float* scores_of(const int64_t* table, int64_t row) {
  return reinterpret_cast<float*>(table[SCORES]) + row * table[SCORE_ROOM];
}

// Tokens that the new one of a row sees; 0 if the row has ended.
static inline int64_t tokens_seen(const int64_t* table, int64_t row) {
  return count_of(table, row) ? length_of(table, row) + 1 : 0;
}

// -- scores ---------------------------------------------------------------------------------------------------------

struct IndexScoresArgs {
  const float *q, *weights;  // [rows, heads, dim], rotated as the stored keys are; [rows, heads] at weights_row
  const int64_t* table;
  const Coding* coding;      // null: keys are not quantized
  int64_t rows, heads, dim, top, weights_row, page, store_type;
};

constexpr int64_t SCORED = 256;  // tokens of one piece of work

static int64_t index_scores_units(const IndexScoresArgs* a) {
  int64_t most = 0;
  for (int64_t row = 0; row < a->rows; ++row) {
    int64_t n = tokens_seen(a->table, row);
    if (n > a->top && n > most) most = n;
  }
  return a->rows * ((most + SCORED - 1) / SCORED);
}

template <class Tokens>
static void score_tokens(const IndexScoresArgs* a, Tokens& from, int64_t begin, int64_t end) {
  const int64_t row = from.list.row;
  const float *q = a->q + row * a->heads * a->dim, *weights = a->weights + row * a->weights_row;
  float products[4 * BLOCK] = {}, total[BLOCK];
  for (int64_t j = begin; j < end;) {
    const int64_t tokens = from.fetch(j, end);
    for (int64_t t = 0; t < BLOCK; ++t) total[t] = 0;
    for (int64_t h = 0; h < a->heads; h += 4) {
      const int64_t many = a->heads - h < 4 ? a->heads - h : 4;
      switch (many) {
        case 1: score<1, true>(q + h * a->dim, a->dim, from.at_keys, tokens, products); break;
        case 2: score<2, true>(q + h * a->dim, a->dim, from.at_keys, tokens, products); break;
        case 3: score<3, true>(q + h * a->dim, a->dim, from.at_keys, tokens, products); break;
        default: score<4, true>(q + h * a->dim, a->dim, from.at_keys, tokens, products); break;
      }
      for (int64_t g = 0; g < many; ++g) {
        const float weight = weights[h + g], *product = products + g * BLOCK;
        for (int64_t t = 0; t < BLOCK; ++t) total[t] += (product[t] > 0 ? product[t] : 0) * weight;
      }
    }
    memcpy(scores_of(a->table, row) + j, total, size_t(tokens) * 4);
    j += tokens;
  }
}

static void index_scores_run(const IndexScoresArgs* a, int64_t unit) {
  const int64_t row = unit % a->rows, begin = unit / a->rows * SCORED, n = tokens_seen(a->table, row);
  if (n <= a->top || begin >= n) return;
  const int64_t end = begin + SCORED < n ? begin + SCORED : n;
  const TokenList list{a->table, nullptr, visible(a->table, row, FULL, 1, 0, 1), row, 0, 1, 0, a->page};
  if (a->coding) {
    GatheredTokens from;
    from.list = list, from.type = a->store_type, from.k_coding = a->coding, from.v_coding = nullptr;
    from.dim = a->dim, from.value_dim = 0, from.stride = a->dim;
    score_tokens(a, from, begin, end);
    return;
  }
  with_type(a->store_type, reinterpret_cast<const void*>(a->table[K_STORE]), [&](auto* keys) {
    using T = std::remove_cv_t<std::remove_pointer_t<decltype(keys)>>;
    StoredTokens<T> from{list, keys, keys, a->dim, a->dim, keys, keys};
    score_tokens(a, from, begin, end);
  });
}

// -- the highest -----------------------------------------------------------------------------------------------------

struct SelectTokensArgs {
  const int64_t* table;
  int32_t* chosen;  // [rows, top]; those behind a row's number of tokens are undefined
  int64_t rows, top;
};

static int64_t select_tokens_units(const SelectTokensArgs* a) { return a->rows; }

// float32 -> uint32 in the same order. A score is never -0.0: its sum begins with 0.0.
static inline uint32_t ordered_bits(float score) {
  uint32_t bits;
  memcpy(&bits, &score, 4);
  return bits >> 31 ? ~bits : bits | 0x80000000u;
}

constexpr int64_t DIGIT = 11, DIGITS = 1 << DIGIT;  // bits of a score that one round of the search decides

// The top-th highest score is found by its bits, from the highest on: each round counts the scores that agree with the
// bits found so far, by their next digit. Of scores equal to it the first are selected.
static void select_tokens_run(const SelectTokensArgs* a, int64_t row) {
  const int64_t n = tokens_seen(a->table, row), top = a->top;
  int32_t* chosen = a->chosen + row * top;
  if (n <= top) {
    for (int64_t i = 0; i < n; ++i) chosen[i] = int32_t(i);
    return;
  }
  const float* scores = scores_of(a->table, row);
  uint64_t least = 0;    // the bits of the top-th highest score that are found
  int64_t wanted = top;  // how many of the scores that agree with them are selected
  for (int64_t known = 0; known < 32;) {
    const int64_t bits = 32 - known < DIGIT ? 32 - known : DIGIT, shift = 32 - known - bits;
    int32_t found[DIGITS] = {};
    for (int64_t i = 0; i < n; ++i) {
      const uint64_t x = ordered_bits(scores[i]);
      if (x >> (shift + bits) == least) ++found[x >> shift & ((1 << bits) - 1)];
    }
    int64_t digit = (1 << bits) - 1;
    for (; wanted > found[digit]; --digit) wanted -= found[digit];
    least = least << bits | uint64_t(digit);
    known += bits;
  }
  for (int64_t i = 0, at = 0; at < top; ++i) {
    const uint64_t x = ordered_bits(scores[i]);
    if (x > least || (x == least && wanted-- > 0)) chosen[at++] = int32_t(i);
  }
}

}  // namespace
