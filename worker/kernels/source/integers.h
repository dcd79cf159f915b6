// Products of 8 bits in sixteen columns, summed exactly in integers: every build has the same bits.
#pragma once
#include "vectors.h"

enum { QUAD = 4, QUADS_BYTES = QUAD * LANES };  // neighbours along the depth in a lane; bytes of all lanes

// Of `quads`, each lane has four weights. `add_small` takes weights from 0 to 15, up to 32 times; `add_narrow` two quads
// from 0 to 63; `add_signed` any of 8 bits, each of them SIGNED_SHIFT * 32 larger. Sums begin with `everywhere`, and end as
// floats.
#if defined(__AVX512VNNI__)
enum { MOST_INTEGER_ROWS = 8 };
typedef __m512i quads;
typedef __m512i sums_of_eight_bits;
INLINE quads quads_load(const uint8_t *from) { return _mm512_loadu_si512(from); }
INLINE quads quads_low(quads a) { return _mm512_and_si512(a, _mm512_set1_epi8(15)); }
INLINE quads quads_high(quads a) { return quads_low(_mm512_srli_epi16(a, 4)); }
INLINE quads quads_lookup(quads a, const int8_t *table) {
    return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(_mm_loadu_si128((const void *)table)), a);
}
INLINE __m512i quad_of_row(const int8_t *row) {
    int32_t four;
    memcpy(&four, row, sizeof four);
    return _mm512_set1_epi32(four);
}
INLINE sums_of_eight_bits everywhere(int32_t number) { return _mm512_set1_epi32(number); }
INLINE sums_of_eight_bits add_small(sums_of_eight_bits sums, quads weights, const int8_t *row) {
    return _mm512_dpbusd_epi32(sums, weights, quad_of_row(row));
}
INLINE vec small_end(sums_of_eight_bits sums) { return _mm512_cvtepi32_ps(sums); }
INLINE sums_of_eight_bits add_narrow(sums_of_eight_bits sums, quads first, quads second, const int8_t *row) {
    return add_small(add_small(sums, first, row), second, row + QUAD);
}
enum { SIGNED_SHIFT = 4 };  // the instruction takes weights without sign
INLINE quads signed_weights(quads weights) { return _mm512_xor_si512(weights, _mm512_set1_epi8((char)0x80)); }
INLINE sums_of_eight_bits add_signed(sums_of_eight_bits sums, quads weights, const int8_t *row) {
    return add_small(sums, weights, row);
}
INLINE vec signed_end(sums_of_eight_bits sums) { return small_end(sums); }

#elif defined(__AVX2__)
enum { MOST_INTEGER_ROWS = 4 };
typedef struct { __m256i low, high; } quads;
typedef quads sums_of_eight_bits;
INLINE quads quads_load(const uint8_t *from) {
    return (quads){_mm256_loadu_si256((const void *)from), _mm256_loadu_si256((const void *)(from + 32))};
}
INLINE quads quads_low(quads a) {
    __m256i mask = _mm256_set1_epi8(15);
    return (quads){_mm256_and_si256(a.low, mask), _mm256_and_si256(a.high, mask)};
}
INLINE quads quads_high(quads a) {
    return quads_low((quads){_mm256_srli_epi16(a.low, 4), _mm256_srli_epi16(a.high, 4)});
}
INLINE quads quads_lookup(quads a, const int8_t *table) {
    __m256i both = _mm256_broadcastsi128_si256(_mm_loadu_si128((const void *)table));
    return (quads){_mm256_shuffle_epi8(both, a.low), _mm256_shuffle_epi8(both, a.high)};
}
INLINE __m256i quad_of_row(const int8_t *row) {
    int32_t four;
    memcpy(&four, row, sizeof four);
    return _mm256_set1_epi32(four);
}
INLINE sums_of_eight_bits everywhere(int32_t number) {
    return (quads){_mm256_set1_epi32(number), _mm256_set1_epi32(number)};
}
// In 16 bits: 8 additions of at most 2 * 15 * 127.
INLINE sums_of_eight_bits add_small(sums_of_eight_bits sums, quads weights, const int8_t *row) {
    __m256i four = quad_of_row(row);
    return (quads){_mm256_add_epi16(sums.low, _mm256_maddubs_epi16(weights.low, four)),
                   _mm256_add_epi16(sums.high, _mm256_maddubs_epi16(weights.high, four))};
}
INLINE vec floats_of(sums_of_eight_bits sums) {
#if defined(__AVX512F__)
    return _mm512_cvtepi32_ps(_mm512_inserti64x4(_mm512_castsi256_si512(sums.low), sums.high, 1));
#else
    return (vec){_mm256_cvtepi32_ps(sums.low), _mm256_cvtepi32_ps(sums.high)};
#endif
}
INLINE vec small_end(sums_of_eight_bits sums) {
    __m256i ones = _mm256_set1_epi16(1);
    return floats_of((quads){_mm256_madd_epi16(sums.low, ones), _mm256_madd_epi16(sums.high, ones)});
}
// In 16 bits: two additions of at most 2 * 63 * 127.
INLINE __m256i half_narrow(__m256i sums, __m256i first, __m256i second, __m256i four, __m256i next) {
    __m256i pairs = _mm256_add_epi16(_mm256_maddubs_epi16(first, four), _mm256_maddubs_epi16(second, next));
    return _mm256_add_epi32(sums, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}
INLINE sums_of_eight_bits add_narrow(sums_of_eight_bits sums, quads first, quads second, const int8_t *row) {
    __m256i four = quad_of_row(row), next = quad_of_row(row + QUAD);
    return (quads){half_narrow(sums.low, first.low, second.low, four, next),
                   half_narrow(sums.high, first.high, second.high, four, next)};
}
enum { SIGNED_SHIFT = 0 };
INLINE quads signed_weights(quads weights) { return weights; }
// Two products of at most 128 * 127 fit in 16 bits.
INLINE __m256i half_signed(__m256i sums, __m256i weights, __m256i four) {
    __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(weights), _mm256_sign_epi8(four, weights));
    return _mm256_add_epi32(sums, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}
INLINE sums_of_eight_bits add_signed(sums_of_eight_bits sums, quads weights, const int8_t *row) {
    __m256i four = quad_of_row(row);
    return (quads){half_signed(sums.low, weights.low, four), half_signed(sums.high, weights.high, four)};
}
INLINE vec signed_end(sums_of_eight_bits sums) { return floats_of(sums); }

#else
enum { MOST_INTEGER_ROWS = 4 };
typedef struct { int8_t number[QUADS_BYTES]; } quads;
typedef struct { int32_t lane[LANES]; } sums_of_eight_bits;
INLINE quads quads_load(const uint8_t *from) { quads a; memcpy(&a, from, sizeof a); return a; }
INLINE quads quads_low(quads a) {
    for (int i = 0; i < QUADS_BYTES; i++) a.number[i] &= 15;
    return a;
}
INLINE quads quads_high(quads a) {
    for (int i = 0; i < QUADS_BYTES; i++) a.number[i] = (int8_t)((uint8_t)a.number[i] >> 4);
    return a;
}
INLINE quads quads_lookup(quads a, const int8_t *table) {
    for (int i = 0; i < QUADS_BYTES; i++) a.number[i] = table[a.number[i]];
    return a;
}
INLINE sums_of_eight_bits everywhere(int32_t number) {
    sums_of_eight_bits sums;
    for (int i = 0; i < LANES; i++) sums.lane[i] = number;
    return sums;
}
INLINE sums_of_eight_bits add_small(sums_of_eight_bits sums, quads weights, const int8_t *row) {
    for (int i = 0; i < LANES; i++)
        for (int j = 0; j < QUAD; j++) sums.lane[i] += weights.number[QUAD * i + j] * row[j];
    return sums;
}
INLINE vec small_end(sums_of_eight_bits sums) {
    float lanes[LANES];
    for (int i = 0; i < LANES; i++) lanes[i] = (float)sums.lane[i];
    return vec_load(lanes);
}
INLINE sums_of_eight_bits add_narrow(sums_of_eight_bits sums, quads first, quads second, const int8_t *row) {
    return add_small(add_small(sums, first, row), second, row + QUAD);
}
enum { SIGNED_SHIFT = 0 };
INLINE quads signed_weights(quads weights) { return weights; }
INLINE sums_of_eight_bits add_signed(sums_of_eight_bits sums, quads weights, const int8_t *row) {
    return add_small(sums, weights, row);
}
INLINE vec signed_end(sums_of_eight_bits sums) { return small_end(sums); }
#endif
