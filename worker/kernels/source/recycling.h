// What Python sees of token recycling. Every pointer and shape was checked there: nothing is checked here again but the
// numbers of tokens and rows, which takes Python longer than the rest.
#pragma once
#include "api.h"

#define MOST_NODES 127
#define MOST_CANDIDATES 16  // of a row
#define NUM_BEST 8          // candidates of the target behind a row, and those that are drafted from two rows

// Candidates behind tokens or pairs, best first; a place without one has the log-probability -inf.
typedef struct {
    int32_t *ids;     // [num_rows, width]
    float *logprobs;  // [num_rows, width]
    int64_t width;
} candidate_rows;

typedef struct {
    candidate_rows tokens;  // one row for each
    candidate_rows pairs;   // 2^pair_bits rows, found by hash
    int64_t *pair_keys;     // the pair that each of those rows belongs to
    int64_t pair_bits, vocab;
    double new_share;   // of the new probabilities, where a row is written again
    double pair_share;  // of the pair's row, where both are known
} recycling_tables;

// How sure a drafter is of its candidates, in the terms of worker/drafters/ranking.py.
typedef struct {
    uint64_t noise_key;
    double noise_scale, spread, floor;
} candidate_ranking;

// A tree that is to be grown behind a pair that ends a text of `length` tokens.
typedef struct {
    candidate_ranking ranking;
    int64_t previous, token, length;
    int64_t max_nodes;  // at most MOST_NODES
    int64_t max_depth;
} tree_growth;

// Grow the best-first trees of several texts. Each one's nodes begin behind the `max_nodes` of those before it;
// `num_nodes` [num_trees] are written.
EXPORT void recycling_grow(
    const recycling_tables *tables, const tree_growth *growths, int64_t num_trees, int64_t *node_ids, int64_t *parents,
    int64_t *num_nodes
);

// Take in the candidates of several texts, one after the other: of each those behind its tokens [num_rows, NUM_BEST],
// where a token comes twice its last row, and then those of its `text_rows` [num_text_rows], which stand behind
// `previous_ids` in the text and count for these pairs too. Texts lie one behind the other; `sizes` [num_texts, 2] are
// their numbers of rows. `places` [most text rows of one] is room. Returns how many texts stand in front of the first
// one with a number that is out of its bounds: that one and those behind it have written nothing.
EXPORT int64_t recycling_write(
    const recycling_tables *tables, const int64_t *token_ids, const int64_t *ids, const float *logprobs,
    const int64_t *text_rows, const int64_t *previous_ids, const int64_t *sizes, int64_t num_texts, int64_t *places
);
