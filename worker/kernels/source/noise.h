// The noise of worker/sampling/noise.py: Philox4x32-10 (Salmon et al. 2011) with a key of seed and prompt and a counter
// of (position, token), as Gumbel noise.
#pragma once
#include "elementary.h"

#define QUAD 4  // tokens per counter
#define WORD_SCALE 0x1p-32

// What determines the words of one position.
typedef struct {
    uint32_t key[2];       // of the job
    uint32_t position[2];  // low word first
} noise_source;

INLINE noise_source noise_at(uint64_t key, int64_t position) {
    return (noise_source){{(uint32_t)key, (uint32_t)(key >> 32)},
                      {(uint32_t)position, (uint32_t)((uint64_t)position >> 32)}};
}

// The four words of the tokens 4 quad to 4 quad + 3.
INLINE void philox(noise_source noise, uint32_t quad, uint32_t words[QUAD]) {
    uint32_t c0 = quad, c1 = noise.position[0], c2 = noise.position[1], c3 = 0;
    uint32_t k0 = noise.key[0], k1 = noise.key[1];
#pragma GCC unroll 10
    for (int round = 0; round < 10; round++) {
        uint64_t p0 = (uint64_t)c0 * 0xD2511F53, p1 = (uint64_t)c2 * 0xCD9E8D57;
        c0 = (uint32_t)(p1 >> 32) ^ c1 ^ k0;
        c1 = (uint32_t)p1;
        c2 = (uint32_t)(p0 >> 32) ^ c3 ^ k1;
        c3 = (uint32_t)p0;
        k0 += 0x9E3779B9, k1 += 0xBB67AE85;
    }
    words[0] = c0, words[1] = c1, words[2] = c2, words[3] = c3;
}

// The words of the tokens first to first + 63; `first` is a multiple of four.
INLINE void block_words(noise_source noise, int64_t first, uint32_t words[BLOCK]) {
    for (int i = 0; i < BLOCK / QUAD; i++) philox(noise, (uint32_t)(first / QUAD) + i, words + QUAD * i);
}

INLINE uint32_t word_of(noise_source noise, int32_t id) {
    uint32_t quad[QUAD], place = (uint32_t)id % QUAD;
    philox(noise, (uint32_t)id / QUAD, quad);
    uint32_t low = place & 1 ? quad[1] : quad[0], high = place & 1 ? quad[3] : quad[2];
    return place & 2 ? high : low;
}

// The words of any sixteen tokens.
INLINE void list_words(noise_source noise, const int32_t *ids, uint32_t words[LANES]) {
    for (int i = 0; i < LANES; i++) words[i] = word_of(noise, ids[i]);
}

INLINE float gumbel(uint32_t word) {
    // the word as a double, through its bits as in `log_of`
    double whole = double_of(0x4330000000000000 | word) - 4503599627370496.0;
    return (float)-log_of(-log_of((whole + 0.5) * WORD_SCALE));
}

// An upper bound of the noise of a word, much cheaper.
//
// u = (word + 1/2) / 2^32 gives -log(-log u) <= -log(1 - u), and 1 - u is more than rest / 2^24 with the rest of the
// word's upper 24 bits. A float's bits, as a number, are at most its logarithm to base 2: linear between powers of two.
INLINE float gumbel_bound(uint32_t word) {
    const float STEP = 0x1.62e430p-24f;      // log(2) / 2^23 per unit of the bits
    const float START = 104.66523f + 1e-3f;  // log(2) (127 + 24), and a margin for rounding
    float rest = (float)(int32_t)(0xffffff - (word >> 8));
    return START - (float)(int32_t)bits_of(rest) * STEP;
}
