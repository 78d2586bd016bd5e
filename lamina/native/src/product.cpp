// The exported functions: checks a Product, and passes it to the path that this machine's instructions allow.
#include <atomic>
#include <cstdio>
#include <cstdlib>
#if defined(__aarch64__) && defined(__linux__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

#include "product_formats.h"

namespace {

struct Named {
    const char* name;
    const ProductPath* path;
};

bool usable(const char* name) {
    if (!std::strcmp(name, "reference")) return true;
#if defined(__x86_64__)
    bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
    if (!std::strcmp(name, "avx2")) return avx2;
    return avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vnni");
#elif defined(__aarch64__) && defined(__linux__)
    return getauxval(AT_HWCAP) & HWCAP_ASIMDDP;
#else
    return true;
#endif
}

// Fastest first.
const Named paths[] = {
#if defined(__x86_64__)
    {"avx512", &product_avx512},
    {"avx2", &product_avx2},
#elif defined(__aarch64__)
    {"neon", &product_neon},
#endif
    {"reference", &product_reference},
};

const Named* named(const char* name) {
    for (const Named& path : paths)
        if (!std::strcmp(path.name, name) && usable(name)) return &path;
    return nullptr;
}

const Named* first_path() {
    const char* wanted = std::getenv("LAMINA_ISA");
    if (wanted && *wanted) {
        if (const Named* path = named(wanted)) return path;
        std::fprintf(stderr, "lamina: LAMINA_ISA=%s is not among the paths of this machine; the fastest one is taken\n", wanted);
    }
    for (const Named& path : paths)
        if (usable(path.name)) return &path;
    return nullptr;
}

std::atomic<const Named*> selected{nullptr};

const Named& current() {
    const Named* path = selected.load(std::memory_order_relaxed);
    if (!path) selected.store(path = first_path(), std::memory_order_relaxed);
    return *path;
}

}  // namespace

const char* lamina_isa() { return current().name; }

int lamina_set_isa(const char* name) {
    const Named* path = named(name);
    if (path) selected.store(path);
    return path ? 0 : -1;
}

int64_t lamina_row_bytes(int32_t format, int64_t in) { return row_bytes(format, in); }

const char* lamina_product_check(const Product* product) {
    const Product& p = *product;
    Layout of = layout(p.format);
    if (!of.values) return "format: not a value of enum Format";
    if (p.out < 0 || p.in <= 0 || p.rows < 0) return "out, in, rows: negative, or in is 0";
    if (p.in % of.values) return "in: not a multiple of the values per block";
    if (p.activations != 0 && p.activations != 1) return "activations: neither 0 (float32) nor 1 (int8)";
    if (p.activations == 1 && is_float_format(p.format)) return "activations: plain and float8 weights need float32";
    if (p.activations == 0 && !p.x) return "x: null, with float32 activations";
    if (p.activations == 1 && (!p.qx || !p.qx_scales || !p.qx_sums)) return "qx, qx_scales, qx_sums: null, with int8 activations";
    if (!p.codes || !p.y) return "codes or y: null";
    if (p.format == FORMAT_INT8 || p.format == FORMAT_INT4 || p.format == FORMAT_FP8) {
        if (!p.scales) return "scales: null";
        if (p.scale_type < SCALE_FLOAT32 || p.scale_type > SCALE_BFLOAT16) return "scale_type: not a value of enum ScaleType";
        if (p.group <= 0) return "group: not positive";
        if (p.format != FORMAT_FP8 && (p.group % 32 || p.in % p.group)) return "group: no multiple of 32 that divides in";
        if (p.format == FORMAT_FP8 && p.group % 32 && p.group < p.in) return "group: of float8, neither a multiple of 32 nor all inputs";
        if (p.scale_out < 0) return "scale_out: negative";
    }
    return nullptr;
}

void lamina_product(const Product* product, int64_t begin, int64_t end) {
    if (begin < end && product->rows > 0) current().path->product(*product, begin, end);
}

void lamina_quantize_rows(const float* x, int64_t, int64_t in, int64_t x_stride, int8_t* codes, float* scales,
                          int32_t* sums, int64_t begin_group, int64_t end_group) {
    const ProductPath& path = *current().path;
    int64_t groups = in / 32;
    for (int64_t g = begin_group; g < end_group; g++) {
        path.quantize(x + g / groups * x_stride + g % groups * 32, codes + 32 * g, scales + g, sums + 2 * g);
    }
}
