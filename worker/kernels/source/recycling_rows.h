// Rows of candidates: looked up, mixed and written.
#pragma once
#include "recycling.h"

typedef struct {
    double value;  // a probability, its logarithm, or a confidence
    int32_t id;
} candidate;

// Replace all numbers, even unused ones, by exponentials or logarithms: loops of fixed length are vectorised.
void exp_of_all(double numbers[MOST_CANDIDATES]);
void log_of_all(double numbers[MOST_CANDIDATES]);

// Inserts a candidate after those of at least its value, and keeps at most `limit`; returns their number.
int put_candidate(candidate *list, int count, int limit, candidate new);

// Looks up what may follow a pair of tokens, with log-probabilities, best first; returns their number, at most
// MOST_CANDIDATES.
int candidates_behind(const recycling_tables *tables, int64_t previous, int64_t token, candidate *found);

// Takes one text's candidates, as `recycling_write`. Returns 0, with nothing written, for a bad number.
int write_text(
    const recycling_tables *tables, const int64_t *token_ids, const int64_t *ids, const float *logprobs,
    int64_t num_rows, const int64_t *text_rows, const int64_t *previous_ids, int64_t num_text_rows, int64_t *places
);
