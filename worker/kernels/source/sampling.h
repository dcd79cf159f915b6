// What Python sees of sampling. Every pointer, shape and index was checked there: nothing is checked here again.
#pragma once
#include "api.h"
#include "filters.h"

// How the tokens of one sequence are drawn, in the terms of worker/sampling/sampler.py.
typedef struct {
    uint64_t noise_key;
    float temperature;  // 0: the best token
    float penalty;
    filter_params filters;
} sampling_params;

// The tokens among the last `window` of a sequence: those that are penalised.
typedef struct {
    int32_t *counts;  // [vocab]; NULL: none are
    int64_t vocab;
    int64_t window;
    int64_t num_counted;  // tokens of the sequence, from its first, that went through the window
} penalty_window;

// What changes one sequence's logits in front of the temperature, beside the repetition penalty (worker/sampling/logits_processors.py).
typedef struct {
    const int64_t *bias_ids;  // [num_biased]
    const float *bias;
    int64_t num_biased;
    const int64_t *masked_ids;  // [num_masked], at positions below `first_unmasked`
    int64_t num_masked;
    int64_t first_unmasked;
    const int64_t *word_ids;  // tokens of bad words, one word behind the other
    const int64_t *word_starts;  // [num_words + 1]
    int64_t num_words;
    int64_t num_prompt;  // tokens, in which no bad word begins
    int64_t *banned_ids;  // [num_words], of which `num_banned` would end a bad word now
    int64_t num_banned;
    penalty_window output;  // all tokens behind the prompt; no counts: no penalty looks at them
    float frequency;
    float presence;
} adjustments;

// One sequence's tree and what comes of it.
typedef struct {
    const sampling_params *params;
    penalty_window *penalties;
    adjustments *adjusted;  // NULL: none
    const float *logits;  // [1 + num_nodes, vocab], row 0 the root's
    int64_t row_stride;   // numbers from row to row
    const int64_t *node_ids;
    const int64_t *parents;
    int64_t num_nodes;
    const uint32_t *masks;  // [1 + num_nodes, (vocab + 31) / 32], lowest bit first: what may come; NULL: anything
    const int64_t *token_ids;  // [length], committed
    int64_t length;
    int64_t *drawn;  // [1 + num_nodes]
    int64_t *path;   // [num_nodes]
    int64_t num_drawn;
    int64_t path_length;
    int64_t failed_row;  // -1, or the row from which nothing can be drawn
} tree_walk;

// Bytes of scratch for rows of `vocab` tokens, aligned to 64.
EXPORT int64_t sampling_scratch_size(int64_t vocab);

// Walk trees along the draws. Penalty windows are brought up to the committed tokens and no further.
EXPORT void sampling_walk(tree_walk *walks, int64_t num_walks, int64_t vocab, void *scratch);

// Log-probabilities of the tokens that a walk has `drawn` (as many as `num_drawn`, which its `path` leads to), [num_drawn],
// and of the `num_top` likeliest at each of their places, [num_drawn, num_top]: of the logits as they are, or processed, as
// they were drawn from. Call it before the tokens are committed.
EXPORT void sampling_logprobs(
    tree_walk *walk, int64_t vocab, bool is_processed, int64_t num_top, float *logprobs, int32_t *top_ids,
    float *top_logprobs, void *scratch
);

// Draw from one row, [vocab], at one position; whatever is not finite is drawn as worker/sampling/sampler.py draws it. `counts`
// of the penalty window and `adjusted` may be NULL.
EXPORT int64_t sampling_draw(
    const float *row, int64_t vocab, int64_t position, const sampling_params *params, const int32_t *counts,
    const adjustments *adjusted, void *scratch
);

// Let a window take in the tokens of a sequence that it has not seen.
EXPORT void sampling_follow(penalty_window *penalties, const int64_t *token_ids, int64_t length);

// The noise of tokens at positions, [count] each.
EXPORT void sampling_noise(
    uint64_t noise_key, const int64_t *positions, const int64_t *token_ids, int64_t count, float *noise
);

// The noise of all tokens at one position, [vocab].
EXPORT void sampling_noise_row(uint64_t noise_key, int64_t position, int64_t vocab, float *noise);

// Numbers and log-probabilities of the best eight tokens of every row of logits, [num_rows, 8] each.
EXPORT void sampling_top_candidates(
    const float *logits, int64_t num_rows, int64_t row_stride, int64_t vocab, int64_t *ids, float *logprobs
);
