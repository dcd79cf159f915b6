// One draw, and its steps. `memory` has the size that `sampling_scratch_size` returns.
#pragma once
#include "sampling.h"

// Draws from one row, among the tokens of `mask` (NULL: all); says whether the logits allowed a draw.
int64_t draw_token(
    const float *row, int64_t vocab, int64_t position, const sampling_params *params, const int32_t *counts,
    const adjustments *adjusted, const uint32_t *mask, void *memory, bool *is_drawable
);

// Copies a row into `memory`, with all tokens in `kept`. Returns the first NaN, or -1.
int64_t plain_row(const float *row, int64_t vocab, void *memory, candidates *kept);

// Processes such a row: adds noise at a temperature; at 0 the best token is drawn.
void process_row(
    candidates *kept, int64_t position, const sampling_params *params, const int32_t *counts,
    const adjustments *adjusted, const uint32_t *mask, void *memory
);

// Computes log-probabilities of one token, and of the `num_top` likeliest, [num_top], with their ids; missing ones have
// id -1 and -inf.
void token_logprobs(
    const candidates *kept, int64_t token_id, int64_t num_top, float *logprob, int32_t *top_ids, float *top_logprobs
);
