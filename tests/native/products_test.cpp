// Compares every path of the native products with the reference, on random weights in memory of exactly their size, so
// that the address sanitizer sees reads and writes beyond it. Prints the number of comparisons; returns 1 on a difference.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <initializer_list>
#include <memory>
#include <random>

#include "products.h"

namespace {

std::mt19937 generator(7);

template <class T>
struct Array {  // exactly sized, unlike a vector that has grown
    explicit Array(int64_t size) : size(size), values(new T[size_t(size)]()) {}
    T& operator[](int64_t i) { return values[size_t(i)]; }
    T* data() { return values.get(); }
    int64_t size;
    std::unique_ptr<T[]> values;
};

float uniform() { return std::uniform_real_distribution<float>(-1, 1)(generator); }

uint16_t small_half() { return uint16_t((generator() & 0x83ff) | 0x2000); }  // ±0.0078 … 0.0156

struct Kind {
    int32_t format;
    int values, bytes;
    std::initializer_list<int> halves;  // where a block holds float16 scales
};

const Kind kinds[] = {
    {FORMAT_FLOAT32, 1, 4, {}},          {FORMAT_BFLOAT16, 1, 2, {}},    {FORMAT_FLOAT16, 1, 2, {0}},
    {FORMAT_FP8, 1, 1, {}},              {FORMAT_INT8, 32, 32, {}},      {FORMAT_INT4, 32, 16, {}},
    {FORMAT_Q4_0, 32, 18, {0}},          {FORMAT_Q4_1, 32, 20, {0, 2}},  {FORMAT_Q5_0, 32, 22, {0}},
    {FORMAT_Q5_1, 32, 24, {0, 2}},       {FORMAT_Q8_0, 32, 34, {0}},     {FORMAT_Q2_K, 256, 84, {80, 82}},
    {FORMAT_Q3_K, 256, 110, {108}},      {FORMAT_Q4_K, 256, 144, {0, 2}}, {FORMAT_Q5_K, 256, 176, {0, 2}},
    {FORMAT_Q6_K, 256, 210, {208}},      {FORMAT_IQ4_NL, 32, 18, {0}},   {FORMAT_IQ4_XS, 256, 136, {0}},
    {FORMAT_MXFP4, 32, 17, {}},
};

void fill(const Kind& kind, Array<uint8_t>& codes) {
    for (int64_t i = 0; i < codes.size; i++) codes[i] = uint8_t(generator());
    for (int64_t block = 0; block < codes.size; block += kind.bytes) {
        for (int at : kind.halves) {
            uint16_t half = small_half();
            std::memcpy(codes.data() + block + at, &half, 2);
        }
        if (kind.format == FORMAT_FLOAT32) {
            float value = uniform();
            std::memcpy(codes.data() + block, &value, 4);
        }
        if (kind.format == FORMAT_BFLOAT16) codes[block + 1] = uint8_t((codes[block + 1] & 0x80) | 0x3e);
        if (kind.format == FORMAT_FP8) codes[block] = uint8_t(codes[block] & 0xbf);  // up to 2: no NaN
        if (kind.format == FORMAT_MXFP4) codes[block] = uint8_t(118 + codes[block] % 8);
    }
}

int compared = 0, failed = 0;

// One product on every path. `group` 0: one scale per row.
void compare(const Kind& kind, int64_t out, int64_t in, int64_t rows, int64_t group, int32_t scale_type, bool zeros, int activations) {
    Array<uint8_t> codes(out * (in / kind.values) * kind.bytes);
    fill(kind, codes);
    if (!group) group = in;
    int64_t columns = (in + group - 1) / group;
    Array<uint8_t> scales(out * columns * (scale_type == SCALE_FLOAT32 ? 4 : 2)), zero(out * columns);
    for (int64_t i = 0; i < out * columns; i++) {
        float value = 0.01f * uniform();
        uint16_t half = scale_type == SCALE_FLOAT16 ? small_half() : uint16_t(0x3c00 | (generator() & 0x80ff));
        if (scale_type == SCALE_FLOAT32) std::memcpy(scales.data() + 4 * i, &value, 4);
        else std::memcpy(scales.data() + 2 * i, &half, 2);
        zero[i] = uint8_t(generator() & (kind.format == FORMAT_INT4 ? 15 : 255));
    }
    int64_t x_stride = in + 3, y_stride = out + 2, groups = in / 32;
    Array<float> x((rows - 1) * x_stride + in), y((rows - 1) * y_stride + out), truth((rows - 1) * y_stride + out);
    Array<int8_t> qx(rows * in);
    Array<float> qx_scales(rows * groups);
    Array<int32_t> qx_sums(2 * rows * groups);
    for (int64_t i = 0; i < x.size; i++) x[i] = uniform();
    Product p{};
    p.format = kind.format, p.activations = activations, p.out = out, p.in = in, p.rows = rows, p.group = group;
    p.codes = codes.data(), p.scales = scales.data(), p.zeros = zeros ? zero.data() : nullptr;
    p.x = x.data(), p.x_stride = x_stride, p.y_stride = y_stride, p.scale_type = scale_type;
    p.scale_out = kind.format == FORMAT_FP8 ? 1 : 0;
    Array<float> values(out * in);
    lamina_dequantize(&p, 0, out, values.data());
    int64_t begin = out > 4 ? 1 : 0, middle = (begin + out) / 2;
    for (const char* path : {"reference", "avx2", "avx512", "neon"}) {
        if (lamina_set_isa(path)) continue;
        bool is_reference = !std::strcmp(path, "reference");
        lamina_quantize_rows(x.data(), rows, in, x_stride, qx.data(), qx_scales.data(), qx_sums.data(), 0, rows * groups);
        p.qx = qx.data(), p.qx_scales = qx_scales.data(), p.qx_sums = qx_sums.data();
        Array<float>& to = is_reference ? truth : y;
        p.y = to.data();
        for (int64_t i = 0; i < to.size; i++) to[i] = 77;  // what no product may change
        if (const char* wrong = lamina_product_check(&p)) {
            std::printf("format %d refused: %s\n", kind.format, wrong);
            failed++;
            return;
        }
        lamina_product(&p, begin, middle);
        lamina_product(&p, middle, out);
        for (int64_t r = 0; r < rows && !is_reference; r++) {
            for (int64_t o = 0; o < y_stride && r * y_stride + o < to.size; o++) {
                double size = 0;
                for (int64_t i = 0; i < in && o < out; i++) size += std::fabs(double(values[o * in + i]) * x[r * x_stride + i]);
                bool written = o >= begin && o < out;
                double difference = std::fabs(double(to[r * y_stride + o]) - truth[r * y_stride + o]);
                compared++;
                if (written ? difference <= 3e-5 * size + 1e-6 : to[r * y_stride + o] == 77) continue;
                if (failed++ < 20)
                    std::printf("%s: format %d out %ld in %ld rows %ld group %ld activations %d: y[%ld, %ld] = %g, reference %g\n", path, kind.format,
                                long(out), long(in), long(rows), long(group), activations, long(r), long(o), to[r * y_stride + o], truth[r * y_stride + o]);
            }
        }
    }
}

}  // namespace

int main() {
    for (const Kind& kind : kinds) {
        bool is_float = kind.values == 1, grouped = kind.format == FORMAT_INT8 || kind.format == FORMAT_INT4;
        for (int64_t rows : {1, 2, 5, 7, 17, 39}) {
            for (int activations = 0; activations < (is_float ? 1 : 2); activations++) {
                for (int64_t blocks : {1, 3, 6}) {
                    if (kind.values == 256 && blocks > 3) continue;
                    if (is_float) blocks = blocks * blocks * blocks + 13 * (blocks > 1);  // 1, 40, 229 values
                    int64_t out = rows == 7 ? 18 : rows;
                    compare(kind, out, blocks * kind.values, rows, 0, SCALE_FLOAT32, false, activations);
                    if (!grouped) continue;
                    compare(kind, out, blocks * 32, rows, 32, SCALE_FLOAT16, false, activations);
                    compare(kind, out, blocks * 32, rows, blocks == 6 ? 64 : 32, SCALE_BFLOAT16, true, activations);
                }
                if (kind.format == FORMAT_FP8) compare(kind, 5, 300, rows, 128, SCALE_FLOAT32, false, 0);
            }
        }
    }
    std::printf("%d values compared, %d differ\n", compared, failed);
    return failed || !compared;
}
