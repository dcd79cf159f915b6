// Weights, taken in once: vectors as floats, matrices packed; and rows multiplied by these.
#pragma once
#include "api.h"
#include "gemm.h"
#include "quantized.h"
#include "threads.h"

typedef struct {
    void *packed;  // blocks of sixteen columns: pairs of k for bf16, one k after the other for floats; NULL before any
    quantized_block *quantized;  // blocks of sixteen columns, or NULL where none is quantized
    quantized_part *parts;       // of these
    float *bias;                 // [columns], or NULL before any
    int depth, columns;
    element element;
} matrix;

// The columns of a weight among those of a matrix: side by side, or in turns with another one of as many, TURN each.
typedef enum { ALONE, FIRST_IN_TURN, SECOND_IN_TURN } columns_kind;
#define TURN (4 * LANES)

matrix matrix_new(element element, int depth, int columns);
void matrix_free(matrix *matrix);
// Takes in sixteen rows [16, depth] of a weight as torch has it, `count` of them real, as one block of columns.
void matrix_pack(matrix *matrix, int block, const void *rows, int count);
void matrix_bias(matrix *matrix, int first_column, int count, const void *bias);
// `count` rows of a weight go to blocks from `first_block` on, their biases (or NULL) likewise.
void matrix_load(matrix *matrix, int first_block, columns_kind kind, int count, const void *weight, const void *bias);
// The same for rows that are quantized and stay so.
void matrix_load_quantized(matrix *matrix, int first_block, columns_kind kind, int count, const quantized_rows *weight,
                           const void *bias);
void vector_load(float **vector, int element, int count, const void *weight);
void floats_load(float **vector, int count, const void *numbers);  // any count

// out [num_rows, stride] = rows [num_rows, depth] times the matrix, with its bias, rounded to bf16 where `rounds`.
void linear(frame *frame, const matrix *matrix, int num_rows, const float *rows, float *out, long stride, bool rounds);

// What `linear` is made of: rows as products take them, sums of some blocks of columns, and what becomes of these.
size_t multiplied_bytes(const matrix *matrix);  // of a row, with what fills it up
void multiplied_row(const matrix *matrix, const float *row, void *out);
// out [num_rows, stride] = rows times `blocks` blocks from the first one on; rows up to the next sixteen are read.
void multiply_panel(const matrix *matrix, int first, int blocks, int num_rows, const void *rows, float *out, long stride,
                    void *scratch);
void finish_panel(const matrix *matrix, int first, int blocks, int num_rows, float *out, long stride, bool rounds);
