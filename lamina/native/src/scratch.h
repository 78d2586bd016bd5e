// Memory of one thread that grows as needed, aligned for every register.
#pragma once
#include <cstdint>
#include <cstdlib>
#include <new>

namespace {

class Scratch {
  public:
    ~Scratch() { std::free(memory); }
    template <class T>
    T* take(int64_t count) {  // after reset(): the next `count` elements
        T* taken = reinterpret_cast<T*>(memory + used);
        used += (count * int64_t(sizeof(T)) + 63) / 64 * 64;
        return taken;
    }
    void reset(int64_t bytes) {
        used = 0;
        if (bytes <= size) return;
        std::free(memory);
        size = (bytes + 4095) / 4096 * 4096;
        memory = static_cast<char*>(std::aligned_alloc(64, size_t(size)));
        if (!memory) {
            size = 0;
            throw std::bad_alloc();
        }
    }

  private:
    char* memory = nullptr;
    int64_t size = 0, used = 0;
};

}  // namespace
