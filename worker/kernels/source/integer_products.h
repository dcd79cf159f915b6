// Products of weights of 8 or 4 bits with rows that are rounded to 8 bits.
//
// Each ROW_PIECE of a row has a scale: its largest magnitude by 127. Products are summed in integers along a group of
// weights, or a piece if that is shorter; these sums times both scales are added in order, and the offset's part behind
// each. So a row's bits depend on no other row and on no build.
#pragma once
#include "quantized.h"

enum { ROW_PIECE = 32, HALF_OF_PIECE = ROW_PIECE / 2 };

typedef struct {
    int8_t numbers[ROW_PIECE];
    float scale;
    int32_t below[4];          // sums of the numbers' halves, and of all, times -32; then a 0
    float scaled[3];           // these sums times the scale
} row_piece;

// Rounds a row to pieces; NaN or infinity make their piece's scale NaN.
void integer_row(const float *row, int depth, row_piece *pieces);
// C [rows, ldc] = A times blocks of one layout; A has `row_bytes` from a row's pieces to the next one's.
void integer_multiply(const quantized_block *blocks, int count, int rows, const void *a, long row_bytes, float *c,
                      long ldc);
