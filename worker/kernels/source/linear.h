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
    float *bias;                 // [columns]
    int depth, columns;
    element element;
    bool has_bias;
} matrix;

matrix matrix_new(element element, int depth, int columns);
void matrix_free(matrix *matrix);
// Takes in sixteen rows [16, depth] of a weight as torch has it, `count` of them real, as one block of columns.
void matrix_pack(matrix *matrix, int block, const void *rows, int count);
void matrix_bias(matrix *matrix, int first_column, int count, const void *bias);
// `count` rows of a weight go to every `stride`-th block from `first_block` on, their biases (or NULL) likewise.
void matrix_load(matrix *matrix, int first_block, int stride, int count, const void *weight, const void *bias);
// The same for rows that are quantized and stay so.
void matrix_load_quantized(matrix *matrix, int first_block, int stride, int count, const quantized_rows *weight,
                           const void *bias);
void vector_load(float **vector, int element, int count, const void *weight);

// out [num_rows, stride] = rows [num_rows, depth] times the matrix, with its bias, rounded to bf16 where `rounds`.
void linear(frame *frame, const matrix *matrix, int num_rows, const float *rows, float *out, long stride, bool rounds);
