// Scores of an indexer's keys, and the order of scores: for keys that are chosen alone, and in blocks.
#pragma once
#include "attention_units.h"
#include "indexer.h"

enum { INDEX_SPAN = 2048, KEYS_AT_ONCE = 64 };

// Rows that are scored together, each in units of keys.
typedef struct {
    const decoder_sizes *sizes;
    const index_room *room;
    const forward_call *call;
    const attention *all;
    scored_keys keys;
    int first_row, num_rows;
    int units_per_row;
    long span, stride;  // scores of a unit, of a row; the last unit of a row may have fewer
} scoring;

// Queries as products take them, a block of packed keys, and their products.
typedef struct {
    char *queries, *packed;
    float *products;  // [index_heads, KEYS_AT_ONCE]
} scoring_space;

scoring_space index_space_at(const decoder_sizes *sizes, void *scratch);
// Writes a row's queries, padded with zeros.
void pack_index_queries(const decoder_sizes *sizes, const float *queries, char *packed);
// Writes products of the queries and `count` keys, a multiple of sixteen.
void multiply_index_keys(const decoder_sizes *sizes, scoring_space space, const char *const *keys, int count);

// Returns an integer whose order is that of the numbers.
INLINE uint32_t score_order(float score) {
    uint32_t bits = float_bits(score);
    return bits ^ (bits >> 31 ? 0xffffffffu : 0x80000000u);
}

// Returns the order of the `wanted`-th best score, and how many scores that are equal to it are among the best.
uint32_t least_chosen(const float *scores, int count, int wanted, int *num_equal);

// Returns how many choices a row has: one for each head of keys, or one for all.
INLINE int choices_of_row(const decoder_sizes *sizes) { return sizes->index_block ? sizes->index_heads : 1; }
size_t chosen_bytes(const decoder_sizes *sizes);

// Scores the blocks of one row that lie in one unit and in front of the row's own block.
void run_block_scoring(const void *job, int unit, void *slot, void *scratch);
// Chooses a row's blocks for each head of keys.
void run_block_choice(const void *job, int unit, void *slot, void *scratch);
// Returns how many blocks a unit has; its scores are by head, then by block.
int blocks_of_unit(const decoder_sizes *sizes);
