// Runs programs on a pool of threads. Threads share the pieces of one operation and meet before the next.
//
// The last thread to finish an operation also runs the serial operations behind it, then lets the others go on: so a
// serial operation costs no meeting of its own. Waiting threads spin, since operations take microseconds; between two
// runs they spin for a moment and then sleep.
//
// Products of plain passes run on PyTorch's threads instead (lamina_run_on), which wait for PyTorch's next operation at
// the same cores: two pools would take turns with each other's waiting threads.

#include "program.h"

#include "products.h"

#include <unistd.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <mutex>
#include <thread>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace lamina {
namespace {

constexpr int SPINS = 4096;            // before a waiting thread gives up its core to others
constexpr int64_t AWAKE_US = 100;      // how long an idle worker spins before it sleeps

inline void pause_core() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Waits until the value differs from `old`.
inline int64_t wait_while(const std::atomic<int64_t>& value, int64_t old) {
  for (int spins = 0;; ++spins) {
    int64_t now = value.load(std::memory_order_acquire);
    if (now != old) return now;
    if (spins < SPINS) pause_core();
    else std::this_thread::yield();
  }
}

// The kernels for the instructions that products use (lamina_isa).
KernelTable choose_table() {
#if defined(__x86_64__)
  if (!strcmp(lamina_isa(), "avx512")) return kernels_avx512();
  if (!strcmp(lamina_isa(), "avx2")) return kernels_avx2();
#endif
  return kernels_baseline();
}

const KernelTable& table() {
  static const KernelTable chosen = choose_table();
  return chosen;
}

struct Pool {
  std::mutex busy;                       // one program runs at a time
  std::mutex sleeping;
  std::condition_variable wake;
  std::vector<std::thread> workers;
  int64_t owner = getpid();

  alignas(64) std::atomic<int64_t> run{0};      // number of the current run
  alignas(64) std::atomic<int64_t> phase{0};    // operation in progress, plus the first phase of the run
  alignas(64) std::atomic<int64_t> taken{0};    // pieces of it that were taken
  alignas(64) std::atomic<int64_t> arrived{0};  // threads that found no more pieces
  alignas(64) std::atomic<int64_t> left{0};     // workers that have left the run
  const Operation* operations = nullptr;
  int64_t count = 0, threads = 1, first_phase = 0;

  void work(int64_t index, int64_t seen);
  void take_part();
  int64_t run_serial(int64_t next);
  void go(const Operation* ops, int64_t n, int64_t with);
};

// Runs the serial operations from `next` on; -> the index of the first one that is not.
int64_t Pool::run_serial(int64_t next) {
  const Kernel* kernels = table().kernels;
  for (; next < count; ++next) {
    const Operation& op = operations[next];
    const Kernel& kernel = kernels[op.kernel];
    int64_t units = kernel.units(op.arguments);
    if (!op.serial && units > 1) break;
    for (int64_t i = 0; i < units; ++i) kernel.run(op.arguments, i);
  }
  return next;
}

void Pool::take_part() {
  const Kernel* kernels = table().kernels;
  const int64_t base = first_phase, n = count, all = threads;
  int64_t at = phase.load(std::memory_order_acquire);
  while (at - base < n) {
    const Operation& op = operations[at - base];
    const Kernel& kernel = kernels[op.kernel];
    int64_t units = kernel.units(op.arguments);
    for (int64_t i; (i = taken.fetch_add(1, std::memory_order_relaxed)) < units;) kernel.run(op.arguments, i);
    if (arrived.fetch_add(1, std::memory_order_acq_rel) + 1 == all) {
      int64_t next = run_serial(at - base + 1);
      taken.store(0, std::memory_order_relaxed);
      arrived.store(0, std::memory_order_relaxed);
      at = base + next;
      phase.store(at, std::memory_order_release);
    } else {
      at = wait_while(phase, at);
    }
  }
}

// A worker's life. seen: the number of the last run that it has nothing to do with
void Pool::work(int64_t index, int64_t seen) {
  for (;;) {
    auto since = std::chrono::steady_clock::now();
    int64_t now;
    for (int spins = 0; (now = run.load(std::memory_order_acquire)) == seen; ++spins) {
      pause_core();
      if (spins % 64 == 63) {
        auto idle = std::chrono::steady_clock::now() - since;
        if (std::chrono::duration_cast<std::chrono::microseconds>(idle).count() > AWAKE_US) {
          std::unique_lock<std::mutex> lock(sleeping);
          wake.wait(lock, [&] { return run.load(std::memory_order_acquire) != seen; });
        }
      }
    }
    seen = now;
    if (index < threads) take_part();
    left.fetch_add(1, std::memory_order_acq_rel);
  }
}

void Pool::go(const Operation* ops, int64_t n, int64_t with) {
  std::lock_guard<std::mutex> one(busy);
  operations = ops, count = n, threads = with, first_phase = phase.load();
  int64_t next = run_serial(0);
  if (next == n) return;
  while (int64_t(workers.size()) < with - 1) {
    int64_t index = int64_t(workers.size()) + 1;
    workers.emplace_back([this, index, seen = run.load()] { work(index, seen); });
    workers.back().detach();
  }
  taken = 0, arrived = 0, left = 0;
  phase.store(first_phase + next, std::memory_order_release);
  {
    std::lock_guard<std::mutex> lock(sleeping);
    run.fetch_add(1, std::memory_order_acq_rel);
  }
  wake.notify_all();
  take_part();
  const int64_t all = int64_t(workers.size());
  for (int spins = 0; left.load(std::memory_order_acquire) < all; ++spins) {
    if (spins < SPINS) pause_core();
    else std::this_thread::yield();
  }
}

std::mutex making;
Pool* pool = nullptr;  // never freed: its threads run until the process ends

// The pool of this process. A process that was forked has none of its parent's threads, and gets a pool of its own.
Pool& the_pool() {
  std::lock_guard<std::mutex> lock(making);
  if (pool == nullptr || pool->owner != getpid()) pool = new Pool;
  return *pool;
}

}  // namespace
}  // namespace lamina

namespace lamina {
namespace {

// The pieces of one operation, for threads that take them one by one.
struct Share {
  const Kernel* kernel;
  const void* arguments;
  int64_t units, threads;
  std::atomic<int64_t> joined{0}, taken{0};
};

void take_share(void* data) {
  Share& share = *static_cast<Share*>(data);
  if (share.joined.fetch_add(1, std::memory_order_relaxed) >= share.threads) return;
  for (int64_t i; (i = share.taken.fetch_add(1, std::memory_order_relaxed)) < share.units;) share.kernel->run(share.arguments, i);
}

}  // namespace
}  // namespace lamina

// Calls work(data) on each of `size` threads, which may be fewer, and returns when all have (GOMP_parallel of OpenMP).
using Team = void (*)(void (*work)(void*), void* data, unsigned size, unsigned flags);

// Runs operations one after the other on up to `threads` threads of a team.
LAMINA_EXPORT void lamina_run_on(const lamina::Operation* operations, int64_t count, int64_t threads, Team team, int64_t size) {
  using namespace lamina;
  for (int64_t k = 0; k < count; ++k) {
    Share share;
    share.kernel = table().kernels + operations[k].kernel, share.arguments = operations[k].arguments;
    share.units = share.kernel->units(share.arguments), share.threads = threads;
    if (operations[k].serial || share.units < 2 || threads < 2) take_share(&share);
    else team(take_share, &share, unsigned(size), 0);
  }
}

// Runs operations one after the other on this many threads, the caller's among them.
LAMINA_EXPORT void lamina_run(const lamina::Operation* operations, int64_t count, int64_t threads) {
  lamina::the_pool().go(operations, count, threads < 1 ? 1 : threads);
}

// The index of a kernel, and the size of its arguments; -1 if there is none of that name.
LAMINA_EXPORT int64_t lamina_kernel(const char* name, int64_t* bytes) {
  const auto& all = lamina::table();
  for (int64_t i = 0; i < all.count; ++i)
    if (!strcmp(all.kernels[i].name, name)) return *bytes = all.kernels[i].bytes, i;
  return -1;
}
