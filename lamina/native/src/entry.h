// A cache entry: one row of the int64 table that lamina/kernels/columns.py declares. Kernels read it when they run, so
// a program serves any cache.
#pragma once
#include "vectors.h"

namespace {

enum Column {
  K_STORE, V_STORE, SLOTS, RING, KEEP, LENGTHS, COUNTS, PAGES, PAGES_PER_ROW, K_SCALES, V_SCALES, K_HIGH, V_HIGH,
  SCORES, SCORE_ROOM, SLACK, BASES, BASE_STATE, LOGS
};
constexpr int COLUMNS = 24;  // of a row; from LOGS on, one for each input of a recurrence

enum Window : int64_t { FULL, SLIDING, CHUNKED };

static inline int64_t length_of(const int64_t* table, int64_t row) {
  return reinterpret_cast<const int64_t*>(table[LENGTHS])[row];
}
static inline int64_t count_of(const int64_t* table, int64_t row) {  // new tokens of the row: 1, or 0 if it has ended
  return table[COUNTS] ? reinterpret_cast<const int64_t*>(table[COUNTS])[row] : 1;
}

// The slot of the token at a position.
static inline int64_t slot_of(const int64_t* table, int64_t position, int64_t keep) {
  int64_t ring = table[RING];
  return ring == 0 || position < keep ? position : keep + (position - keep) % ring;
}

// The cell of a slot: a store is an array of cells, see lamina/kernels/slots.py.
static inline int64_t cell_of(
    const int64_t* table, int64_t row, int64_t head, int64_t heads, int64_t slot, int64_t page) {
  if (page == 0) return (row * heads + head) * table[SLOTS] + slot;
  const int32_t* pages = reinterpret_cast<const int32_t*>(table[PAGES]) + row * table[PAGES_PER_ROW];
  return (int64_t(pages[slot / page]) * heads + head) * page + slot % page;
}

// The tokens of a row that its new token sees: positions 0 … kept - 1, then first … end - 1.
struct Visible {
  int64_t kept, first, count;
};

// added: 1 if the new token is in its slot already, 0 if there is none
static inline Visible visible(
    const int64_t* table, int64_t row, int64_t window, int64_t size, int64_t keep, int64_t added) {
  int64_t at = length_of(table, row), end = at + added, ring = table[RING];
  int64_t kept = keep < end ? keep : end, first = 0;
  if (window == SLIDING) first = at - size + 1;
  if (window == CHUNKED) first = at / size * size;
  if (ring && first < end - ring) first = end - ring;
  if (first < kept) first = kept;
  return {kept, first, kept + end - first};
}

// The longest run of tokens j … of a row's visible list, up to `end`, whose cells follow each other.
struct Run {
  int64_t position, slot, tokens;
};

static inline Run run_from(const int64_t* table, const Visible& seen, int64_t keep, int64_t page, int64_t j, int64_t end) {
  int64_t position = j < seen.kept ? j : seen.first + j - seen.kept;
  int64_t slot = slot_of(table, position, keep), tokens = end - j, ring = table[RING];
  if (j < seen.kept && tokens > seen.kept - j) tokens = seen.kept - j;
  if (ring && position >= keep && tokens > keep + ring - slot) tokens = keep + ring - slot;
  if (page && tokens > page - slot % page) tokens = page - slot % page;
  return {position, slot, tokens};
}

}  // namespace
