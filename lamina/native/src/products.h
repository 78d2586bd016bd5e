// Products y = x Wᵀ with weights as files store them: plain floats, GGUF blocks, integer groups, float8.
//
// A caller fills a Product, checks it once with lamina_product_check, and calls lamina_product from several threads on
// disjoint ranges of outputs. Which instructions are used is decided at run time (lamina_isa, LAMINA_ISA).
#pragma once
#include <cstdint>

#define LAMINA_EXPORT extern "C" __attribute__((visibility("default")))

enum Format : int32_t {
    FORMAT_FLOAT32 = 0,
    FORMAT_BFLOAT16 = 1,
    FORMAT_FLOAT16 = 2,
    // codes: float8_e4m3fn [out, in]. One scale (float32 by default) for every `scale_out` outputs × `group` inputs.
    // The two NaN codes read as ±480.
    FORMAT_FP8 = 3,
    // codes [out, in * bits / 8], scales [out, in / group] of type scale_type, zeros uint8 [out, in / group] or null.
    // value = scale * (code - zero). Without zeros, codes of 8 bits are signed and codes of 4 bits have the zero 8.
    // 4 bits: of each 32 values, byte i holds value i in its low bits and value i + 16 in its high bits.
    FORMAT_INT8 = 4,
    FORMAT_INT4 = 5,
    // codes: rows of GGUF blocks, exactly the file's bytes.
    FORMAT_Q4_0 = 10,
    FORMAT_Q4_1 = 11,
    FORMAT_Q5_0 = 12,
    FORMAT_Q5_1 = 13,
    FORMAT_Q8_0 = 14,
    FORMAT_Q2_K = 15,
    FORMAT_Q3_K = 16,
    FORMAT_Q4_K = 17,
    FORMAT_Q5_K = 18,
    FORMAT_Q6_K = 19,
    FORMAT_IQ4_NL = 20,
    FORMAT_IQ4_XS = 21,
    FORMAT_MXFP4 = 22,
};

enum ScaleType : int32_t { SCALE_FLOAT32 = 0, SCALE_FLOAT16 = 1, SCALE_BFLOAT16 = 2 };

struct Product {          // one weight (or one segment of rows) times `rows` vectors
    int32_t format;       // enum Format
    int32_t activations;  // 0: float32, 1: int8 in groups of 32 (packed integer formats only: GGUF, INT8, INT4)
    int64_t out, in, rows, group;  // group: inputs that share a scale (INT8, INT4, FP8)
    const void *codes, *scales, *zeros;
    const float* x;  // [rows, in], when activations == 0
    int64_t x_stride;
    const int8_t* qx;        // [rows, in], when activations == 1: codes -127 … 127
    const float* qx_scales;  // [rows, in / 32]
    const int32_t* qx_sums;  // [rows, in / 16], the sums of 16 codes each
    float* y;                // [rows, out]
    int64_t y_stride;
    // Fields added to the first version of the interface; zero gives its meaning.
    int32_t scale_type;  // enum ScaleType, of `scales`
    int64_t scale_out;   // FP8: outputs that share a scale; 0: all of them
};

// Null if the product can be computed, else what is wrong with it.
LAMINA_EXPORT const char* lamina_product_check(const Product* product);

// Computes outputs begin..end of every row.
LAMINA_EXPORT void lamina_product(const Product* product, int64_t begin, int64_t end);

// Rows begin..end of the weight as float32 [end - begin, in], for embeddings and for tests.
LAMINA_EXPORT void lamina_dequantize(const Product* product, int64_t begin, int64_t end, float* values);

// Quantizes groups of 32 values to int8: group g of row r for begin_group <= r * (in / 32) + g < end_group.
LAMINA_EXPORT void lamina_quantize_rows(const float* x, int64_t rows, int64_t in, int64_t x_stride, int8_t* codes,
                                        float* scales, int32_t* sums, int64_t begin_group, int64_t end_group);

// Bytes of one row of codes of `in` inputs.
LAMINA_EXPORT int64_t lamina_row_bytes(int32_t format, int64_t in);

// "reference", "avx2", "avx512" or "neon": the path that products take.
LAMINA_EXPORT const char* lamina_isa();

// Takes another path from now on; returns 0, or -1 if this machine cannot (nothing changes then).
LAMINA_EXPORT int lamina_set_isa(const char* name);

// The implementations that lamina_isa selects among.
struct ProductPath {
    void (*product)(const Product&, int64_t begin, int64_t end);
    void (*quantize)(const float* x, int8_t* codes, float* scale, int32_t* sums);  // one group: sums of its two halves
};
extern const ProductPath product_reference, product_avx2, product_avx512, product_neon;
