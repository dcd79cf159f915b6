// Matrix products in tiles of rows and blocks that stay in registers.
#include "gemm.h"

#include "api.h"

#if defined(__AVX512F__)
enum { TILE_BLOCKS = 4, FEW_ROWS = 2, FEW_ROWS_BLOCKS = 8 };
#elif defined(__AVX2__)
enum { TILE_BLOCKS = 1, FEW_ROWS = 1, FEW_ROWS_BLOCKS = 4 };
#else
enum { TILE_BLOCKS = 1, FEW_ROWS = 1, FEW_ROWS_BLOCKS = 2 };
#endif
enum { MOST_TILE_ROWS = 6, MOST_TILE_BLOCKS = 8, DOT = -1 };  // DOT: pairs of bf16 on both sides

// One step of k (or of a pair) for a whole tile.
INLINE void tile_step(const int rows, const int blocks, const int kind, const void *a, long lda, const void *b,
                      long block, vec sum[MOST_TILE_ROWS][MOST_TILE_BLOCKS]) {
#if HAS_BF16_PRODUCTS
    if (kind == DOT) {
        __m512i right[MOST_TILE_BLOCKS];
        for (int n = 0; n < blocks; n++) right[n] = _mm512_loadu_si512((const bf16 *)b + n * block);
        for (int r = 0; r < rows; r++) {
            int32_t pair;
            memcpy(&pair, (const bf16 *)a + r * lda, sizeof pair);
            __m512bh left = (__m512bh)_mm512_set1_epi32(pair);
            for (int n = 0; n < blocks; n++) sum[r][n] = _mm512_dpbf16_ps(sum[r][n], left, (__m512bh)right[n]);
        }
        return;
    }
#endif
    vec right[MOST_TILE_BLOCKS];
    for (int n = 0; n < blocks; n++) {
        if (kind == PAIRS) right[n] = vec_load_even((const bf16 *)b + n * block);
        else if (kind == ROWS_BF16) right[n] = vec_load_bf16((const bf16 *)b + n * block);
        else right[n] = vec_load((const float *)b + n * block);
    }
    for (int r = 0; r < rows; r++) {
        vec left = vec_set(((const float *)a)[r * lda]);
        for (int n = 0; n < blocks; n++) sum[r][n] = vec_fma(left, right[n], sum[r][n]);
    }
    if (kind != PAIRS) return;
    for (int n = 0; n < blocks; n++) right[n] = vec_load_odd((const bf16 *)b + n * block);
    for (int r = 0; r < rows; r++) {
        vec left = vec_set(((const float *)a)[r * lda + 1]);
        for (int n = 0; n < blocks; n++) sum[r][n] = vec_fma(left, right[n], sum[r][n]);
    }
}

// What a tile prefetches: its share of the memory ahead, per block.
typedef struct {
    const void *const *from;
    long first, bytes;
} share;

INLINE share share_of(operand b, int block, int row, int count, int rows) {
    return (share){b.ahead ? b.ahead + block : NULL, b.ahead_bytes * row / rows, b.ahead_bytes * count / rows};
}

// Everything that decides register use is constant; `kind` is a layout or DOT.
INLINE void tile(const int rows, const int blocks, const int kind, int depth, const char *a, long lda, const char *b,
                 long block, long step, share ahead, float *c, long ldc, bool add) {
    const long a_bytes = kind == DOT ? 4 : kind == PAIRS ? 8 : 4, b_bytes = kind == ROWS_F32 ? 4 : 2;
    const int steps = kind == DOT || kind == PAIRS ? depth / 2 : depth;
    const long ahead_step = ahead.bytes / steps;
    vec sum[MOST_TILE_ROWS][MOST_TILE_BLOCKS];
    for (int r = 0; r < rows; r++)
        for (int n = 0; n < blocks; n++) sum[r][n] = add ? vec_load(c + r * ldc + n * LANES) : vec_set(0.0f);
    for (int k = 0; k < steps; k++) {
        for (int n = 0; n < blocks && ahead.from; n++)
            __builtin_prefetch((const char *)ahead.from[n] + ahead.first + k * ahead_step, 0, 2);
        tile_step(rows, blocks, kind, a, lda, b, block, sum);
        a += a_bytes;
        b += step * b_bytes;
    }
    for (int r = 0; r < rows; r++)
        for (int n = 0; n < blocks; n++) vec_store(c + r * ldc + n * LANES, sum[r][n]);
}

// Eight rows are two tiles of four, because two rows alone leave products waiting for each other.
#define TILE(NUM_ROWS)                                                                                          \
    for (; rows - r >= NUM_ROWS && !(NUM_ROWS == 6 && rows - r == 8); r += NUM_ROWS)                            \
    tile(NUM_ROWS, blocks, kind, depth, a + r * lda * a_bytes, lda, from, b.block, b.step,                      \
         share_of(b, block, r, NUM_ROWS, rows), c + r * ldc, ldc, add)

// All rows of `blocks` blocks, which so stay in the nearest cache.
INLINE void columns(const int blocks, const int kind, int block, int rows, int depth, const char *a, long lda, operand b,
                    float *c, long ldc, bool add) {
    const long a_bytes = kind == DOT ? 2 : 4, b_bytes = kind == ROWS_F32 ? 4 : 2;
    const char *from = (const char *)b.data + block * b.block * b_bytes;
    int r = 0;
    if (blocks <= TILE_BLOCKS) {
        TILE(6);
        TILE(4);
    }
    if (blocks <= TILE_BLOCKS || FEW_ROWS == 2) TILE(2);
    TILE(1);
}

#define COLUMNS(NUM_BLOCKS)                               \
    for (; blocks - n >= NUM_BLOCKS; n += NUM_BLOCKS) \
    columns(NUM_BLOCKS, kind, n, rows, depth, a, lda, b, c + n * LANES, ldc, add)

INLINE void gemm(const int kind, int rows, int blocks, int depth, const void *a, long lda, operand b, float *c,
                 long ldc, bool add) {
    int n = 0;
    if (rows <= FEW_ROWS) COLUMNS(FEW_ROWS_BLOCKS);
    COLUMNS(TILE_BLOCKS);
    if (TILE_BLOCKS > 1) COLUMNS(1);
}

void gemm_f32(int rows, int blocks, int depth, const float *a, long lda, operand b, float *c, long ldc, bool add) {
    if (b.layout == PAIRS) gemm(PAIRS, rows, blocks, depth, a, lda, b, c, ldc, add);
    else if (b.layout == ROWS_BF16) gemm(ROWS_BF16, rows, blocks, depth, a, lda, b, c, ldc, add);
    else gemm(ROWS_F32, rows, blocks, depth, a, lda, b, c, ldc, add);
}

#if HAS_BF16_PRODUCTS && !defined(__AMX_BF16__)
void gemm_bf16(int rows, int blocks, int depth, const bf16 *a, long lda, operand b, float *c, long ldc, bool add) {
    gemm(DOT, rows, blocks, depth, a, lda, b, c, ldc, add);
}
#endif

#if !defined(__AMX_BF16__)
int kernels_usable(void) { return 1; }
void machine_begin(void) {}
void machine_end(void) {}
#endif
