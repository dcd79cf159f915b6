// Weights loaded once (vectors as floats, matrices packed), and products with them.
#pragma once
#include "api.h"
#include "gemm.h"
#include "quantized.h"
#include "threads.h"

typedef struct {
    void *packed;  // blocks of sixteen columns: pairs of k for bf16, single k for floats; NULL if empty
    quantized_block *quantized;  // blocks of sixteen columns, or NULL if none is quantized
    quantized_part *parts;       // their parts
    float *bias;                 // [columns], or NULL if empty
    int depth, columns;
    element element;
    bool has_integers;  // rows are given in 8 bits, too
} matrix;

// Columns of a weight in a matrix: contiguous, or alternating with those of another one, TURN each.
typedef enum { ALONE, FIRST_IN_TURN, SECOND_IN_TURN } columns_kind;
#define TURN (4 * LANES)

matrix matrix_new(element element, int depth, int columns);
// Returns the block, from a weight's first one on, of one of its `count` rows.
int block_of(columns_kind kind, int row, int count);
void matrix_free(matrix *matrix);
// Packs sixteen rows [16, depth] of a weight in torch's layout, `count` of them real, as one block of columns.
void matrix_pack(matrix *matrix, int block, const void *rows, int count);
void matrix_bias(matrix *matrix, int first_column, int count, const void *bias);
// Loads `count` rows of a weight, and their biases, into blocks from `first_block` on.
void matrix_load(matrix *matrix, int first_block, columns_kind kind, int count, const given_weight *given);
void vector_load(float **vector, int element, int count, const void *weight);
void floats_load(float **vector, int count, const void *numbers);  // any count

// out [num_rows, stride] = rows [num_rows, depth] times the matrix, plus its bias, rounded to bf16 if `rounds`.
void linear(frame *frame, const matrix *matrix, int num_rows, const float *rows, float *out, long stride, bool rounds);
// Its sums before bias and rounding.
void linear_sums(frame *frame, const matrix *matrix, int num_rows, const float *rows, float *out, long stride);

// The steps of `linear`: rows as products take them, sums of some blocks of columns, and their output.
size_t multiplied_bytes(const matrix *matrix);  // of a row, with padding
void multiplied_row(const matrix *matrix, const float *row, void *out);
// out [num_rows, stride] = rows times `blocks` blocks from `first` on; reads rows up to the next multiple of sixteen.
void multiply_panel(const matrix *matrix, int first, int blocks, int num_rows, const void *rows, float *out, long stride,
                    void *scratch);
void finish_panel(const matrix *matrix, int first, int blocks, int num_rows, float *out, long stride, bool rounds);
