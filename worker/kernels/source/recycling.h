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
    uint64_t seed;
    double noise_scale, spread, floor;
} candidate_ranking;

// Grow the best-first tree behind a pair that ends a text of `length` tokens; returns its number of nodes. `node_ids`,
// `parents` [max_nodes], which is at most MOST_NODES.
EXPORT int64_t recycling_grow(
    const recycling_tables *tables, const candidate_ranking *ranking, int64_t previous, int64_t token, int64_t length,
    int64_t max_nodes, int64_t max_depth, int64_t *node_ids, int64_t *parents
);

// Take in the candidates [num_rows, NUM_BEST] behind tokens; where a token comes twice, its last row counts. Those of
// `text_rows` [num_text_rows] stand behind `previous_ids` in a text: they count for these pairs too. `places`
// [num_text_rows] is room. Returns 0, having written nothing, where a number is out of its bounds.
EXPORT int recycling_write(
    const recycling_tables *tables, const int64_t *token_ids, const int64_t *ids, const float *logprobs,
    int64_t num_rows, const int64_t *text_rows, const int64_t *previous_ids, int64_t num_text_rows, int64_t *places
);
