// Log-probabilities of drawn tokens and of the likeliest ones, each row summed alone in a fixed order.
#include <math.h>

#include "draw.h"

// Inserts a token after those that are at least as likely: tokens come in ascending order, so ties stay in order.
static int64_t take_in(float *scores, int32_t *ids, int64_t count, int64_t room, float score, int32_t id) {
    int64_t place = count < room ? count : room - 1;
    for (; place && score > scores[place - 1]; place--) {
        scores[place] = scores[place - 1];
        ids[place] = ids[place - 1];
    }
    scores[place] = score;
    ids[place] = id;
    return count < room ? count + 1 : room;
}

// Writes the scores of the likeliest possible tokens in falling order; returns their number.
static int64_t top_scores(const candidates *kept, int64_t room, float *scores, int32_t *ids) {
    int64_t count = 0;
    float floor = -INFINITY;
    for (int64_t start = 0; room && start < kept->count; start += LANES) {
        int any = 0;
        for (int i = 0; i < LANES; i++) any |= kept->score[start + i] > floor;
        if (!any) continue;
        for (int64_t i = start; i < start + LANES; i++) {
            if (kept->score[i] <= floor) continue;
            count = take_in(scores, ids, count, room, kept->score[i], kept->id ? kept->id[i] : (int32_t)i);
            if (count == room) floor = scores[room - 1];
        }
    }
    return count;
}

// Returns the sum of exp(score - peak): in sixteen lanes, then halved. The padding is -inf and adds nothing.
static double mass_of(const candidates *kept) {
    double lanes[LANES] = {0.0};
    for (int64_t start = 0; start < kept->count; start += LANES)
        for (int i = 0; i < LANES; i++) lanes[i] += exp_of((double)kept->score[start + i] - (double)kept->peak);
    for (int half = LANES / 2; half; half /= 2)
        for (int i = 0; i < half; i++) lanes[i] += lanes[i + half];
    return lanes[0];
}

static float score_of(const candidates *kept, int64_t token_id) {
    if (!kept->id) return kept->score[token_id];
    for (int64_t i = 0; i < kept->count; i++)
        if (kept->id[i] == token_id) return kept->score[i];
    return -INFINITY;
}

void token_logprobs(
    const candidates *kept, int64_t token_id, int64_t num_top, float *logprob, int32_t *top_ids, float *top_logprobs
) {
    bool is_finite = isfinite(kept->peak);  // else no token is possible, or a score is beyond float
    double log_mass = is_finite ? log_of(mass_of(kept)) : 0.0;
    int64_t count = is_finite ? top_scores(kept, num_top, top_logprobs, top_ids) : 0;
    for (int64_t i = 0; i < count; i++)
        top_logprobs[i] = (float)(((double)top_logprobs[i] - (double)kept->peak) - log_mass);
    for (int64_t i = count; i < num_top; i++) top_ids[i] = -1, top_logprobs[i] = -INFINITY;
    *logprob = is_finite ? (float)(((double)score_of(kept, token_id) - (double)kept->peak) - log_mass) : -INFINITY;
}
