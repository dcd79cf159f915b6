// The eight likeliest tokens of every row with log-probabilities, which drafters learn from.
#include <math.h>

#include "elementary.h"
#include "sampling.h"

#define TOP 8
#define UNLIKELY -1e4f  // log-probability in rows with NaN, which are verified but never walked

typedef struct {
    float logit[TOP];
    int32_t id[TOP];
    int count;
} top_tokens;

// Inserts a token after those that are at least as high. Tokens come in ascending order, so ties stay in order; NaN is
// above all.
static void insert(top_tokens *top, float logit, int32_t id) {
    if (top->count == TOP && order_of(logit) <= order_of(top->logit[TOP - 1])) return;
    int place = top->count < TOP ? top->count++ : TOP - 1;
    for (; place && order_of(logit) > order_of(top->logit[place - 1]); place--) {
        top->logit[place] = top->logit[place - 1];
        top->id[place] = top->id[place - 1];
    }
    top->logit[place] = logit;
    top->id[place] = id;
}

// Returns the eighth highest of the maxima of sixteen interleaved parts: at most the eighth highest of all.
static float eighth_of(const float *lanes) {
    top_tokens top = {.count = 0};
    for (int i = 0; i < LANES; i++) insert(&top, lanes[i], i);
    return top.logit[TOP - 1];
}

static top_tokens best_of(const float *row, int64_t vocab, float floor) {
    top_tokens top = {.count = 0};
    int64_t i = 0;
    for (; i + LANES <= vocab; i += LANES) {
        int any = 0;
        for (int j = 0; j < LANES; j++) any |= !(row[i + j] < floor);
        if (!any) continue;
        for (int j = 0; j < LANES; j++) insert(&top, row[i + j], (int32_t)(i + j));
        if (top.count == TOP && top.logit[TOP - 1] > floor) floor = top.logit[TOP - 1];
    }
    for (; i < vocab; i++) insert(&top, row[i], (int32_t)i);
    return top;
}

// Returns the sum of exp(logit - peak): in sixteen lanes over stretches of 1,024, then the rest, then all.
static double denominator(const float *row, int64_t vocab, float peak) {
    double sum = 0.0;
    vec shift = vec_set(peak), lanes = vec_set(0.0f);
    for (int64_t i = 0; i + LANES <= vocab; i += LANES) {
        lanes = vec_add(lanes, vec_exp(vec_sub(vec_load(row + i), shift)));
        if (i % 1024 == 1024 - LANES) sum += (double)vec_sum(lanes), lanes = vec_set(0.0f);
    }
    float rest[LANES], exponentials[LANES];
    for (int j = 0; j < LANES; j++) rest[j] = j < vocab % LANES ? row[vocab - vocab % LANES + j] : -INFINITY;
    vec_store(exponentials, vec_exp(vec_sub(vec_load(rest), shift)));
    for (int64_t j = 0; j < vocab % LANES; j++) sum += (double)exponentials[j];
    return sum + (double)vec_sum(lanes);
}

static void row_candidates(const float *row, int64_t vocab, int64_t *ids, float *logprobs) {
    float highest[LANES];
    vec lanes = vec_set(-INFINITY);
    for (int64_t i = 0; i + LANES <= vocab; i += LANES) lanes = vec_max(vec_load(row + i), lanes);
    vec_store(highest, lanes);
    top_tokens top = best_of(row, vocab, eighth_of(highest));
    float peak = top.logit[0];
    float log_total = isfinite(peak) ? (float)((double)peak + log_of(denominator(row, vocab, peak))) : peak;
    for (int i = 0; i < TOP; i++) {
        float logprob = top.logit[i] - log_total;
        ids[i] = top.id[i];
        logprobs[i] = isnan(logprob) ? UNLIKELY : logprob;
    }
}

void sampling_top_candidates(
    const float *logits, int64_t num_rows, int64_t row_stride, int64_t vocab, int64_t *ids, float *logprobs
) {
    for (int64_t i = 0; i < num_rows; i++)
        row_candidates(logits + i * row_stride, vocab, ids + i * TOP, logprobs + i * TOP);
}
