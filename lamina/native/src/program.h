// A program: the operations of one decode step, recorded once and run by several threads.
#pragma once
#include <cstdint>

namespace lamina {

// What a kernel is to the threads: how many pieces of work it has, and how to do some of them.
struct Kernel {
  const char* name;
  int64_t bytes;                       // size of its arguments, compared with what Python packs
  int64_t (*units)(const void*);       // pieces of work, which threads take one by one
  void (*run)(const void*, int64_t);   // does one piece
};

// One operation, as `program.py` packs it.
struct Operation {
  int64_t kernel;         // index into the kernel table
  int64_t serial;         // 1: so little work that one thread does all of it
  const void* arguments;  // the struct of that kernel
};

struct KernelTable {
  const Kernel* kernels;
  int64_t count;
};

KernelTable kernels_baseline();  // each compiled from the same source, for other instructions
#if defined(__x86_64__)
KernelTable kernels_avx2();
KernelTable kernels_avx512();
#endif

}  // namespace lamina
