// LoRA adapters: to a row's product with a weight, its own adapter adds the row times `down` times `up`.
#pragma once
#include "linear.h"

enum { MOST_STACKED = 4 };  // weights that one matrix holds

// What an adapter adds to one weight: floats, whatever the element of the decoder.
typedef struct {
    matrix down, up;  // [depth, rank], [rank, columns]; the latter includes the adapter's scale
    int first_block, num_columns;  // the weight's columns in its matrix
    columns_kind kind;
} adapted_weight;

typedef enum { ADAPTED_HEADS, ADAPTED_OUTPUT, ADAPTED_GATES, ADAPTED_DOWN, NUM_ADAPTED } adapted_matrix;

// One adapter in one layer, by matrix.
typedef struct {
    adapted_weight weights[NUM_ADAPTED][MOST_STACKED];
    int num_weights[NUM_ADAPTED];
} layer_adapter;

// Of all adapters of a decoder: their number, and the largest sizes of their weights.
typedef struct {
    int num_adapters, depth, rank, columns;
} adapter_sizes;

void adapter_load(adapter_sizes *sizes, layer_adapter *adapter, adapted_matrix which, adapted_weight place, int depth, int rank,
                  const float *down, const float *up);
void adapter_free(layer_adapter *adapter);

// The rows of a call by their adapter, and room for their products.
typedef struct {
    int num_adapters;
    int *rows, *ends;             // [num_rows] numbers of rows in the order of adapters; the end of each adapter's rows
    float *given, *lowered, *added;  // [num_rows, widest depth], [num_rows, largest rank], [num_rows, most columns]
} adapted_rows;

// Returns NULL if no row has an adapter.
adapted_rows *adapted_rows_new(frame *frame, const forward_call *call, const adapter_sizes *sizes);
// Adds to sums [num_rows, stride] of the rows' products, before biases and rounding. `adapters` are those of the layer.
void adapters_add(frame *frame, const adapted_rows *adapted, const layer_adapter *adapters, adapted_matrix which,
                  const float *rows, float *out, long stride);
