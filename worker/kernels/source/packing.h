// Transposes sixteen rows to columns, as products take them.
#pragma once
#include "vectors.h"

// out[word][lane] = rows[lane][word], words of four bytes; `words` is a multiple of eight.
static inline void transpose(const char *const rows[LANES], int words, uint32_t *out);

#if defined(__AVX512F__)
INLINE void transpose_registers(__m512i r[16]) {
    __m512i t[16];
    for (int i = 0; i < 16; i += 2) {
        t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
        t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
    }
    for (int i = 0; i < 16; i += 4) {
        r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
        r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
        r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
        r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
    }
    for (int i = 0; i < 4; i++) {
        t[i] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0x88);
        t[i + 4] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0x88);
        t[i + 8] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0xdd);
        t[i + 12] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0xdd);
    }
    for (int i = 0; i < 4; i++) {
        r[i] = _mm512_shuffle_i32x4(t[i], t[i + 4], 0x88);
        r[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 4], 0xdd);
        r[i + 4] = _mm512_shuffle_i32x4(t[i + 8], t[i + 12], 0x88);
        r[i + 12] = _mm512_shuffle_i32x4(t[i + 8], t[i + 12], 0xdd);
    }
}

static inline void transpose(const char *const rows[LANES], int words, uint32_t *out) {
    for (int word = 0; word < words; word += 16) {
        int left = words - word < 16 ? words - word : 16;
        __mmask16 is_there = (__mmask16)((1u << left) - 1);
        __m512i r[16];
        for (int i = 0; i < 16; i++) r[i] = _mm512_maskz_loadu_epi32(is_there, rows[i] + 4 * word);
        transpose_registers(r);
        for (int i = 0; i < 8; i++) _mm512_storeu_si512(out + (word + i) * LANES, r[i]);
        for (int i = 8; i < 16 && left > 8; i++) _mm512_storeu_si512(out + (word + i) * LANES, r[i]);
    }
}

#elif defined(__AVX2__)
INLINE void transpose_eight(const char *const *rows, long offset, uint32_t *out) {
    __m256 r[8], t[8];
    for (int i = 0; i < 8; i++) r[i] = _mm256_loadu_ps((const float *)(rows[i] + offset));
    for (int i = 0; i < 8; i += 2) {
        t[i] = _mm256_unpacklo_ps(r[i], r[i + 1]);
        t[i + 1] = _mm256_unpackhi_ps(r[i], r[i + 1]);
    }
    for (int i = 0; i < 8; i += 4) {
        r[i] = _mm256_shuffle_ps(t[i], t[i + 2], 0x44);
        r[i + 1] = _mm256_shuffle_ps(t[i], t[i + 2], 0xee);
        r[i + 2] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0x44);
        r[i + 3] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0xee);
    }
    for (int i = 0; i < 4; i++) {
        _mm256_storeu_ps((float *)(out + i * LANES), _mm256_permute2f128_ps(r[i], r[i + 4], 0x20));
        _mm256_storeu_ps((float *)(out + (i + 4) * LANES), _mm256_permute2f128_ps(r[i], r[i + 4], 0x31));
    }
}

static inline void transpose(const char *const rows[LANES], int words, uint32_t *out) {
    for (int word = 0; word < words; word += 8)
        for (int half = 0; half < LANES; half += 8) transpose_eight(rows + half, 4L * word, out + word * LANES + half);
}

#else
static inline void transpose(const char *const rows[LANES], int words, uint32_t *out) {
    for (int word = 0; word < words; word++)
        for (int i = 0; i < LANES; i++) memcpy(out + word * LANES + i, rows[i] + 4 * word, 4);
}
#endif

// Interleaves two rows of bf16: out[i] = (first[i], second[i]); `count` is a multiple of sixteen.
INLINE void interleave(const bf16 *first, const bf16 *second, int count, bf16 *out) {
    for (int i = 0; i < count; i += LANES) {
#if defined(__AVX512F__)
        __m512i low = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const void *)(first + i)));
        __m512i high = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const void *)(second + i)));
        _mm512_storeu_si512(out + 2 * i, _mm512_or_si512(low, _mm512_slli_epi32(high, 16)));
#else
        for (int j = i; j < i + LANES; j++) out[2 * j] = first[j], out[2 * j + 1] = second[j];
#endif
    }
}
