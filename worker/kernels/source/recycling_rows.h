// Rows of candidates: found, mixed, written.
#pragma once
#include "recycling.h"

typedef struct {
    double value;  // a probability, its logarithm, or a confidence
    int32_t id;
} candidate;

// Exponentials and logarithms of all numbers of a list, whatever lies behind those that count: loops of a fixed length
// without a choice are vectorised.
void exp_of_all(double numbers[MOST_CANDIDATES]);
void log_of_all(double numbers[MOST_CANDIDATES]);

// Put a candidate behind those of no lower value, of which at most `limit` stay; returns their number.
int put_candidate(candidate *list, int count, int limit, candidate new);

// What may follow a pair of tokens, with log-probabilities, best first: their number, at most MOST_CANDIDATES.
int candidates_behind(const recycling_tables *tables, int64_t previous, int64_t token, candidate *found);

// Take in one text's candidates, as `recycling_write` does. Returns 0, having written nothing, for a bad number.
int write_text(
    const recycling_tables *tables, const int64_t *token_ids, const int64_t *ids, const float *logprobs,
    int64_t num_rows, const int64_t *text_rows, const int64_t *previous_ids, int64_t num_text_rows, int64_t *places
);
