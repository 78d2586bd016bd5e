// The stored tokens that a query reads: which they are, their keys and values in blocks, and products with the keys.
#pragma once
#include "heads.h"

namespace {

constexpr int64_t BLOCK = 64;    // tokens, at most
constexpr int64_t AHEAD = 4096;  // bytes behind those that are read, which the cache is told to fetch
constexpr int64_t BLOCK_VALUES = BLOCK * 640;  // of gathered tokens: wider ones come in smaller blocks

// Tokens 0, 1, … of one row and key head: all that its new token sees, or those at a list of positions.
struct TokenList {
  const int64_t* table;
  const int32_t* chosen;  // ascending positions, or null: all of `seen`
  Visible seen;
  int64_t row, head, heads, keep, page;

  int64_t position(int64_t j) const {
    if (chosen) return chosen[j];
    return j < seen.kept ? j : seen.first + j - seen.kept;
  }
  // The longest run of tokens j … end - 1 whose cells follow each other; of a list one token.
  Run run(int64_t j, int64_t end) const {
    if (chosen) return {chosen[j], slot_of(table, chosen[j], keep), 1};
    return run_from(table, seen, keep, page, j, end);
  }
  int64_t cell(int64_t slot) const { return cell_of(table, row, head, heads, slot, page); }
};

// Blocks of tokens where they are stored, as type T. `fetch` sets at_keys [tokens, dim] and at_values [tokens, stride].
template <class T> struct StoredTokens {
  TokenList list;
  const T *keys, *values;
  int64_t dim, stride;
  const T *at_keys, *at_values;

  int64_t fetch(int64_t j, int64_t end) {  // -> tokens of the block that begins at token j
    const Run run = list.run(j, end);
    const int64_t cell = list.cell(run.slot);
    at_keys = keys + cell * dim, at_values = values + cell * stride;
    return run.tokens < BLOCK ? run.tokens : BLOCK;
  }
};

// Blocks of tokens that are dequantized, or gathered from a list, into memory of this thread as float32.
struct GatheredTokens {
  TokenList list;
  int64_t type;                      // of a store that is not quantized
  const Coding *k_coding, *v_coding; // null: not quantized
  int64_t dim, value_dim, stride;    // value_dim 0: no values, or they are the first of each key
  const float *at_keys, *at_values;
  float key_memory[BLOCK_VALUES], value_memory[BLOCK_VALUES];

  void copy(bool values, const Coding* coding, int64_t width, int64_t cell, float* to) {
    if (coding) return decode_vector(coding, coded_store(list.table, values), cell, to);
    with_type(type, reinterpret_cast<const void*>(list.table[values ? V_STORE : K_STORE]), [&](auto* p) {
      for (int64_t i = 0; i < width; ++i) to[i] = value(p[cell * width + i]);
    });
  }
  int64_t fetch(int64_t j, int64_t end) {
    const int64_t widest = dim > value_dim ? dim : value_dim, room = BLOCK_VALUES / widest;
    const int64_t most = room < BLOCK ? room : BLOCK, tokens = end - j < most ? end - j : most;
    for (int64_t t = 0; t < tokens;) {
      const Run run = list.run(j + t, j + tokens);
      const int64_t cell = list.cell(run.slot);
      for (int64_t i = 0; i < run.tokens; ++i, ++t) {
        copy(false, k_coding, dim, cell + i, key_memory + t * dim);
        if (value_dim) copy(true, v_coding, value_dim, cell + i, value_memory + t * value_dim);
      }
    }
    at_keys = key_memory, at_values = value_dim ? value_memory : key_memory;
    return tokens;
  }
};

// scores[g, t] = q[g] · k[t] for G queries. Where heads are whole vectors, four tokens at a time share the last sums.
// ALIKE: fewer than four as well, so that equal keys have equal products wherever they are in a block.
template <int G, bool ALIKE = false, class T>
static inline void score(const float* q, int64_t dim, const T* k, int64_t tokens, float* scores) {
  int64_t t = 0;
  if (dim % LANES == 0)
    for (; t + (ALIKE ? 1 : 4) <= tokens; t += 4, k += 4 * dim) {
      const int64_t last = tokens - t - 1;  // of the tokens behind it, read in place of those that are missing
      vf total[G][4];
      for (int g = 0; g < G; ++g)
        for (int j = 0; j < 4; ++j) total[g][j] = zeros();
      for (int64_t byte = 0; byte < 4 * dim * int64_t(sizeof(T)); byte += 64)
        __builtin_prefetch(reinterpret_cast<const char*>(k) + AHEAD + byte);
      const T* at[4];
      for (int j = 0; j < 4; ++j) at[j] = k + (ALIKE && last < j ? last : j) * dim;
      for (int64_t i = 0; i < dim; i += LANES) {
        vf key[4];
        for (int j = 0; j < 4; ++j) key[j] = load(at[j] + i);
        for (int g = 0; g < G; ++g) {
          vf x = load(q + g * dim + i);
          for (int j = 0; j < 4; ++j) total[g][j] = total[g][j] + x * key[j];
        }
      }
      for (int g = 0; g < G; ++g) sums(total[g], scores + g * BLOCK + t);
    }
  for (; t < tokens; ++t, k += dim) {
    vf total[G];
    for (int g = 0; g < G; ++g) total[g] = zeros();
    int64_t i = 0;
    for (; i + LANES <= dim; i += LANES) {
      vf key = load(k + i);
      for (int g = 0; g < G; ++g) total[g] = total[g] + load(q + g * dim + i) * key;
    }
    for (int g = 0; g < G; ++g) {
      float one = sum(total[g]);
      for (int64_t j = i; j < dim; ++j) one += q[g * dim + j] * value(k[j]);
      scores[g * BLOCK + t] = one;
    }
  }
}

}  // namespace
