// What Python calls for token recycling. Python checks the shapes of what it gives; only the numbers of tokens and rows
// are checked here, which is faster.
#pragma once
#include "api.h"

#define MOST_NODES 127
#define MOST_CANDIDATES 16  // per row
#define NUM_BEST 8          // target's candidates per row, and candidates drafted from two rows

// Candidates after tokens or pairs, best first; empty places have log-probability -inf.
typedef struct {
    int32_t *ids;     // [num_rows, width]
    float *logprobs;  // [num_rows, width]
    int64_t width;
} candidate_rows;

typedef struct {
    candidate_rows tokens;  // a row per token
    candidate_rows pairs;   // 2^pair_bits rows, by hash
    int64_t *pair_keys;     // pair of each of these rows
    int64_t pair_bits, vocab;
    double new_share;   // weight of new probabilities in a row that is written again
    double pair_share;  // weight of the pair's row if both are known
} recycling_tables;

// A drafter's confidence in its candidates, as in worker/drafters/ranking.py.
typedef struct {
    uint64_t noise_key;
    double noise_scale, spread, floor;
} candidate_ranking;

// A tree to be grown after the pair that ends a text of `length` tokens.
typedef struct {
    candidate_ranking ranking;
    int64_t previous, token, length;
    int64_t max_nodes;  // at most MOST_NODES
    int64_t max_depth;
} tree_growth;

// Grows the best-first trees of several texts. Each tree's nodes begin after the `max_nodes` of those before it; writes
// `num_nodes` [num_trees].
EXPORT void recycling_grow(
    const recycling_tables *tables, const tree_growth *growths, int64_t num_trees, int64_t *node_ids, int64_t *parents,
    int64_t *num_nodes
);

// Takes the candidates of several texts in order: per text those after its tokens [num_rows, NUM_BEST], of which the
// last row of each token counts, then those of its `text_rows` [num_text_rows], which follow `previous_ids` in the text
// and count for these pairs too. Texts are concatenated; `sizes` [num_texts, 2] are their numbers of rows. `places`
// [most text rows of one] is scratch. Returns how many texts precede the first one with a number out of bounds: nothing
// is written from that one on.
EXPORT int64_t recycling_write(
    const recycling_tables *tables, const int64_t *token_ids, const int64_t *ids, const float *logprobs,
    const int64_t *text_rows, const int64_t *previous_ids, const int64_t *sizes, int64_t num_texts, int64_t *places
);
