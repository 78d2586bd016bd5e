// Codes of quantized checkpoints, put into the order of `IntGroups` (lamina/weights/int_groups.py).
//
// A row of the result, an output, has width · bits / 8 bytes. 8 bits: byte i is value i. 4 bits: of each 32 values, byte i
// has value i in its low half and value i + 16 in its high half. The reference is
// lamina/checkpoint/quantized/code_order.py.
//
//     along    words [out, in · bits / 32], words of a row next to each other (compressed-tensors)
//     across   the same words, those of neighbouring outputs next to each other (GPTQ)
//     awq      words [in, out / 8]: one input of 8 outputs, in the order 0 2 4 6 1 3 5 7
//
// Across and awq are transposed in blocks of 128 outputs × 64 bytes, which fit the first cache: 512 or 64 neighbouring
// bytes of the file are read at a time, and whole cache lines are written.
#pragma once
#include <cstdint>
#include <cstring>

namespace {

struct CodesArgs {
  const uint32_t* words;
  const int32_t* order;  // [width]: column j of the result is column order[j] of the weight; null: as they are stored
  uint8_t* out;          // [outputs, width · bits / 8]
  int64_t outputs, width, bits, awq;
  int64_t out_step, in_step;  // words from one output (awq: one input) to the next, and along the inputs; one of them is 1
  int64_t flip;               // what each word of the result is combined with by exclusive-or; 8 bits alone
};

constexpr int64_t BLOCK_OUTPUTS = 128;
constexpr int64_t BLOCK_WORDS = 16;           // of the result, for each output
constexpr int64_t PIECE_BYTES = 1 << 16;      // of the result, in one piece of work along rows
constexpr uint32_t LOW_HALVES = 0x0F0F0F0Fu;  // of the four bytes of a word

static inline int64_t row_bytes_of(const CodesArgs* a) { return a->width * a->bits / 8; }
static inline bool is_along(const CodesArgs* a) { return !a->awq && a->in_step == 1; }
static inline int64_t outputs_at_once(const CodesArgs* a) {
  if (!is_along(a)) return BLOCK_OUTPUTS;
  const int64_t bytes = row_bytes_of(a);
  return bytes && bytes < PIECE_BYTES ? PIECE_BYTES / bytes : 1;
}

static int64_t codes_units(const CodesArgs* a) { return (a->outputs + outputs_at_once(a) - 1) / outputs_at_once(a); }

// The two lower bytes of a and of b: a0 b0 a1 b1.
static inline uint32_t by_turns(uint32_t a, uint32_t b) {
  a = (a & 0xFFFFu) | (a & 0xFFFFu) << 8, b = (b & 0xFFFFu) | (b & 0xFFFFu) << 8;
  return (a & 0x00FF00FFu) | (b & 0x00FF00FFu) << 8;
}

// low: values v … v + 7, high: values v + 16 … v + 23 -> the eight bytes in which they share.
static inline void share_bytes(uint32_t low, uint32_t high, uint32_t* first, uint32_t* second) {
  const uint32_t even = (low & LOW_HALVES) | (high & LOW_HALVES) << 4;
  const uint32_t odd = (low >> 4 & LOW_HALVES) | (high & ~LOW_HALVES);
  *first = by_turns(even, odd), *second = by_turns(even >> 16, odd >> 16);
}

// The column of the weight whose value is in byte j of a row of the result; half 1: in the high half of that byte.
static inline int64_t column_of(const CodesArgs* a, int64_t j, int64_t half) {
  return a->order[a->bits == 8 ? j : j / 16 * 32 + j % 16 + 16 * half];
}

// -- along ------------------------------------------------------------------------------------------------------------

static inline uint32_t half_byte(const uint8_t* row, int64_t i) { return uint32_t(row[i >> 1]) >> 4 * (i & 1) & 15; }

static void row_along(const CodesArgs* a, const uint8_t* row, uint8_t* out) {
  const int64_t bytes = row_bytes_of(a);
  const uint8_t flip = uint8_t(a->flip);
  if (a->bits == 8) {
    if (a->order)
      for (int64_t j = 0; j < bytes; ++j) out[j] = uint8_t(row[a->order[j]] ^ flip);
    else
      for (int64_t j = 0; j < bytes; ++j) out[j] = uint8_t(row[j] ^ flip);
    return;
  }
  if (a->order) {
    for (int64_t j = 0; j < bytes; j += 16) {
      const int32_t* columns = a->order + 2 * j;
      for (int i = 0; i < 16; ++i)
        out[j + i] = uint8_t(half_byte(row, columns[i]) | half_byte(row, columns[i + 16]) << 4);
    }
    return;
  }
  for (int64_t j = 0; j < bytes; j += 16) {
    uint32_t from[4], to[4];
    memcpy(from, row + j, 16);
    share_bytes(from[0], from[2], to, to + 1), share_bytes(from[1], from[3], to + 2, to + 3);
    memcpy(out + j, to, 16);
  }
}

// -- across and awq ---------------------------------------------------------------------------------------------------
//
// Each function makes words `first` … `first + count` of the rows of `n` outputs, whose words begin at `words`:
// block [count, BLOCK_OUTPUTS].

static void block_across(const CodesArgs* a, const uint32_t* words, int64_t first, int64_t count, int64_t n, uint32_t* block) {
  const int64_t step = a->in_step;
  const uint32_t flip = uint32_t(a->flip);
  if (a->bits == 8) {
    for (int64_t k = 0; k < count; ++k) {
      const uint32_t* from = words + (first + k) * step;
      for (int64_t o = 0; o < n; ++o) block[k * BLOCK_OUTPUTS + o] = from[o] ^ flip;
    }
    return;
  }
  for (int64_t k = 0; k < count; k += 4)  // 32 values: words k and k + 2 share bytes, k + 1 and k + 3
    for (int64_t i = 0; i < 2; ++i) {
      const uint32_t *low = words + (first + k + i) * step, *high = low + 2 * step;
      uint32_t *to = block + (k + 2 * i) * BLOCK_OUTPUTS, *next = to + BLOCK_OUTPUTS;
      for (int64_t o = 0; o < n; ++o) share_bytes(low[o], high[o], to + o, next + o);
    }
}

static void block_ordered(const CodesArgs* a, const uint32_t* words, int64_t first, int64_t count, int64_t n, uint32_t* block) {
  const int64_t bits = a->bits, each = 32 / bits, to_byte = 8 / bits;
  const uint32_t mask = (1u << bits) - 1;
  for (int64_t k = 0; k < count; ++k) {
    uint32_t* to = block + k * BLOCK_OUTPUTS;
    for (int64_t o = 0; o < n; ++o) to[o] = uint32_t(a->flip);
    for (int64_t i = 0; i < 4 * to_byte; ++i) {
      const int64_t byte = i / to_byte, half = i % to_byte, column = column_of(a, 4 * (first + k) + byte, half);
      const uint32_t* from = words + column / each * a->in_step;
      const int right = int(column % each * bits), left = int(8 * byte + 4 * half);
      for (int64_t o = 0; o < n; ++o) to[o] ^= (from[o] >> right & mask) << left;
    }
  }
}

// `n` is a multiple of 8. The word of output 8q + i is at i · BLOCK_OUTPUTS / 8 + q: loops over q write neighbours.
static void block_awq(const CodesArgs* a, const uint32_t* words, int64_t first, int64_t count, int64_t n, uint32_t* block) {
  constexpr int OF[2][4] = {{0, 4, 1, 5}, {2, 6, 3, 7}};  // outputs of the low and of the high halves of a word's bytes
  constexpr uint32_t EVEN = 0x00FF00FFu, ODD = 0xFF00FF00u;
  for (int64_t k = 0; k < count; ++k) {
    const int64_t byte = 4 * (first + k), input = byte / 16 * 32 + byte % 16;
    const uint32_t *low = words + input * a->out_step, *high = low + 16 * a->out_step;  // of four inputs each
    for (int is_high = 0; is_high < 2; ++is_high) {
      uint32_t* to[4];
      for (int i = 0; i < 4; ++i) to[i] = block + k * BLOCK_OUTPUTS + OF[is_high][i] * (BLOCK_OUTPUTS / 8);
      for (int64_t q = 0; q < n / 8; ++q) {
        uint32_t w[4];  // of each input a byte for four outputs; transposed below
        for (int64_t i = 0; i < 4; ++i) {
          const uint32_t x = low[i * a->out_step + q], y = high[i * a->out_step + q];
          w[i] = is_high ? (x >> 4 & LOW_HALVES) | (y & ~LOW_HALVES) : (x & LOW_HALVES) | (y & LOW_HALVES) << 4;
        }
        const uint32_t even = (w[0] & EVEN) | (w[1] & EVEN) << 8, odd = (w[0] >> 8 & EVEN) | (w[1] & ODD);
        const uint32_t even_2 = (w[2] & EVEN) | (w[3] & EVEN) << 8, odd_2 = (w[2] >> 8 & EVEN) | (w[3] & ODD);
        to[0][q] = (even & 0xFFFFu) | even_2 << 16, to[2][q] = even >> 16 | (even_2 & 0xFFFF0000u);
        to[1][q] = (odd & 0xFFFFu) | odd_2 << 16, to[3][q] = odd >> 16 | (odd_2 & 0xFFFF0000u);
      }
    }
  }
}

static void codes_run(const CodesArgs* a, int64_t unit) {
  const int64_t bytes = row_bytes_of(a), begin = unit * outputs_at_once(a);
  const int64_t n = begin + outputs_at_once(a) < a->outputs ? outputs_at_once(a) : a->outputs - begin;
  uint8_t* out = a->out + begin * bytes;
  if (is_along(a)) {
    for (int64_t o = 0; o < n; ++o)
      row_along(a, reinterpret_cast<const uint8_t*>(a->words + (begin + o) * a->out_step), out + o * bytes);
    return;
  }
  const uint32_t* words = a->words + (a->awq ? begin / 8 : begin);
  alignas(64) uint32_t block[BLOCK_WORDS * BLOCK_OUTPUTS] = {};
  for (int64_t first = 0; 4 * first < bytes; first += BLOCK_WORDS) {
    const int64_t size = 4 * (first + BLOCK_WORDS) < bytes ? 4 * BLOCK_WORDS : bytes - 4 * first, count = (size + 3) / 4;
    if (a->awq) block_awq(a, words, first, count, n, block);
    else if (a->order) block_ordered(a, words, first, count, n, block);
    else block_across(a, words, first, count, n, block);
    for (int64_t o = 0; o < n; ++o) {
      const int64_t at = a->awq ? o % 8 * (BLOCK_OUTPUTS / 8) + o / 8 : o;
      uint32_t line[BLOCK_WORDS];
      for (int64_t k = 0; k < BLOCK_WORDS; ++k) line[k] = block[k * BLOCK_OUTPUTS + at];
      if (size == 4 * BLOCK_WORDS) memcpy(out + o * bytes + 4 * first, line, 4 * BLOCK_WORDS);
      else memcpy(out + o * bytes + 4 * first, line, size_t(size));
    }
  }
}

}  // namespace
