// Weights of 8 or 4 bits, multiplied without being written out as numbers: the same bits as if they had been.
#pragma once
#include "api.h"
#include "gemm.h"

typedef struct quantized_part quantized_part;

// A block lies abreast of others: for each group along the depth all have their scales, and offsets if there are any, then
// their codes, step by step. So few rows read one stream, from its start to its end.
typedef struct {
    const quantized_part *part;  // whose block it is: how it lies; NULL where the block is not quantized
    const uint8_t *data;         // where all that lie abreast begin
    int place, num_abreast;      // its own among these
} quantized_block;

// Takes in `count` rows of a weight as so many blocks; `next` hangs on it.
quantized_part *quantized_new(const quantized_rows *rows, int depth, int count, element element,
                              quantized_block *blocks, quantized_part *next);
void quantized_free(quantized_part *first);  // all that hang on it too

// How many blocks from the first one on lie in the same way, quantized or not.
int quantized_alike(const quantized_block *blocks, int count);

// The numbers of `count` codes from the `first` on, in whole groups.
void quantized_read(const quantized_rows *rows, long first, int count, bool rounds, float *to);

size_t quantized_scratch_bytes(void);
// C [rows, ldc] = A [rows, depth] times blocks that lie alike; A of bf16 with zeros up to the packed depth where
// products take it, else of floats. `behind` more blocks follow, which are likely to be wanted next.
void quantized_multiply(const quantized_block *blocks, int count, int behind, int rows, const void *a, long lda,
                        float *c, long ldc, void *scratch);
