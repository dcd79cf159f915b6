// Scores of a chunk's keys for a query: sums of looked-up numbers, one per nibble of the code.
#pragma once
#include "scan.h"

enum { MOST_NIBBLES = 128 };

#define NEAR_LEVEL 0.566f  // of the four levels, in mean distances
#define FAR_LEVEL 1.89f
#define STEPS_OF_SPREAD 20.0f  // steps of a score per standard deviation of scores

// A query's table for codes: a score is (query * key - origin) / step.
typedef struct {
    int8_t tables[MOST_NIBBLES][16];
    float origin, step;
} lookup;

// Rounds to the nearest; NaN becomes the lowest.
INLINE int8_t narrowed(float x) {
    return (int8_t)(x > 127.0f ? 127.0f : x >= -127.0f ? x + (x < 0 ? -0.5f : 0.5f) : -127.0f);
}

INLINE int saturated(int x) { return x > 127 ? 127 : x < -128 ? -128 : x; }

static void begin_lookup(const float *query, const float *spread, int head_dim, lookup *to) {
    static const float LEVELS[4] = {-FAR_LEVEL, -NEAR_LEVEL, NEAR_LEVEL, FAR_LEVEL};
    float squares = 1e-20f;
    for (int d = 0; d < head_dim; d++) squares += query[d] * spread[d] * query[d] * spread[d];
    to->step = __builtin_sqrtf(squares) / STEPS_OF_SPREAD;
    for (int d = 0; d < head_dim; d += 2) {
        float low = query[d] * spread[d] / to->step, high = query[d + 1] * spread[d + 1] / to->step;
        for (int code = 0; code < 16; code++)
            to->tables[d / 2][code] = narrowed(low * LEVELS[code % 4] + high * LEVELS[code / 4]);
    }
}

// Computes scores of two blocks' keys from their codes, [head_dim / 4, 64] each; all start at `offset`.
INLINE void score_blocks(const lookup *lookup, const uint8_t *codes, const int num_bytes, int8_t offset, int8_t *scores) {
    const uint8_t *others = codes + num_bytes * CODE_BLOCK;
#if defined(__AVX512BW__)
    __m512i nibble = _mm512_set1_epi8(15), first[2], second[2];
    for (int n = 0; n < 2; n++) first[n] = _mm512_set1_epi8(offset), second[n] = _mm512_setzero_si512();
    for (int i = 0; i < num_bytes; i++) {
        __m512i low = _mm512_broadcast_i32x4(_mm_loadu_si128((const void *)lookup->tables[2 * i]));
        __m512i high = _mm512_broadcast_i32x4(_mm_loadu_si128((const void *)lookup->tables[2 * i + 1]));
        for (int n = 0; n < 2; n++) {
            __m512i bytes = _mm512_loadu_si512((n ? others : codes) + i * CODE_BLOCK);
            __m512i upper = _mm512_and_si512(_mm512_srli_epi16(bytes, 4), nibble);
            first[n] = _mm512_adds_epi8(first[n], _mm512_shuffle_epi8(low, _mm512_and_si512(bytes, nibble)));
            second[n] = _mm512_adds_epi8(second[n], _mm512_shuffle_epi8(high, upper));
        }
    }
    for (int n = 0; n < 2; n++) _mm512_storeu_si512(scores + n * CODE_BLOCK, _mm512_adds_epi8(first[n], second[n]));
#elif defined(__AVX2__)
    __m256i nibble = _mm256_set1_epi8(15);
    for (int half = 0; half < 2 * CODE_BLOCK; half += 32) {
        const uint8_t *from = half < CODE_BLOCK ? codes + half : others + half - CODE_BLOCK;
        __m256i first = _mm256_set1_epi8(offset), second = _mm256_setzero_si256();
        for (int i = 0; i < num_bytes; i++) {
            __m256i bytes = _mm256_loadu_si256((const void *)(from + i * CODE_BLOCK));
            __m256i low = _mm256_broadcastsi128_si256(_mm_loadu_si128((const void *)lookup->tables[2 * i]));
            __m256i high = _mm256_broadcastsi128_si256(_mm_loadu_si128((const void *)lookup->tables[2 * i + 1]));
            __m256i upper = _mm256_and_si256(_mm256_srli_epi16(bytes, 4), nibble);
            first = _mm256_adds_epi8(first, _mm256_shuffle_epi8(low, _mm256_and_si256(bytes, nibble)));
            second = _mm256_adds_epi8(second, _mm256_shuffle_epi8(high, upper));
        }
        _mm256_storeu_si256((void *)(scores + half), _mm256_adds_epi8(first, second));
    }
#else
    for (int key = 0; key < 2 * CODE_BLOCK; key++) {
        const uint8_t *from = key < CODE_BLOCK ? codes + key : others + key - CODE_BLOCK;
        int first = offset, second = 0;
        for (int i = 0; i < num_bytes; i++) {
            first = saturated(first + lookup->tables[2 * i][from[i * CODE_BLOCK] & 15]);
            second = saturated(second + lookup->tables[2 * i + 1][from[i * CODE_BLOCK] >> 4]);
        }
        scores[key] = (int8_t)saturated(first + second);
    }
#endif
}

// Returns one bit per score of a block that is at least `least`.
INLINE uint64_t at_least(const int8_t *scores, int8_t least) {
#if defined(__AVX512BW__)
    return _mm512_cmpge_epi8_mask(_mm512_loadu_si512(scores), _mm512_set1_epi8(least));
#else
    uint64_t found = 0;
    for (int key = 0; key < CODE_BLOCK; key++) found |= (uint64_t)(scores[key] >= least) << key;
    return found;
#endif
}
