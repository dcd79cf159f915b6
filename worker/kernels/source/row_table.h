// The rows of draft trees, and the table of them that a GPU's forward reads. The definitions are worker/forward/tile_packing.py
// and worker/kernels/cuda/cuda_row_table.py, which also say what is wrong where these functions refuse.
#pragma once
#include "api.h"

#define MOST_TABLE_SLOTS 4096

// `TableLayout`: the sizes of a table in its buffer, and the range of its numbers.
typedef struct {
    int64_t num_slots, capacity, rows_per_group, num_positions, vocab, boundary_step;
    int64_t page;             // entries of a page, a multiple of TAIL; 0: entries are places
    int64_t num_rows, num_groups;
    int64_t start_of_windows;  // where entries and tails in a second pool begin; 0: there is none
} table_layout;

// Consecutive rows of one sequence.
typedef struct {
    int64_t size, slot, boundary, first_entry;
} given_rows;

// Pages that sequences' entries lie in, from that of the boundary to that of the last row: those of a sequence begin
// behind those of the sequences before it.
typedef struct {
    const int64_t *numbers;  // NULL: there are none
    int64_t count;
} given_pages;

// Write the tails of some draft trees: entries [num_rows, TAIL] from each start up to each row, and `lengths`
// [num_rows], how many of them are real. A tree's root is at entry `root`; `sizes` are the trees' numbers of nodes,
// `parents` those of all nodes. Returns 0 where a parent does not stand before its node, or a tail has no room.
EXPORT int tree_tails(
    const int64_t *starts, const int64_t *roots, const int64_t *sizes, const int64_t *parents, int64_t num_trees,
    int64_t *entries, int64_t *lengths
);

// Fill a table [`num_rows` of the layout] with the rows of some sequences: their tokens, positions, lengths of tails
// [num_rows] and tails [num_rows, TAIL], one sequence behind the other. Returns 0, with nothing written, where they do
// not fit. `window_pages` are looked at where the layout has a second pool.
EXPORT int table_fill(
    const table_layout *layout, const given_rows *sequences, int64_t num_sequences, const int64_t *token_ids,
    const int64_t *positions, const int64_t *lengths, const int64_t *tails, const given_pages *pages,
    const given_pages *window_pages, int32_t *buffer
);
