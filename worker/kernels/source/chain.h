// What Python calls for chains. As in sampling.h, Python has checked all arguments.
#pragma once
#include "sampling.h"

// One row per sequence and forward: its newest token, after which the next row's token is drawn. Earlier rows of the
// chain are in the tail, or in the prefix if a new block has begun; tail slots are consecutive from the first row's.
typedef struct {
    const int64_t *token_ids;  // [num_tokens]
    int64_t num_tokens;
} token_set;

typedef struct {
    forward_call forward;  // with logits; its numbers are in the arrays below
    row_group *groups;     // [num_groups]
    int32_t *token_ids, *positions, *tail_lengths;  // [num_groups]
    int32_t *tail_slots;   // [num_groups, TAIL]
    tree_walk *walks;      // [num_groups] without nodes, over the forward's logits
    int64_t **texts;       // [num_groups] tokens of each walk's sequence, with room for new ones
    int32_t num_rounds, vocab;
    const token_set *ends; // [num_groups] tokens that end all chains, or NULL
    token_set undrawn;     // tokens that are never drawn
} chain_call;

// Draws so many tokens for each sequence, or until one ends or nothing can be drawn from a row. Appends them to `texts`
// and adds them to each walk's `length`. Returns the number of rounds.
EXPORT int32_t draw_chains(decoder *decoder, team *team, const chain_call *call, void *scratch);
