// Compares the kernel that puts codes into order with loops over single values, for random words in memory of exactly
// their size, so that the address sanitizer sees reads and writes beyond it. Prints the number of comparisons; returns 1
// on a difference.
#include <algorithm>
#include <cstdio>
#include <memory>
#include <random>
#include <vector>

#include "codes.h"

namespace {

std::mt19937 generator(7);
int64_t compared = 0, wrong = 0;

enum Layout { ALONG, ACROSS, AWQ };
const char* names[] = {"along", "across", "awq"};

// The value of an output at an input, as the descriptions of the layouts have it.
uint32_t value(Layout layout, const uint32_t* words, int64_t row_words, int64_t bits, int64_t output, int64_t input) {
  if (layout == AWQ) {
    const int order[] = {0, 2, 4, 6, 1, 3, 5, 7};
    const int place = int(std::find(order, order + 8, int(output % 8)) - order);
    return words[input * row_words + output / 8] >> 4 * place & 15;
  }
  const int64_t each = 32 / bits, at = input / each;
  const uint32_t word = layout == ALONG ? words[output * row_words + at] : words[at * row_words + output];
  return word >> bits * (input % each) & ((1u << bits) - 1);
}

void compare(Layout layout, int64_t outputs, int64_t width, int64_t bits, bool ordered, bool flip, int64_t gap) {
  const int64_t across_words = (width * bits + 31) / 32;
  const int64_t rows = layout == ALONG ? outputs : layout == ACROSS ? across_words : width;
  const int64_t columns = layout == ALONG ? across_words : layout == ACROSS ? outputs : outputs / 8;
  const int64_t row_words = columns + gap, size = (rows - 1) * row_words + columns, bytes = width * bits / 8;
  std::unique_ptr<uint32_t[]> words(new uint32_t[size_t(size)]);
  std::unique_ptr<uint8_t[]> out(new uint8_t[size_t(outputs * bytes)]());
  std::unique_ptr<int32_t[]> order(new int32_t[size_t(width)]);
  for (int64_t i = 0; i < size; ++i) words[size_t(i)] = uint32_t(generator());
  for (int64_t i = 0; i < width; ++i) order[size_t(i)] = int32_t(i);
  if (ordered) std::shuffle(order.get(), order.get() + width, generator);
  CodesArgs args = {};
  args.words = words.get(), args.out = out.get(), args.order = ordered ? order.get() : nullptr;
  args.outputs = outputs, args.width = width, args.bits = bits, args.awq = layout == AWQ;
  args.out_step = layout == ACROSS ? 1 : row_words, args.in_step = layout == ACROSS ? row_words : 1;
  args.flip = flip ? 0x80808080 : 0;
  const int64_t units = codes_units(&args);
  for (int64_t unit = 0; unit < units; ++unit) codes_run(&args, units - 1 - unit);
  for (int64_t o = 0; o < outputs; ++o)
    for (int64_t j = 0; j < width; ++j) {
      const uint32_t wanted = value(layout, words.get(), row_words, bits, o, order[size_t(j)]) ^ (flip ? 128u : 0u);
      const uint8_t* row = out.get() + o * bytes;
      const uint32_t found = bits == 8 ? row[j] : row[j / 32 * 16 + j % 16] >> (j % 32 < 16 ? 0 : 4) & 15;
      ++compared;
      if (found == wanted) continue;
      if (++wrong <= 10)
        std::printf("%s, %ld bits, [%ld, %ld], ordered %d: value [%ld, %ld] is %u, not %u\n", names[layout], long(bits),
                    long(outputs), long(width), ordered, long(o), long(j), found, wanted);
    }
}

}  // namespace

int main() {
  for (int64_t outputs : {8, 24, 128, 136, 264})
    for (int64_t width : {32, 96, 128, 160, 544})
      for (int64_t gap : {0, 3}) {
        for (bool ordered : {false, true})
          for (Layout layout : {ALONG, ACROSS}) {
            const int64_t fewer = outputs - (outputs > 8 ? 3 : 0);  // outputs of these need not be a multiple of 8
            compare(layout, fewer, width, 4, ordered, false, gap);
            for (bool flip : {false, true}) compare(layout, fewer, layout == ALONG ? width - 3 : width, 8, ordered, flip, gap);
          }
        compare(AWQ, outputs, width, 4, false, false, gap);
      }
  compare(ALONG, 3, 200'000, 4, false, false, 0);  // a row longer than a piece of work
  std::printf("%ld values compared, %ld differ\n", long(compared), long(wrong));
  return wrong != 0 || compared == 0;
}
