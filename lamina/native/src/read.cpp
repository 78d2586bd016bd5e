// Reads memory and does next to nothing else: the bandwidth that products are compared with.
#include "products.h"

#include <cstring>

// The sum of the 8-byte words of `bytes` bytes, of which a multiple of 64 is read.
LAMINA_EXPORT uint64_t lamina_read(const void* from, int64_t bytes) {
    const char* at = static_cast<const char*>(from);
    uint64_t sums[8] = {};
    for (int64_t i = 0; i + 64 <= bytes; i += 64) {
        uint64_t words[8];
        std::memcpy(words, at + i, 64);
        for (int k = 0; k < 8; k++) sums[k] += words[k];
    }
    uint64_t total = 0;
    for (uint64_t sum : sums) total += sum;
    return total;
}
