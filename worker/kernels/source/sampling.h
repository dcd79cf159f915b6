// What Python calls for sampling. Python checks every pointer, shape and index; nothing is checked here.
#pragma once
#include "api.h"
#include "filters.h"

// How the tokens of one sequence are drawn, as in worker/sampling/sampler.py.
typedef struct {
    uint64_t noise_key;
    float temperature;  // 0: the best token
    float penalty;
    filter_params filters;
} sampling_params;

// The penalised tokens: the last `window` of a sequence.
typedef struct {
    int32_t *counts;  // [vocab]; NULL: no penalty
    int64_t vocab;
    int64_t window;
    int64_t num_counted;  // how many of the sequence's tokens the window has seen
} penalty_window;

// What changes one sequence's logits before the temperature, besides the repetition penalty
// (worker/sampling/logits_processors.py).
typedef struct {
    const int64_t *bias_ids;  // [num_biased]
    const float *bias;
    int64_t num_biased;
    const int64_t *masked_ids;  // [num_masked], at positions below `first_unmasked`
    int64_t num_masked;
    int64_t first_unmasked;
    const int64_t *word_ids;  // tokens of bad words, concatenated
    const int64_t *word_starts;  // [num_words + 1]
    int64_t num_words;
    int64_t num_prompt;  // tokens in which no bad word begins
    int64_t *banned_ids;  // [num_words], of which the first `num_banned` would end a bad word now
    int64_t num_banned;
    penalty_window output;  // all tokens after the prompt; without counts no penalty uses them
    float frequency;
    float presence;
} adjustments;

// One sequence's tree, and its results.
typedef struct {
    const sampling_params *params;
    penalty_window *penalties;
    adjustments *adjusted;  // or NULL
    const float *logits;  // [1 + num_nodes, vocab], row 0 the root's
    int64_t row_stride;   // floats between rows
    const int64_t *node_ids;
    const int64_t *parents;
    int64_t num_nodes;
    const uint32_t *masks;  // [1 + num_nodes, (vocab + 31) / 32], lowest bit first: allowed tokens; NULL: all
    const int64_t *token_ids;  // [length], committed
    int64_t length;
    int64_t *drawn;  // [1 + num_nodes]
    int64_t *path;   // [num_nodes]
    int64_t num_drawn;
    int64_t path_length;
    int64_t failed_row;  // -1, or the row from which nothing can be drawn
} tree_walk;

// Returns the bytes of scratch for rows of `vocab` tokens, aligned to 64.
EXPORT int64_t sampling_scratch_size(int64_t vocab);

// Walks trees along the draws. Penalty windows are updated to the committed tokens only.
EXPORT void sampling_walk(tree_walk *walks, int64_t num_walks, int64_t vocab, void *scratch);

// Computes log-probabilities of the tokens that a walk has `drawn`, [num_drawn], and of the `num_top` likeliest at each
// of their positions, [num_drawn, num_top], from raw or processed logits. Must be called before the tokens are
// committed.
EXPORT void sampling_logprobs(
    tree_walk *walk, int64_t vocab, bool is_processed, int64_t num_top, float *logprobs, int32_t *top_ids,
    float *top_logprobs, void *scratch
);

// Updates a window with the tokens of a sequence that it has not seen.
EXPORT void sampling_follow(penalty_window *penalties, const int64_t *token_ids, int64_t length);

// Computes the noise of all tokens at one position, [vocab].
EXPORT void sampling_noise_row(uint64_t noise_key, int64_t position, int64_t vocab, float *noise);

// Writes ids and log-probabilities of the best eight tokens of every row, [num_rows, 8] each.
EXPORT void sampling_top_candidates(
    const float *logits, int64_t num_rows, int64_t row_stride, int64_t vocab, int64_t *ids, float *logprobs
);
