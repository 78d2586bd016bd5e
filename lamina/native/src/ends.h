// The two ends of a step: positions from the clock; choosing the next token and committing the one that was fed.
//
// The cache is found through its header (`HEADER` in lamina/kernels/columns.py), so a program serves every cache. The
// noise is that of lamina/sampling/noise.py.
#pragma once
#include "vectors.h"

namespace {

enum HeaderColumn { H_LENGTHS, H_WRITTEN, H_BASE, H_RECORD, H_RECORD_WIDTH, H_LOGITS, H_SLACK };

static inline int64_t* ints(const int64_t* header, int column) { return reinterpret_cast<int64_t*>(header[column]); }

// -- the beginning --------------------------------------------------------------------------------------------------

struct PositionsArgs {
  const int64_t* header;
  int64_t* out;  // [rows]
  int64_t rows, last;  // last: the largest position
};

static int64_t positions_units(const PositionsArgs*) { return 1; }

static void positions_run(const PositionsArgs* a, int64_t) {
  const int64_t* lengths = ints(a->header, H_LENGTHS);
  for (int64_t row = 0; row < a->rows; ++row) a->out[row] = lengths[row] < a->last ? lengths[row] : a->last;
}

// -- choosing ---------------------------------------------------------------------------------------------------------

struct ChooseArgs {
  const float *logits, *scores;            // [rows, vocab] each; the cache keeps logits, scores are chosen from
  const int64_t *header, *counts;          // counts [rows]: 0 where the row takes no part
  const int64_t *seed, *numbers;           // [1], [rows]: of the noise; null: the largest score is chosen
  float* best;                             // [rows, parts]
  int64_t* where;                          // [rows, parts]
  int64_t rows, vocab, logits_type, parts;
};

constexpr int64_t STRETCH = 4096;  // scores of one piece of work
constexpr float MOST_NOISE = 23.0f;

static int64_t choose_units(const ChooseArgs* a) { return a->rows * a->parts; }

static inline uint32_t hash(uint32_t x) {
  x ^= x >> 16, x *= 0x21F0AAADu, x ^= x >> 15, x *= 0xD35A2D97u;
  return x ^ x >> 15;
}

static inline float gumbel(uint32_t left, uint32_t right, int64_t id) {
  uint32_t mixed = hash(hash(uint32_t(id) + left) + right);
  float u = float(mixed) * 2.3283064365386963e-10f + 1.1641532182693481e-10f;
  u = u > 0.99999994f ? 0.99999994f : u;
  return -logf(-log1pf(-u));
}

static void choose_run(const ChooseArgs* a, int64_t unit) {
  int64_t row = unit / a->parts, part = unit % a->parts;
  if (a->counts[row] == 0) return;
  int64_t begin = part * STRETCH, end = begin + STRETCH < a->vocab ? begin + STRETCH : a->vocab;
  const float *logits = a->logits + row * a->vocab, *scores = a->scores + row * a->vocab;
  with_type(a->logits_type, reinterpret_cast<void*>(a->header[H_LOGITS]), [&](auto* kept) {
    for (int64_t i = begin; i < end; ++i) put(kept + row * a->vocab + i, logits[i]);
  });
  float best = -INFINITY;
  int64_t where = begin;
  if (a->seed) {
    uint32_t left = 0x243F6A88u, right = 0x85A308D3u;
    uint64_t seed = uint64_t(*a->seed);
    int64_t position = ints(a->header, H_LENGTHS)[row] + 1;  // of the token to be drawn
    const uint32_t words[] = {uint32_t(seed), uint32_t(seed >> 32), uint32_t(a->numbers[row]), uint32_t(position), 0u};
    for (uint32_t word : words)
      left = hash(left + word), right = hash(right + word);
    for (int64_t i = begin; i < end; ++i) {
      if (scores[i] + MOST_NOISE < best) continue;
      float merit = scores[i] + gumbel(left, right, i);
      if (merit > best || (merit != merit && best == best)) best = merit, where = i;
    }
  } else {
    vf most = all(-INFINITY);
    vi odd = {};
    int64_t i = begin;
    for (; i + LANES <= end; i += LANES) {
      vf x = load(scores + i);
      most = larger(x, most), odd |= x != x;
    }
    bool any = false;
    float parts[LANES];
    store(parts, most);
    for (int j = 0; j < LANES; ++j) best = parts[j] > best ? parts[j] : best, any |= odd[j] != 0;
    for (; i < end; ++i) best = scores[i] > best ? scores[i] : best, any |= scores[i] != scores[i];
    for (i = begin; i < end; ++i)
      if (any ? scores[i] != scores[i] : scores[i] == best) break;
    where = i < end ? i : begin;
    if (any) best = NAN;
  }
  a->best[row * a->parts + part] = best, a->where[row * a->parts + part] = where;
}

// -- committing -------------------------------------------------------------------------------------------------------

struct CommitArgs {
  const float* best;     // [rows, parts], as `choose` leaves them
  const int64_t* where;
  const int64_t* header;
  int64_t *ids, *counts, *left;  // [rows]: see `finish` in lamina/kernels/step_ends.py
  const int64_t* ends;           // [ends_count]: ids that end a row
  int64_t rows, parts, ends_count;
};

static int64_t commit_units(const CommitArgs*) { return 1; }

static void commit_run(const CommitArgs* a, int64_t) {
  for (int64_t row = 0; row < a->rows; ++row) {
    if (a->counts[row] == 0) continue;
    const float* best = a->best + row * a->parts;
    int64_t chosen = a->where[row * a->parts];
    float most = best[0];
    for (int64_t i = 1; i < a->parts; ++i)
      if (best[i] > most || (best[i] != best[i] && most == most)) most = best[i], chosen = a->where[row * a->parts + i];
    int64_t fed = a->ids[row], length = ints(a->header, H_LENGTHS)[row], after = length + 1;
    int64_t* written = ints(a->header, H_WRITTEN) + row;
    ints(a->header, H_RECORD)[row * a->header[H_RECORD_WIDTH] + length] = fed;
    *written = *written > after ? *written : after;
    int64_t *base = ints(a->header, H_BASE) + row, slack = a->header[H_SLACK];
    if (after - *base > 2 * slack) *base = after - slack;  // as `move_base` of recurrent.h has moved the states
    ints(a->header, H_LENGTHS)[row] = after;
    bool ended = false;
    for (int64_t i = 0; i < a->ends_count; ++i) ended |= a->ends[i] == fed;
    a->left[row] -= 1;
    a->counts[row] = a->left[row] > 0 && !ended;
    a->ids[row] = chosen;
  }
}

}  // namespace
