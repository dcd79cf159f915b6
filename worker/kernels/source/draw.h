// One draw, and its parts. `memory` as `sampling_scratch_size` says.
#pragma once
#include "sampling.h"

// Draw from one row, of which `mask` has the tokens that may come, or is NULL; says whether its logits were such that
// something can be drawn.
int64_t draw_token(
    const float *row, int64_t vocab, int64_t position, const sampling_params *params, const int32_t *counts,
    const adjustments *adjusted, const uint32_t *mask, void *memory, bool *is_drawable
);

// Copy a row into `memory`, where `kept` then lies, all tokens. Returns the first NaN, or -1.
int64_t plain_row(const float *row, int64_t vocab, void *memory, candidates *kept);

// Bring such a row to what is drawn from: with noise at a temperature, the best one at 0.
void process_row(
    candidates *kept, int64_t position, const sampling_params *params, const int32_t *counts,
    const adjustments *adjusted, const uint32_t *mask, void *memory
);

// The log-probability of one token among candidates, and those of the `num_top` likeliest, [num_top], with their numbers.
// Where there are fewer that can come, the others are no token, -1, and have -inf.
void token_logprobs(
    const candidates *kept, int64_t token_id, int64_t num_top, float *logprob, int32_t *top_ids, float *top_logprobs
);
