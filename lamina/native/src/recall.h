// Token vectors that model code reads back as they are: those that the new token of each row sees, dequantized.
#pragma once
#include "stored.h"

namespace {

struct RecallArgs {
  float* out;            // [rows, room, dim]; zeros behind the tokens that are there
  uint8_t* seen;         // [rows, room]: 1 where there is a token
  const int64_t* table;
  const Coding* coding;  // null: not quantized
  int64_t rows, room, dim, window, size, keep, page, store_type;
};

constexpr int64_t RECALLED = 64;  // tokens of one piece of work

static int64_t recall_units(const RecallArgs* a) { return a->rows * ((a->room + RECALLED - 1) / RECALLED); }

static void recall_run(const RecallArgs* a, int64_t unit) {
  const int64_t row = unit % a->rows, begin = unit / a->rows * RECALLED;
  const int64_t end = begin + RECALLED < a->room ? begin + RECALLED : a->room;
  Visible there = {0, 0, 0};
  if (count_of(a->table, row)) there = visible(a->table, row, a->window, a->size, a->keep, 1);
  const TokenList list{a->table, nullptr, there, row, 0, 1, a->keep, a->page};
  float* to = a->out + (row * a->room + begin) * a->dim;
  for (int64_t j = begin; j < end; ++j, to += a->dim) {
    a->seen[row * a->room + j] = j < there.count;
    if (j >= there.count) {
      memset(to, 0, size_t(a->dim) * 4);
      continue;
    }
    const int64_t cell = list.cell(slot_of(a->table, list.position(j), a->keep));
    if (a->coding) {
      decode_vector(a->coding, coded_store(a->table, false), cell, to);
      if (a->coding->rotate) rotate_groups(to, a->dim);
      continue;
    }
    with_type(a->store_type, reinterpret_cast<const void*>(a->table[K_STORE]), [&](auto* store) {
      for (int64_t i = 0; i < a->dim; ++i) to[i] = value(store[cell * a->dim + i]);
    });
  }
}

}  // namespace
