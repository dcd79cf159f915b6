// Tiles in software, for processors without AMX: forced into the build of `amx-bf16`, so that its code runs anywhere
// with products of bf16. Each thread has tiles of its own, and using them before they are configured ends the process.
#pragma once
#include <immintrin.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { EMULATED_ROWS = 16, EMULATED_TILES = 8 };

static __thread __m512i emulated_tiles[EMULATED_TILES][EMULATED_ROWS];
static __thread int emulated_is_configured;

static inline __m512i *emulated_tile(int tile) {
    if (!emulated_is_configured) abort();
    return emulated_tiles[tile];
}

static inline void emulated_zero(int tile) {
    memset(emulated_tile(tile), 0, sizeof(emulated_tiles[0]));
}

static inline void emulated_load(int tile, const void *from, long stride) {
    __m512i *rows = emulated_tile(tile);
    for (int r = 0; r < EMULATED_ROWS; r++) memcpy(&rows[r], (const char *)from + r * stride, sizeof(*rows));
}

static inline void emulated_store(int tile, void *to, long stride) {
    __m512i *rows = emulated_tile(tile);
    for (int r = 0; r < EMULATED_ROWS; r++) memcpy((char *)to + r * stride, &rows[r], sizeof(*rows));
}

// sums[m][n] += left[m][2k] * right[k][2n] + left[m][2k + 1] * right[k][2n + 1], pair by pair.
static inline void emulated_multiply(int sums, int left, int right) {
    for (int m = 0; m < EMULATED_ROWS; m++) {
        int pairs[EMULATED_ROWS];
        memcpy(pairs, &emulated_tile(left)[m], sizeof(pairs));
        __m512 sum = (__m512)emulated_tile(sums)[m];
        for (int k = 0; k < EMULATED_ROWS; k++)
            sum = _mm512_dpbf16_ps(sum, (__m512bh)_mm512_set1_epi32(pairs[k]), (__m512bh)emulated_tile(right)[k]);
        emulated_tile(sums)[m] = (__m512i)sum;
    }
}

#define _tile_loadconfig(config) ((void)(config), emulated_is_configured = 1)
#define _tile_release() ((void)(emulated_is_configured = 0))
#define _tile_zero emulated_zero
#define _tile_loadd emulated_load
#define _tile_stored emulated_store
#define _tile_dpbf16ps emulated_multiply
#define syscall(...) 0  // the only one asks for the permission to use tiles
