// Scores of experts, the best experts of each row, and their weights.
//
// Scores are computed in doubles and rounded once, so every build gives the same bits.
#include "router.h"

#include <stdlib.h>

#include "elementary.h"
#include "elementwise.h"

router router_new(const expert_sizes *sizes, int hidden) {
    return (router){.sizes = *sizes, .weight = matrix_new(F32, hidden, sizes->num_experts)};
}

void router_free(router *router) {
    matrix_free(&router->weight);
    free(router->choice_bias);
    free(router->choice_scales);
    free(router->choices);
}

float sigmoid_of(float x) { return x <= -700.0f ? 0.0f : (float)(1.0 / (1.0 + exp_or_nan(-(double)x))); }

static void router_softmax(const float *logits, int count, float *scores) {
    double powers[MOST_EXPERTS], sum = 0.0;
    float most = logits[0];
    for (int i = 1; i < count; i++) most = logits[i] > most ? logits[i] : most;
    for (int i = 0; i < count; i++) sum += powers[i] = exp_or_nan((double)logits[i] - (double)most);
    for (int i = 0; i < count; i++) scores[i] = (float)(powers[i] / sum);
}

// sqrt(log(1 + e^x)), rounded once. Below -20 the logarithm is e^x to all of a float's digits.
static float root_softplus(float x) {
    double power = exp_or_nan((double)x);
    return (float)__builtin_sqrt(x > 30.0f ? (double)x : x < -20.0f ? power : log_of(1.0 + power));
}

static void score_experts(const expert_sizes *sizes, const float *logits, float *scores) {
    if (sizes->score == SOFTMAX_OF_ALL) router_softmax(logits, sizes->num_experts, scores);
    else if (sizes->score == SIGMOID)
        for (int i = 0; i < sizes->num_experts; i++) scores[i] = sigmoid_of(logits[i]);
    else if (sizes->score == ROOT_SOFTPLUS)
        for (int i = 0; i < sizes->num_experts; i++) scores[i] = root_softplus(logits[i]);
    else memcpy(scores, logits, sizeof(float) * (size_t)sizes->num_experts);
}

// Takes the best remaining score; ties, and NaN, go to the lower index.
static int take_best(const float *scores, bool *is_left, int count) {
    int best = -1;
    for (int i = 0; i < count; i++)
        if (is_left[i] && (best < 0 || scores[i] > scores[best])) best = i;
    is_left[best] = false;
    return best;
}

// Returns the sum of a group's best scores.
static float group_score(const float *scores, int count, int num_best) {
    bool is_left[MOST_EXPERTS];
    memset(is_left, true, sizeof is_left);
    float sum = scores[take_best(scores, is_left, count)];
    for (int i = 1; i < num_best && i < count; i++) sum += scores[take_best(scores, is_left, count)];
    return sum;
}

// Leaves only the experts of the best groups.
static void open_groups(const expert_sizes *sizes, const float *scores, bool *is_open) {
    int width = sizes->num_experts / sizes->num_groups;
    bool is_left[MOST_EXPERTS];
    float groups[MOST_EXPERTS];
    memset(is_left, true, sizeof is_left);
    memset(is_open, sizes->num_groups == sizes->num_chosen_groups, MOST_EXPERTS);
    if (sizes->num_groups == sizes->num_chosen_groups) return;
    for (int i = 0; i < sizes->num_groups; i++) groups[i] = group_score(scores + i * width, width, sizes->num_best_of_group);
    for (int i = 0; i < sizes->num_chosen_groups; i++)
        memset(is_open + take_best(groups, is_left, sizes->num_groups) * width, true, (size_t)width);
}

static void choose_experts(const router *router, const float *scores, int32_t *choices) {
    const expert_sizes *sizes = &router->sizes;
    float shifted[MOST_EXPERTS];
    bool is_open[MOST_EXPERTS];
    for (int i = 0; i < sizes->num_experts && router->choice_bias; i++) shifted[i] = scores[i] + router->choice_bias[i];
    if (router->choice_bias) scores = shifted;
    open_groups(sizes, scores, is_open);
    for (int i = 0; i < sizes->num_chosen; i++) choices[i] = take_best(scores, is_open, sizes->num_experts);
}

// Computes each choice's weight: its softmax over the experts that no earlier choice took and whose logits differ from
// its own by at most twice the jitter, relative to the larger.
static void mix_sparsely(const expert_sizes *sizes, const float *logits, const int32_t *choices, float *weights) {
    bool is_left[MOST_EXPERTS];
    memset(is_left, true, sizeof is_left);
    for (int choice = 0; choice < sizes->num_chosen; choice++) {
        float most = logits[choices[choice]];
        double sum = 0.0;
        for (int i = 0; i < sizes->num_experts; i++) {
            float size = __builtin_fabsf(logits[i]);
            bool is_far = (most - logits[i]) / (size < most ? most : size) > 2.0f * sizes->jitter;
            if (is_left[i] && !is_far) sum += exp_or_nan((double)logits[i] - (double)most);
        }
        weights[choice] = (float)(1.0 / sum);
        is_left[choices[choice]] = false;
    }
}

static void weigh_experts(const router *router, const float *scores, const int32_t *choices, bool rounds, float *weights) {
    const expert_sizes *sizes = &router->sizes;
    float chosen[MOST_EXPERTS], sum = 0.0f;
    for (int i = 0; i < sizes->num_chosen; i++) chosen[i] = scores[choices[i]];
    if (sizes->score == SOFTMAX_OF_CHOSEN) router_softmax(chosen, sizes->num_chosen, weights);
    else if (sizes->score == SPARSE_MIXER) mix_sparsely(sizes, scores, choices, weights);
    else if (sizes->score == SIGMOID_OF_CHOSEN)
        for (int i = 0; i < sizes->num_chosen; i++) weights[i] = sigmoid_of(chosen[i]);
    else memcpy(weights, chosen, sizeof(float) * (size_t)sizes->num_chosen);
    for (int i = 0; i < sizes->num_chosen; i++) sum += weights[i];
    if (sum < sizes->least_sum) sum = sizes->least_sum;
    for (int i = 0; i < sizes->num_chosen; i++) {
        if (sizes->is_normalised) weights[i] /= sum;
        weights[i] *= sizes->scale;
        if (router->choice_scales) weights[i] *= router->choice_scales[choices[i]];
        if (rounds && sizes->rounds_weights) weights[i] = rounded_one(weights[i]);
    }
}

static bool has_nan(const float *numbers, int count) {
    for (int i = 0; i < count; i++)
        if (numbers[i] != numbers[i]) return true;
    return false;
}

void route(frame *frame, const router *router, int num_rows, const float *rows, const int32_t *token_ids, bool rounds,
           int32_t *choices, float *weights) {
    const expert_sizes *sizes = &router->sizes;
    long columns = router->weight.columns;
    float *logits = frame_take(frame, sizeof(float) * (size_t)num_rows * (size_t)columns), scores[MOST_EXPERTS];
    bool is_damaged = router->choice_bias && has_nan(router->choice_bias, sizes->num_experts);
    linear(frame, &router->weight, num_rows, rows, logits, columns, rounds && sizes->rounds_logits);
    for (long row = 0; row < num_rows; row++) {
        float *row_weights = weights + row * sizes->num_chosen;
        score_experts(sizes, logits + row * columns, scores);
        if (router->choices)
            memcpy(choices + row * sizes->num_chosen, router->choices + (long)token_ids[row] * sizes->num_chosen,
                   sizeof(int32_t) * (size_t)sizes->num_chosen);
        else choose_experts(router, scores, choices + row * sizes->num_chosen);
        weigh_experts(router, scores, choices + row * sizes->num_chosen, rounds, row_weights);
        if (is_damaged || has_nan(logits + row * columns, sizes->num_experts))  // damage must show, and comparisons ignore NaN
            for (int i = 0; i < sizes->num_chosen; i++) row_weights[i] = __builtin_nanf("");
    }
}
