// Small products of rows and their adapters: the rows of one adapter together, each with the bits that it has alone.
#include "lora.h"

#include <stdlib.h>

#include "elementwise.h"

static void grow(int *largest_so_far, int size) {
    if (*largest_so_far < size) *largest_so_far = size;
}

void adapter_load(adapter_sizes *sizes, layer_adapter *adapter, adapted_matrix which, adapted_weight place, int depth, int rank,
                  const float *down, const float *up) {
    adapted_weight *weight = &adapter->weights[which][adapter->num_weights[which]++];
    *weight = place;
    weight->down = matrix_new(F32, depth, rank);
    weight->up = matrix_new(F32, rank, place.num_columns);
    matrix_load(&weight->down, 0, ALONE, rank, &(given_weight){.numbers = down});
    matrix_load(&weight->up, 0, ALONE, place.num_columns, &(given_weight){.numbers = up});
    grow(&sizes->depth, depth);
    grow(&sizes->rank, weight->down.columns);
    grow(&sizes->columns, weight->up.columns);
}

void adapter_free(layer_adapter *adapter) {
    for (int which = 0; which < NUM_ADAPTED; which++)
        for (int i = 0; i < adapter->num_weights[which]; i++) {
            matrix_free(&adapter->weights[which][i].down);
            matrix_free(&adapter->weights[which][i].up);
        }
}

// Sorts the rows by adapter; returns how many rows have one.
static int sort_rows(const forward_call *call, adapted_rows *adapted) {
    int count = 0;
    for (int adapter = 1; adapter <= adapted->num_adapters; adapter++) {
        int row = 0;
        for (int i = 0; i < call->num_groups; i++) {
            int end = row + call->groups[i].num_rows;
            if (call->groups[i].adapter != adapter) row = end;
            for (; row < end; row++) adapted->rows[count++] = row;
        }
        adapted->ends[adapter - 1] = count;
    }
    return count;
}

adapted_rows *adapted_rows_new(frame *frame, const forward_call *call, const adapter_sizes *sizes) {
    adapted_rows *adapted = frame_take(frame, sizeof *adapted);
    adapted->num_adapters = sizes->num_adapters;
    adapted->rows = frame_take(frame, sizeof(int) * (size_t)call->num_rows);
    adapted->ends = frame_take(frame, sizeof(int) * (size_t)sizes->num_adapters);
    size_t bytes = sizeof(float) * (size_t)sort_rows(call, adapted);
    adapted->given = frame_take(frame, bytes * (size_t)sizes->depth);
    adapted->lowered = frame_take(frame, bytes * (size_t)sizes->rank);
    adapted->added = frame_take(frame, bytes * (size_t)sizes->columns);
    return bytes ? adapted : NULL;
}

// Adds the weight's sums [columns] of one row to its columns of the matrix.
static void add_columns(const adapted_weight *weight, const float *sums, float *out) {
    for (int column = 0; column < weight->num_columns; column += LANES) {
        float *place = out + (weight->first_block + block_of(weight->kind, column, weight->num_columns)) * LANES;
        vec_store(place, vec_add(vec_load(place), vec_load(sums + column)));
    }
}

void adapters_add(frame *frame, const adapted_rows *adapted, const layer_adapter *adapters, adapted_matrix which,
                  const float *rows, float *out, long stride) {
    for (int number = 0, first = 0; number < adapted->num_adapters; first = adapted->ends[number++]) {
        int count = adapted->ends[number] - first, num_weights = adapters[number].num_weights[which];
        const adapted_weight *weights = adapters[number].weights[which];
        const int *own = adapted->rows + first;
        for (long row = 0; num_weights && row < count; row++) {
            long depth = weights[0].down.depth;
            memcpy(adapted->given + row * depth, rows + own[row] * depth, sizeof(float) * (size_t)depth);
        }
        for (int i = 0; count && i < num_weights; i++) {
            long rank = weights[i].down.columns, columns = weights[i].up.columns;
            linear(frame, &weights[i].down, count, adapted->given, adapted->lowered, rank, false);
            linear(frame, &weights[i].up, count, adapted->lowered, adapted->added, columns, false);
            for (long row = 0; row < count; row++)
                add_columns(&weights[i], adapted->added + row * columns, out + own[row] * stride);
        }
    }
}
