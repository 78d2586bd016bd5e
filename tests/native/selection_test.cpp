// Compares the native kernels of an indexer, of attention over selected tokens and of recalled vectors with plain loops,
// for every set of instructions of this machine. Stores and lists have exactly the size that kernels may touch, so that
// the address sanitizer sees reads and writes beyond it. Prints the number of comparisons; returns 1 on a difference.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <vector>

#include "kernels.h"

namespace {

std::mt19937 generator(7);
int64_t compared = 0, wrong = 0;

float uniform() { return std::uniform_real_distribution<float>(-1, 1)(generator); }

template <class T> struct Array {  // exactly sized, unlike a vector that has grown
  explicit Array(int64_t size) : size(size), values(new T[size_t(size)]()) {}
  T& operator[](int64_t i) { return values[size_t(i)]; }
  T* data() { return values.get(); }
  int64_t size;
  std::unique_ptr<T[]> values;
};

template <class T> int64_t address(T* p) { return int64_t(reinterpret_cast<intptr_t>(p)); }

// Rows of vectors in a line or in pages, as floats or as codes; unused slots hold NaN.
struct Store {
  int64_t rows, slots, dim, page, pages_per_row;
  Coding coding;
  Array<int64_t> lengths, counts, table;
  Array<int32_t> pages;
  Array<float> plain;
  Array<uint8_t> codes, high;
  Array<float16> scales;

  // bits: 0 for floats
  Store(std::vector<int64_t> at, int64_t slots, int64_t dim, int64_t page, int64_t bits)
      : rows(int64_t(at.size())), slots(slots), dim(dim), page(page), pages_per_row(page ? (slots + page - 1) / page : 0),
        coding{nullptr, bits, 0, dim}, lengths(rows), counts(rows), table(COLUMNS), pages(rows * pages_per_row),
        plain(bits ? 0 : cells() * dim), codes(bits ? cells() * code_bytes(&coding) : 0),
        high(bits ? cells() * plane_bytes(&coding) : 0), scales(bits ? cells() * scale_count(&coding) : 0) {
    for (int64_t i = 0; i < rows; ++i) lengths[i] = at[size_t(i)], counts[i] = i != 1;
    std::vector<int32_t> order(size_t(pages.size));
    for (size_t i = 0; i < order.size(); ++i) order[i] = int32_t(i);
    std::shuffle(order.begin(), order.end(), generator);
    for (int64_t i = 0; i < pages.size; ++i) pages[i] = order[size_t(i)];
    for (int64_t i = 0; i < plain.size; ++i) plain[i] = NAN;
    for (int64_t row = 0; row < rows; ++row)
      for (int64_t slot = 0; slot <= lengths[row]; ++slot) {
        const int64_t at = cell(row, slot);
        if (!bits)
          for (int64_t i = 0; i < dim; ++i) plain[at * dim + i] = slot % 5 == 2 ? 0.25f : uniform();
        for (int64_t i = 0; bits && i < code_bytes(&coding); ++i) codes[at * code_bytes(&coding) + i] = uint8_t(generator());
        for (int64_t i = 0; bits && i < plane_bytes(&coding); ++i) high[at * plane_bytes(&coding) + i] = uint8_t(generator());
        for (int64_t i = 0; bits && i < scale_count(&coding); ++i) put(&scales[at * scale_count(&coding) + i], uniform() / 64);
      }
    table[K_STORE] = bits ? address(codes.data()) : address(plain.data());
    table[K_HIGH] = address(high.data()), table[K_SCALES] = address(scales.data());
    table[SLOTS] = page ? page : slots, table[LENGTHS] = address(lengths.data()), table[COUNTS] = address(counts.data());
    table[PAGES] = address(pages.data()), table[PAGES_PER_ROW] = pages_per_row;
  }
  int64_t cells() const { return page ? rows * pages_per_row * page : rows * slots; }
  int64_t cell(int64_t row, int64_t slot) {
    return page ? pages[row * pages_per_row + slot / page] * page + slot % page : row * slots + slot;
  }
  const Coding* how() const { return coding.layout ? &coding : nullptr; }
  std::vector<float> vector(int64_t row, int64_t slot) {
    std::vector<float> x(size_t(dim), 0.0f);
    const int64_t at = cell(row, slot);
    if (coding.layout) decode_vector(&coding, coded_store(table.data(), false), at, x.data());
    else memcpy(x.data(), &plain[at * dim], size_t(dim) * 4);
    return x;
  }
};

void check(bool same, const char* isa, const char* what, const Store& store) {
  ++compared;
  if (same) return;
  ++wrong;
  std::printf("%s: %s differs, dim %ld page %ld bits %ld\n", isa, what, long(store.dim), long(store.page), long(store.coding.layout));
}

bool near(double a, double b) { return std::fabs(a - b) <= 1e-4 * (1 + std::fabs(b)); }

template <class Args> void run(const lamina::KernelTable& table, const char* name, const Args& args) {
  for (int64_t i = 0; i < table.count; ++i)
    if (!strcmp(table.kernels[i].name, name)) {
      const int64_t units = table.kernels[i].units(&args);
      for (int64_t unit = 0; unit < units; ++unit) table.kernels[i].run(&args, unit);
      return;
    }
  std::printf("no kernel %s\n", name), std::exit(1);
}

void select(const lamina::KernelTable& kernels, const char* isa, Store& store, int64_t heads, int64_t top) {
  const int64_t rows = store.rows, room = store.slots;
  Array<float> q(rows * heads * store.dim), weights(rows * heads), scores(rows * room);
  for (int64_t i = 0; i < q.size; ++i) q[i] = uniform();
  for (int64_t i = 0; i < weights.size; ++i) weights[i] = uniform();
  for (int64_t i = 0; i < scores.size; ++i) scores[i] = NAN;
  Array<int32_t> chosen(rows * top);
  for (int64_t i = 0; i < chosen.size; ++i) chosen[i] = -1;
  store.table[SCORES] = address(scores.data()), store.table[SCORE_ROOM] = room;
  IndexScoresArgs scoring{q.data(), weights.data(), store.table.data(), store.how(), rows, heads, store.dim, top, heads, store.page, FLOAT32};
  run(kernels, "index_scores", scoring);
  run(kernels, "select_tokens", SelectTokensArgs{store.table.data(), chosen.data(), rows, top});
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t n = store.counts[row] ? store.lengths[row] + 1 : 0, found = n < top ? n : top;
    std::vector<int32_t> order;
    for (int64_t t = 0; t < n; ++t) order.push_back(int32_t(t));
    bool close = true, untouched = true;
    for (int64_t t = 0; n > top && t < n; ++t) {
      const std::vector<float> key = store.vector(row, t);
      double total = 0;
      for (int64_t h = 0; h < heads; ++h) {
        double product = 0;
        for (int64_t i = 0; i < store.dim; ++i) product += double(q[(row * heads + h) * store.dim + i]) * key[size_t(i)];
        total += product > 0 ? product * weights[row * heads + h] : 0;
      }
      close &= near(scores[row * room + t], total);
    }
    if (n > top)
      std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) { return scores[row * room + a] > scores[row * room + b]; });
    order.resize(size_t(found));
    std::sort(order.begin(), order.end());
    for (int64_t i = found; i < top; ++i) untouched &= chosen[row * top + i] == -1;
    check(close, isa, "a score", store);
    check(untouched && std::equal(order.begin(), order.end(), chosen.data() + row * top), isa, "a selection", store);
  }
}

void attend(const lamina::KernelTable& kernels, const char* isa, Store& store, int64_t heads, int64_t top) {
  const int64_t rows = store.rows, dim = store.dim, value = dim - dim / 4;
  Array<float> q(rows * heads * dim), out(rows * heads * value), parts(rows * heads * MOST_SPLITS * (value + 2));
  Array<int32_t> chosen(rows * top), arrived(rows);
  for (int64_t i = 0; i < q.size; ++i) q[i] = uniform();
  for (int64_t row = 0; row < rows; ++row) {  // ascending, and nothing where a row has fewer tokens
    std::vector<int32_t> some;
    for (int64_t t = 0; t <= store.lengths[row]; ++t) some.push_back(int32_t(t));
    std::shuffle(some.begin(), some.end(), generator);
    if (int64_t(some.size()) > top) some.resize(size_t(top));
    std::sort(some.begin(), some.end());
    for (int64_t i = 0; i < top; ++i) chosen[row * top + i] = i < int64_t(some.size()) ? some[size_t(i)] : 1 << 30;
  }
  AttentionArgs args = {};
  args.q = q.data(), args.out = out.data(), args.table = store.table.data(), args.parts = parts.data();
  args.arrived = arrived.data(), args.k_coding = store.how(), args.chosen = chosen.data(), args.top = top;
  args.rows = rows, args.q_heads = heads, args.k_heads = 1, args.dim = dim, args.value_dim = value, args.size = 1;
  args.page = store.page, args.added = 1, args.scale = 0.5;
  run(kernels, "attention", args);
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t n = store.counts[row] ? std::min(store.lengths[row] + 1, top) : 0;
    for (int64_t h = 0; h < heads; ++h) {
      std::vector<double> mix(size_t(value), 0.0);
      double total = 0;
      for (int64_t i = 0; i < n; ++i) {
        const std::vector<float> key = store.vector(row, chosen[row * top + i]);
        double product = 0;
        for (int64_t j = 0; j < dim; ++j) product += double(q[(row * heads + h) * dim + j]) * key[size_t(j)];
        const double share = std::exp(product * 0.5);
        total += share;
        for (int64_t j = 0; j < value; ++j) mix[size_t(j)] += share * key[size_t(j)];
      }
      bool close = true;
      for (int64_t j = 0; j < value; ++j) close &= near(out[(row * heads + h) * value + j], n ? mix[size_t(j)] / total : 0);
      check(close, isa, "an attention", store);
    }
  }
}

void recall(const lamina::KernelTable& kernels, const char* isa, Store& store, int64_t room) {
  Array<float> out(store.rows * room * store.dim);
  Array<uint8_t> seen(store.rows * room);
  const int64_t window = room < store.slots ? SLIDING : FULL;
  run(kernels, "recall", RecallArgs{out.data(), seen.data(), store.table.data(), store.how(), store.rows, room, store.dim, window, room, 0, store.page, FLOAT32});
  for (int64_t row = 0; row < store.rows; ++row) {
    const int64_t n = store.counts[row] ? std::min(store.lengths[row] + 1, room) : 0;
    bool same = true;
    for (int64_t j = 0; j < room; ++j) {
      same &= seen[row * room + j] == (j < n);
      std::vector<float> x(size_t(store.dim), 0.0f);
      if (j < n) x = store.vector(row, store.lengths[row] + 1 - n + j);
      for (int64_t i = 0; i < store.dim; ++i) same &= x[size_t(i)] == out[(row * room + j) * store.dim + i];
    }
    check(same, isa, "a recalled vector", store);
  }
}

void compare(const lamina::KernelTable& kernels, const char* isa) {
  for (int64_t dim : {12, 32, 80})
    for (int64_t page : {0, 16})
      for (int64_t bits : {0, 4, 5, 8}) {
        Store store({0, 40, 63, 611}, 612, dim, page, bits);
        for (int64_t heads : {1, 6})
          for (int64_t top : {1, 9, 300}) select(kernels, isa, store, heads, top), attend(kernels, isa, store, heads, top);
        recall(kernels, isa, store, 612), recall(kernels, isa, store, 7);
      }
}

}  // namespace

int main() {
  compare(lamina::kernels_baseline(), "baseline");
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) compare(lamina::kernels_avx2(), "avx2");
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512bw"))
    compare(lamina::kernels_avx512(), "avx512");
#endif
  std::printf("%ld compared, %ld differ\n", long(compared), long(wrong));
  return wrong != 0;
}
