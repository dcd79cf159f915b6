// Products with weights of 8 or 4 bits that are never stored as floats, with the same bits as if they were.
#pragma once
#include "api.h"
#include "gemm.h"

typedef struct quantized_part quantized_part;

// Blocks abreast are interleaved: for each group along the depth come all blocks' scales (and offsets), then their
// codes, step by step. So products of few rows read one stream from start to end.
typedef struct {
    const quantized_part *part;  // its part, with the layout; NULL if not quantized
    const uint8_t *data;         // start of the interleaved blocks
    int place, num_abreast;      // its index and their number
} quantized_block;

// Loads `count` rows of a weight into blocks; `next` is linked to the part.
quantized_part *quantized_new(const quantized_rows *rows, int depth, int count, element element,
                              quantized_block *blocks, quantized_part *next);
void quantized_free(quantized_part *first);  // with all linked parts

// Returns how many blocks from the first on have the same layout, quantized or not.
int quantized_alike(const quantized_block *blocks, int count);

// Reads the numbers of `count` codes from `first` on, in whole groups.
void quantized_read(const quantized_rows *rows, long first, int count, bool rounds, float *to);

size_t quantized_scratch_bytes(void);
bool quantized_takes_integers(const quantized_block *block);  // its rows have 8 bits: see integer_products.h
// C [rows, ldc] = A [rows, depth] times blocks of one layout that take no integers; A is bf16 with zeros up to the packed
// depth where products take it, else float. `behind` more blocks follow, which are prefetched.
void quantized_multiply(const quantized_block *blocks, int count, int behind, int rows, const void *a, long lda,
                        float *c, long ldc, void *scratch);
