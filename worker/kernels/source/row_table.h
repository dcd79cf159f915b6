// The rows of draft trees, and the table of them that a GPU's forward reads. Defined by worker/forward/tile_packing.py
// and worker/kernels/cuda/cuda_row_table.py, which also raise the errors if these functions refuse.
#pragma once
#include "api.h"

#define MOST_TABLE_SLOTS 4096

// `TableLayout`: sizes and number range of a table in its buffer.
typedef struct {
    int64_t num_slots, capacity, rows_per_group, num_positions, vocab, boundary_step;
    int64_t page;             // entries per page, a multiple of TAIL; 0: entries are places
    int64_t num_rows, num_groups;
    int64_t start_of_windows;  // where entries and tails in a second pool begin; 0: there is none
} table_layout;

// Consecutive rows of one sequence.
typedef struct {
    int64_t size, slot, boundary, first_entry;
} given_rows;

// Pages of sequences' entries, from the boundary's to the last row's, concatenated in the order of sequences.
typedef struct {
    const int64_t *numbers;  // or NULL
    int64_t count;
} given_pages;

// Writes the tails of some draft trees: entries [num_rows, TAIL] from each start up to each row, and `lengths`
// [num_rows], their numbers. A tree's root is at entry `root`; `sizes` are the trees' numbers of nodes, `parents` those
// of all nodes. Returns 0 if a parent does not precede its node, or a tail is too long.
EXPORT int tree_tails(
    const int64_t *starts, const int64_t *roots, const int64_t *sizes, const int64_t *parents, int64_t num_trees,
    int64_t *entries, int64_t *lengths
);

// Fills a table [`num_rows` of the layout] with the rows of some sequences: their tokens, positions, lengths of tails
// [num_rows] and tails [num_rows, TAIL], concatenated. Returns 0, with nothing written, if they do not fit.
// `window_pages` are used if the layout has a second pool.
EXPORT int table_fill(
    const table_layout *layout, const given_rows *sequences, int64_t num_sequences, const int64_t *token_ids,
    const int64_t *positions, const int64_t *lengths, const int64_t *tails, const given_pages *pages,
    const given_pages *window_pages, int32_t *buffer
);
