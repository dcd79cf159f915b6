// What Python sees of chains. As in sampling.h, all was checked there.
#pragma once
#include "sampling.h"

// Forwards of one row for each sequence, its newest token, which is drawn behind and is the next one's row. All rows of
// a chain but the first stand in the tail of those behind them, or in the prefix where a new block begins; tail slots are
// consecutive from the first row's on.
typedef struct {
    const int64_t *token_ids;  // [num_tokens]
    int64_t num_tokens;
} token_set;

typedef struct {
    forward_call forward;  // with logits; its numbers lie in the arrays below
    row_group *groups;     // [num_groups]
    int32_t *token_ids, *positions, *tail_lengths;  // [num_groups]
    int32_t *tail_slots;   // [num_groups, TAIL]
    tree_walk *walks;      // [num_groups] without nodes, over the forward's logits
    int64_t **texts;       // [num_groups] the tokens of each walk's sequence, with room for those to come
    int32_t num_rounds, vocab;
    const token_set *ends; // [num_groups] tokens behind which all chains end, or NULL
    token_set undrawn;     // tokens that are never drawn
} chain_call;

// Draw so many tokens for each sequence, or until one ends, or a row is such that nothing can be drawn from it: what was
// drawn stands in `texts`, and each walk's `length` has grown by it. Returns the number of rounds.
EXPORT int32_t draw_chains(decoder *decoder, team *team, const chain_call *call, void *scratch);
