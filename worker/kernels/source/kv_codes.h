// Keys and values in 8 bits: a row has one code per dimension, then a float scale. It represents its codes' numbers
// times the scale, rounded once to the call's element: the same numbers for every reader.
#pragma once
#include "elementwise.h"

// How the rows of a cache are stored.
typedef struct {
    kv_code code;
    element element;
    int head_dim;
} kv_form;

#define MOST_E4M3 448.0f
enum { MOST_INT8 = 127, E4M3_BIAS = 7, FLOAT_BIAS = 127, E4M3_SHIFT = 20 };  // fractions of 3 and 23 bits

INLINE int element_bytes_of(element element) { return element == BF16 ? 2 : 4; }
// Bytes of the unit of strides: an element, or a code.
INLINE int kv_unit(kv_form form) { return form.code == KV_PLAIN ? element_bytes_of(form.element) : 1; }
INLINE long kv_row_bytes(kv_form form) {
    return form.code == KV_PLAIN ? (long)form.head_dim * element_bytes_of(form.element) : form.head_dim + (long)sizeof(float);
}

// ---- to codes

INLINE uint32_t float_bits(float a) { uint32_t bits; memcpy(&bits, &a, sizeof bits); return bits; }
INLINE float bits_float(uint32_t bits) { float a; memcpy(&a, &bits, sizeof a); return a; }

INLINE uint8_t int8_code(float a) {
    a = a > MOST_INT8 ? MOST_INT8 : a < -MOST_INT8 ? -MOST_INT8 : a;
    return (uint8_t)float_bits(a + ROUNDER);
}

// Rounds to nearest even. Numbers below the smallest exponent are spaced as with it.
INLINE uint8_t e4m3_code(float a) {
    uint32_t bits = float_bits(a), sign = bits >> 24 & 0x80, size = bits & 0x7fffffff;
    uint32_t normal = size + ((1u << (E4M3_SHIFT - 1)) - 1) + (size >> E4M3_SHIFT & 1);
    normal = (normal >> E4M3_SHIFT) - ((FLOAT_BIAS - E4M3_BIAS) << 3);
    uint32_t small = float_bits(bits_float(size) * 512.0f + ROUNDER) & 0xff;
    uint32_t code = size < (uint32_t)(FLOAT_BIAS - E4M3_BIAS + 1) << 23 ? small : normal;
    return (uint8_t)(sign | (code < 0x7e ? code : 0x7e));
}

// A row with NaN or infinity gets zero codes and a scale that makes them NaN.
static inline void kv_code_row(kv_form form, const float *from, uint8_t *to) {
    uint32_t most = 0;
    for (int d = 0; d < form.head_dim; d++) {
        uint32_t size = float_bits(from[d]) & 0x7fffffff;
        most = size > most ? size : most;
    }
    float scale = bits_float(most) / (form.code == KV_INT8 ? (float)MOST_INT8 : MOST_E4M3);
    memcpy(to + form.head_dim, &scale, sizeof scale);
    if (!(scale > 0.0f && scale <= 3.4e38f)) memset(to, 0, (size_t)form.head_dim);
    else if (form.code == KV_INT8)
        for (int d = 0; d < form.head_dim; d++) to[d] = int8_code(from[d] / scale);
    else
        for (int d = 0; d < form.head_dim; d++) to[d] = e4m3_code(from[d] / scale);
}

// Stores a key or a value.
static inline void kv_store(kv_form form, const float *from, void *to) {
    if (form.code == KV_PLAIN) store(form.element, from, form.head_dim, to);
    else kv_code_row(form, from, to);
}

// ---- to numbers

#if defined(__AVX512F__)
#define E4M3_RISE 256.0f  // factor from `kv_numbers` to the codes' numbers

// An e4m3 is a half with a shorter fraction, 2^8 smaller through its exponent's offset.
INLINE vec kv_numbers(const kv_code code, const uint8_t *from) {
    __m128i codes = _mm_loadu_si128((const void *)from);
    if (code == KV_INT8) return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(codes));
    __m256i wide = _mm256_slli_epi16(_mm256_cvtepi8_epi16(codes), 7);
    return _mm512_cvtph_ps(_mm256_and_si256(wide, _mm256_set1_epi16((short)0xbfff)));
}

#elif defined(__AVX2__)
#define E4M3_RISE 0x1p120f

// Moves exponent and fraction of an e4m3 into place in a float, whose exponents begin 120 lower.
INLINE __m256 half_kv_numbers(const kv_code code, const uint8_t *from) {
    __m256i codes = _mm256_cvtepi8_epi32(_mm_loadl_epi64((const void *)from));
    if (code == KV_INT8) return _mm256_cvtepi32_ps(codes);
    __m256i size = _mm256_slli_epi32(_mm256_and_si256(codes, _mm256_set1_epi32(0x7f)), E4M3_SHIFT);
    __m256i sign = _mm256_and_si256(codes, _mm256_set1_epi32((int)0x80000000));
    return _mm256_castsi256_ps(_mm256_or_si256(size, sign));
}
INLINE vec kv_numbers(const kv_code code, const uint8_t *from) {
    return (vec){half_kv_numbers(code, from), half_kv_numbers(code, from + 8)};
}

#else
#define E4M3_RISE 0x1p120f

INLINE vec kv_numbers(const kv_code code, const uint8_t *from) {
    float numbers[LANES];
    for (int i = 0; i < LANES; i++)
        numbers[i] = code == KV_INT8 ? (float)(int8_t)from[i]
                                     : bits_float((uint32_t)(from[i] & 0x80) << 24 | (uint32_t)(from[i] & 0x7f) << E4M3_SHIFT);
    return vec_load(numbers);
}
#endif

// The scale of a row of codes, as `kv_coded` takes it.
INLINE float kv_scale(kv_form form, const uint8_t *row) {
    float scale;
    memcpy(&scale, row + form.head_dim, sizeof scale);
    return scale;
}

// Sixteen unrounded numbers of codes. An e4m3 is exact before scaling.
INLINE vec kv_coded(const kv_code code, const uint8_t *from, float scale) {
    vec numbers = kv_numbers(code, from);
    if (code != KV_INT8) numbers = vec_mul(numbers, vec_set(E4M3_RISE));
    return vec_mul(numbers, vec_set(scale));
}

// Sixteen numbers of a row from `first` on.
INLINE vec kv_load(const kv_code code, kv_form form, const char *row, int first) {
    if (code == KV_PLAIN)
        return form.element == BF16 ? vec_load_bf16((const bf16 *)row + first) : vec_load((const float *)row + first);
    const uint8_t *codes = (const uint8_t *)row;
    return rounded(form.element == BF16, kv_coded(code, codes + first, kv_scale(form, codes)));
}

INLINE void kv_widen_row(const kv_code code, kv_form form, const uint8_t *row, char *to) {
    float scale = kv_scale(form, row);
    for (int d = 0; d < form.head_dim; d += LANES) {
        vec numbers = kv_coded(code, row + d, scale);
        if (form.element == BF16) vec_store_bf16((bf16 *)to + d, numbers);
        else vec_store((float *)to + d, numbers);
    }
}

// Converts rows of codes to elements, one after the other.
static inline void kv_widen(kv_form form, const char *const *rows, int count, char *to) {
    long bytes = (long)form.head_dim * element_bytes_of(form.element);
    for (int i = 0; i < count; i++) {
        if (form.code == KV_INT8) kv_widen_row(KV_INT8, form, (const uint8_t *)rows[i], to + i * bytes);
        else kv_widen_row(KV_E4M3, form, (const uint8_t *)rows[i], to + i * bytes);
    }
}

// Reads a row as floats.
static inline void kv_read(kv_form form, const char *row, float *to) {
    for (int d = 0; d < form.head_dim; d += LANES) {
        vec numbers = form.code == KV_PLAIN  ? kv_load(KV_PLAIN, form, row, d)
                      : form.code == KV_INT8 ? kv_load(KV_INT8, form, row, d)
                                             : kv_load(KV_E4M3, form, row, d);
        vec_store(to + d, numbers);
    }
}
