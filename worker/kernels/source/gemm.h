// Matrix products: C[row][column] = sum over k of A[row][k] * B[k][column], columns in blocks of sixteen.
//
// Each element sums over k in order, for any number of rows and blocks: a row's bits depend on no other row.
#pragma once
#include "vectors.h"

#if defined(__AVX512BF16__)
#define HAS_BF16_PRODUCTS 1
#else
#define HAS_BF16_PRODUCTS 0
#endif
#define BF16_DEPTH 32  // step of k in products of bf16: their packed operands end with zeros

// Layout of B: sixteen columns side by side, bf16 in pairs of k, or single k.
typedef enum { PAIRS, ROWS_BF16, ROWS_F32 } layout;

typedef struct {
    const void *data;
    long block, step;  // elements between blocks of columns, between k (or pairs)
    layout layout;
    const void *const *ahead;  // memory to prefetch meanwhile, per block of columns; NULL: none
    long ahead_bytes;          // per block
} operand;

// A [rows, depth] float; `add`: adds to C. Depths are even for pairs.
void gemm_f32(int rows, int blocks, int depth, const float *a, long lda, operand b, float *c, long ldc, bool add);

// A [rows, depth] bf16 and B in pairs, summed in the processor's order; reads rows up to the next multiple of sixteen.
#if HAS_BF16_PRODUCTS
void gemm_bf16(int rows, int blocks, int depth, const bf16 *a, long lda, operand b, float *c, long ldc, bool add);
#else  // never called
INLINE void gemm_bf16(int rows, int blocks, int depth, const bf16 *a, long lda, operand b, float *c, long ldc, bool add) {
    (void)rows, (void)blocks, (void)depth, (void)a, (void)lda, (void)b, (void)c, (void)ldc, (void)add;
    __builtin_unreachable();
}
#endif

// Called around all work of a thread that may call `gemm_bf16`.
void machine_begin(void);
void machine_end(void);
