// Products of matrices: C[row][column] = sum over k of A[row][k] * B[k][column], columns in blocks of sixteen.
//
// Each element is a sum over k, one after the other, whatever the number of rows and blocks: a row's bits are its own.
#pragma once
#include "vectors.h"

#if defined(__AVX512BF16__)
#define HAS_BF16_PRODUCTS 1
#else
#define HAS_BF16_PRODUCTS 0
#endif
#define BF16_DEPTH 32  // products of bf16 take k in such steps: what is packed for them ends with zeros

// How B lies: sixteen columns side by side, of bf16 in pairs of k, or of one k after the other.
typedef enum { PAIRS, ROWS_BF16, ROWS_F32 } layout;

typedef struct {
    const void *data;
    long block, step;  // elements from one block of columns, from one k (or pair of them) to the next
    layout layout;
    const void *const *ahead;  // what to ask memory for meanwhile, for each block of columns; NULL for nothing
    long ahead_bytes;          // of each
} operand;

// A [rows, depth] float; with `add` to what is in C. Even depths for pairs.
void gemm_f32(int rows, int blocks, int depth, const float *a, long lda, operand b, float *c, long ldc, bool add);

// A [rows, depth] bf16 and B in pairs, in the processor's own order of sums; rows up to the next sixteen are read.
#if HAS_BF16_PRODUCTS
void gemm_bf16(int rows, int blocks, int depth, const bf16 *a, long lda, operand b, float *c, long ldc, bool add);
#else  // nobody calls it
INLINE void gemm_bf16(int rows, int blocks, int depth, const bf16 *a, long lda, operand b, float *c, long ldc, bool add) {
    (void)rows, (void)blocks, (void)depth, (void)a, (void)lda, (void)b, (void)c, (void)ldc, (void)add;
    __builtin_unreachable();
}
#endif

// Around all work of a thread that may call `gemm_bf16`.
void machine_begin(void);
void machine_end(void);
