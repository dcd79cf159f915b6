// Products of bf16 in tiles of sixteen rows by sixteen columns, on processors with AMX.
#include "api.h"
#include "gemm.h"

#if defined(__AMX_BF16__)
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { TILE_ROWS = 16, ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18 };

int kernels_usable(void) { return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0; }

// A constant: compilers believe the instruction reads eight bytes, and keep only those of a variable on the stack.
static const struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
} TILES_OF_ROWS = {.palette = 1,
                   .row_bytes = {64, 64, 64, 64, 64, 64, 64, 64},
                   .rows = {TILE_ROWS, TILE_ROWS, TILE_ROWS, TILE_ROWS, TILE_ROWS, TILE_ROWS, TILE_ROWS, TILE_ROWS}};

void machine_begin(void) { _tile_loadconfig(&TILES_OF_ROWS); }

void machine_end(void) { _tile_release(); }

// Tile numbers are part of the instruction: 0 to 3 are sums, 4 and 5 rows of A, 6 and 7 blocks of B.
#define BEGIN(t, place)                                \
    do {                                               \
        if (add) _tile_loadd(t, place, ldc * 4);       \
        else _tile_zero(t);                            \
    } while (0)
#define LOAD(t, from, n)                                                                                           \
    do {                                                                                                           \
        if (b.ahead) ask_for(b.ahead[n], b.ahead_bytes, k, depth);                                                 \
        _tile_loadd(t, from, b.step * 2);                                                                          \
    } while (0)
#define END(t, place) _tile_stored(t, place, ldc * 4)

// Prefetches the share of one step in the depth.
INLINE void ask_for(const char *from, long bytes, int k, int depth) {
    const char *end = from + bytes * (k + BF16_DEPTH) / depth;
    for (from += bytes * k / depth; from < end; from += 64) __builtin_prefetch(from, 0, 2);
}

// Up to sixteen rows, three blocks at a time.
static void sixteen_rows(int blocks, int depth, const bf16 *a, long lda, operand b, float *c, long ldc, bool add) {
    const bf16 *right = b.data;
    int n = 0;
    for (; n + 3 <= blocks; n += 3, right += 3 * b.block, c += 3 * LANES) {
        BEGIN(0, c);
        BEGIN(1, c + LANES);
        BEGIN(2, c + 2 * LANES);
        for (int k = 0; k < depth; k += BF16_DEPTH) {
            const bf16 *from = right + k / 2 * b.step;
            _tile_loadd(4, a + k, lda * 2);
            LOAD(5, from, n);
            _tile_dpbf16ps(0, 4, 5);
            LOAD(6, from + b.block, n + 1);
            _tile_dpbf16ps(1, 4, 6);
            LOAD(7, from + 2 * b.block, n + 2);
            _tile_dpbf16ps(2, 4, 7);
        }
        END(0, c);
        END(1, c + LANES);
        END(2, c + 2 * LANES);
    }
    for (; n < blocks; n++, right += b.block, c += LANES) {
        BEGIN(0, c);
        for (int k = 0; k < depth; k += BF16_DEPTH) {
            _tile_loadd(4, a + k, lda * 2);
            LOAD(5, right + k / 2 * b.step, n);
            _tile_dpbf16ps(0, 4, 5);
        }
        END(0, c);
    }
}

// Seventeen to thirty-two rows, two blocks at a time; `below` is C from row sixteen on.
static void two_blocks(int depth, const bf16 *a, long lda, operand b, const bf16 *right, float *c, float *below,
                       long ldc, bool add) {
    BEGIN(0, c);
    BEGIN(1, c + LANES);
    BEGIN(2, below);
    BEGIN(3, below + LANES);
    for (int k = 0; k < depth; k += BF16_DEPTH) {
        const bf16 *from = right + k / 2 * b.step;
        _tile_loadd(4, a + k, lda * 2);
        _tile_loadd(5, a + TILE_ROWS * lda + k, lda * 2);
        LOAD(6, from, 0);
        LOAD(7, from + b.block, 1);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
    END(0, c);
    END(1, c + LANES);
    END(2, below);
    END(3, below + LANES);
}

static void thirty_two_rows(int blocks, int depth, const bf16 *a, long lda, operand b, float *c, long ldc, bool add) {
    const bf16 *right = b.data;
    int n = 0;
    for (; n + 2 <= blocks; n += 2, b.ahead += b.ahead ? 2 : 0)
        two_blocks(depth, a, lda, b, right + n * b.block, c + n * LANES, c + TILE_ROWS * ldc + n * LANES, ldc, add);
    if (n == blocks) return;
    operand last = b;
    last.data = right + n * b.block;
    sixteen_rows(1, depth, a, lda, last, c + n * LANES, ldc, add);
    sixteen_rows(1, depth, a + TILE_ROWS * lda, lda, last, c + TILE_ROWS * ldc + n * LANES, ldc, add);
}

// Tiles store sixteen rows: the last rows go through a buffer.
static void last_rows(int rows, int blocks, int depth, const bf16 *a, long lda, operand b, float *c, long ldc,
                      bool add) {
    float sums[TILE_ROWS * 3 * LANES];
    for (int n = 0; n < blocks; n += 3) {
        int wide = blocks - n < 3 ? blocks - n : 3;
        size_t bytes = sizeof(float) * LANES * (size_t)wide;
        operand part = b;
        part.data = (const bf16 *)b.data + n * b.block;
        if (b.ahead) part.ahead = b.ahead + n;
        for (int r = 0; r < rows && add; r++) memcpy(sums + r * 3 * LANES, c + r * ldc + n * LANES, bytes);
        sixteen_rows(wide, depth, a, lda, part, sums, 3 * LANES, add);
        for (int r = 0; r < rows; r++) memcpy(c + r * ldc + n * LANES, sums + r * 3 * LANES, bytes);
    }
}

void gemm_bf16(int rows, int blocks, int depth, const bf16 *a, long lda, operand b, float *c, long ldc, bool add) {
    int r = 0;
    for (; rows - r >= 2 * TILE_ROWS; r += 2 * TILE_ROWS, b.ahead = NULL)
        thirty_two_rows(blocks, depth, a + r * lda, lda, b, c + r * ldc, ldc, add);
    for (; rows - r >= TILE_ROWS; r += TILE_ROWS, b.ahead = NULL)
        sixteen_rows(blocks, depth, a + r * lda, lda, b, c + r * ldc, ldc, add);
    if (r < rows) last_rows(rows - r, blocks, depth, a + r * lda, lda, b, c + r * ldc, ldc, add);
}
#endif
