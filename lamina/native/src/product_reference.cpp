// The reference: every format decoded value by value, in plain C++. Faster paths are compared with it.
#include <cmath>
#include <vector>

#include "product_formats.h"

namespace {

// 32 values of a row: value i = scale[i / 16] * code[i] + min[i / 16].
struct Group {
    int code[32];
    float scale[2], min[2];
};

void set_scale(Group& to, float scale, float min) {
    to.scale[0] = to.scale[1] = scale;
    to.min[0] = to.min[1] = min;
}

void subtract(int zero, int code[32]) {
    for (int i = 0; i < 32; i++) code[i] -= zero;
}

void nibbles(const uint8_t* at, int code[32]) {
    for (int i = 0; i < 16; i++) {
        code[i] = at[i] & 15;
        code[i + 16] = at[i] >> 4;
    }
}

void fifth_bits(uint32_t bits, int code[32]) {
    for (int i = 0; i < 32; i++) code[i] |= int(bits >> i & 1) << 4;
}

void look_up(const int8_t table[16], int code[32]) {
    for (int i = 0; i < 32; i++) code[i] = table[code[i]];
}

float half_at(const uint8_t* at) { return from_half(read<uint16_t>(at)); }

// Group g (of 8) of a block of 256 values.
void decode_k(int32_t format, const uint8_t* block, int g, Group& to) {
    int quarter = g % 4, eighth = g / 4;  // two halves of 128 values, of four groups of 32
    switch (format) {
        case FORMAT_Q2_K: {  // scales[16], 2-bit codes[64], d, dmin
            float d = half_at(block + 80), dmin = half_at(block + 82);
            for (int i = 0; i < 32; i++) to.code[i] = block[16 + 32 * eighth + i] >> 2 * quarter & 3;
            for (int h = 0; h < 2; h++) {
                to.scale[h] = d * float(block[2 * g + h] & 15);
                to.min[h] = -dmin * float(block[2 * g + h] >> 4);
            }
            break;
        }
        case FORMAT_Q3_K: {  // high bits[32] (set: no offset), 2-bit codes[64], scales[12], d
            uint64_t scales[2];
            q3_scales(block + 96, scales);
            float d = half_at(block + 108);
            for (int i = 0; i < 32; i++) {
                int low = block[32 + 32 * eighth + i] >> 2 * quarter & 3;
                to.code[i] = low - (block[i] >> g & 1 ? 0 : 4);
            }
            for (int h = 0; h < 2; h++) {
                to.scale[h] = d * float(int(scales[g / 4] >> 8 * (2 * g % 8 + h) & 63) - 32);
                to.min[h] = 0;
            }
            break;
        }
        case FORMAT_Q4_K:    // d, dmin, scales[12], 4-bit codes[128]
        case FORMAT_Q5_K: {  // d, dmin, scales[12], high bits[32], 4-bit codes[128]
            uint64_t scales, mins;
            k_scales(block + 4, &scales, &mins);
            bool five = format == FORMAT_Q5_K;
            const uint8_t *high = block + 16, *low = block + (five ? 48 : 16) + g / 2 * 32;
            for (int i = 0; i < 32; i++) {
                to.code[i] = low[i] >> 4 * (g % 2) & 15;
                if (five) to.code[i] |= (high[i] >> g & 1) << 4;
            }
            set_scale(to, half_at(block) * float(scales >> 8 * g & 63), -(half_at(block + 2) * float(mins >> 8 * g & 63)));
            break;
        }
        case FORMAT_Q6_K: {  // 4 low bits[128], 2 high bits[64], int8 scales[16], d
            const uint8_t *low = block + 64 * eighth + 32 * (quarter % 2), *high = block + 128 + 32 * eighth;
            for (int i = 0; i < 32; i++) {
                to.code[i] = ((low[i] >> 4 * (quarter / 2) & 15) | (high[i] >> 2 * quarter & 3) << 4) - 32;
            }
            for (int h = 0; h < 2; h++) {
                to.scale[h] = half_at(block + 208) * float(int8_t(block[192 + 2 * g + h]));
                to.min[h] = 0;
            }
            break;
        }
        case FORMAT_IQ4_XS: {  // d, 2 high bits of 8 scales, 4 low bits[4], codes[128]
            nibbles(block + 8 + 16 * g, to.code);
            look_up(iq4_table, to.code);
            int scale = (block[4 + g / 2] >> 4 * (g % 2) & 15) | (read<uint16_t>(block + 2) >> 2 * g & 3) << 4;
            set_scale(to, half_at(block) * float(scale - 32), 0);
            break;
        }
    }
}

void decode_32(int32_t format, const uint8_t* block, Group& to) {
    switch (format) {
        case FORMAT_Q4_0:
            nibbles(block + 2, to.code);
            subtract(8, to.code);
            set_scale(to, half_at(block), 0);
            break;
        case FORMAT_Q4_1:
            nibbles(block + 4, to.code);
            set_scale(to, half_at(block), half_at(block + 2));
            break;
        case FORMAT_Q5_0:
            nibbles(block + 6, to.code);
            fifth_bits(read<uint32_t>(block + 2), to.code);
            subtract(16, to.code);
            set_scale(to, half_at(block), 0);
            break;
        case FORMAT_Q5_1:
            nibbles(block + 8, to.code);
            fifth_bits(read<uint32_t>(block + 4), to.code);
            set_scale(to, half_at(block), half_at(block + 2));
            break;
        case FORMAT_Q8_0:
            for (int i = 0; i < 32; i++) to.code[i] = int8_t(block[2 + i]);
            set_scale(to, half_at(block), 0);
            break;
        case FORMAT_IQ4_NL:
            nibbles(block + 2, to.code);
            look_up(iq4_table, to.code);
            set_scale(to, half_at(block), 0);
            break;
        case FORMAT_MXFP4:
            nibbles(block + 1, to.code);
            look_up(mxfp4_table, to.code);
            set_scale(to, from_e8m0_half(block[0]), 0);
            break;
    }
}

void decode_groups(const Product& p, int64_t output, int64_t g, Group& to) {
    const uint8_t* row = static_cast<const uint8_t*>(p.codes) + output * row_bytes(p.format, p.in);
    if (p.format == FORMAT_INT8) {
        for (int i = 0; i < 32; i++) to.code[i] = p.zeros ? row[32 * g + i] : int8_t(row[32 * g + i]);
    } else {
        nibbles(row + 16 * g, to.code);
    }
    int64_t at = output * (p.in / p.group) + 32 * g / p.group;
    subtract(p.zeros ? static_cast<const uint8_t*>(p.zeros)[at] : p.format == FORMAT_INT4 ? 8 : 0, to.code);
    set_scale(to, read_scale(p.scales, p.scale_type, at), 0);
}

void decode(const Product& p, int64_t output, int64_t g, Group& to) {
    if (p.format == FORMAT_INT8 || p.format == FORMAT_INT4) return decode_groups(p, output, g, to);
    const uint8_t* row = static_cast<const uint8_t*>(p.codes) + output * row_bytes(p.format, p.in);
    Layout of = layout(p.format);
    if (of.values == 32) return decode_32(p.format, row + g * of.bytes, to);
    decode_k(p.format, row + g / 8 * of.bytes, int(g % 8), to);
}

float plain_value(const Product& p, int64_t output, int64_t i) {
    int64_t at = output * p.in + i;
    switch (p.format) {
        case FORMAT_FLOAT32: return static_cast<const float*>(p.codes)[at];
        case FORMAT_BFLOAT16: return from_bfloat16(static_cast<const uint16_t*>(p.codes)[at]);
        case FORMAT_FLOAT16: return from_half(static_cast<const uint16_t*>(p.codes)[at]);
    }
    int64_t rows = p.scale_out ? p.scale_out : p.out, columns = (p.in + p.group - 1) / p.group;
    float scale = read_scale(p.scales, p.scale_type, output / rows * columns + i / p.group);
    return from_e4m3(static_cast<const uint8_t*>(p.codes)[at]) * scale;
}

double dot_int8(const Product& p, int64_t output, int64_t r) {
    double total = 0;
    Group w;
    for (int64_t g = 0; g < p.in / 32; g++) {
        decode(p, output, g, w);
        const int8_t* x = p.qx + r * p.in + 32 * g;
        for (int h = 0; h < 2; h++) {
            int products = 0, sum = 0;
            for (int i = 16 * h; i < 16 * h + 16; i++) {
                products += w.code[i] * x[i];
                sum += x[i];
            }
            total += double(p.qx_scales[r * (p.in / 32) + g]) * (double(w.scale[h]) * products + double(w.min[h]) * sum);
        }
    }
    return total;
}

void product(const Product& p, int64_t begin, int64_t end) {
    std::vector<float> row(size_t(p.in));
    for (int64_t output = begin; output < end; output++) {
        if (p.activations == 0) lamina_dequantize(&p, output, output + 1, row.data());
        for (int64_t r = 0; r < p.rows; r++) {
            double total = 0;
            if (p.activations == 1) {
                total = dot_int8(p, output, r);
            } else {
                for (int64_t i = 0; i < p.in; i++) total += double(row[size_t(i)]) * double(p.x[r * p.x_stride + i]);
            }
            p.y[r * p.y_stride + output] = float(total);
        }
    }
}

void quantize(const float* x, int8_t* codes, float* scale, int32_t* sums) {
    float largest = 0;
    bool finite = true;
    for (int i = 0; i < 32; i++) {
        largest = std::fmax(largest, std::fabs(x[i]));
        finite &= std::isfinite(x[i]);
    }
    *scale = finite ? largest / 127 : NAN;  // the product of a group with a NaN or an infinity is NaN
    float inverse = finite && largest > 1e-30f ? 127 / largest : 0;
    sums[0] = sums[1] = 0;
    for (int i = 0; i < 32; i++) {
        codes[i] = finite ? int8_t(std::nearbyint(x[i] * inverse)) : int8_t(0);
        sums[i / 16] += codes[i];
    }
}

}  // namespace

void lamina_dequantize(const Product* product, int64_t begin, int64_t end, float* values) {
    const Product& p = *product;
    for (int64_t output = begin; output < end; output++, values += p.in) {
        if (is_float_format(p.format)) {
            for (int64_t i = 0; i < p.in; i++) values[i] = plain_value(p, output, i);
            continue;
        }
        Group w;
        for (int64_t g = 0; g < p.in / 32; g++) {
            decode(p, output, g, w);
            for (int i = 0; i < 32; i++) values[32 * g + i] = w.scale[i / 16] * float(w.code[i]) + w.min[i / 16];
        }
    }
}

extern const ProductPath product_reference = {product, quantize};
