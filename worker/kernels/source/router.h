// Which experts of a layer each row uses, and their weights.
#pragma once
#include "api.h"
#include "linear.h"
#include "threads.h"

typedef struct {
    expert_sizes sizes;
    matrix weight;       // float, whatever the model's element: the same choices in all builds
    float *choice_bias;  // [num_experts] added to scores for the choice only, or NULL
    float *choice_scales;  // [num_experts] factors of weights, or NULL
    int32_t *choices;      // [vocab, num_chosen] of each token, or NULL
} router;

router router_new(const expert_sizes *sizes, int hidden);
void router_free(router *router);
// Writes choices and weights [num_rows, num_chosen], best first, ties by the lower index; rounded if the form says so
// and the model `rounds`. With a table, `token_ids` [num_rows] choose.
void route(frame *frame, const router *router, int num_rows, const float *rows, const int32_t *token_ids, bool rounds,
           int32_t *choices, float *weights);

// 1 / (1 + e^-x), rounded once.
float sigmoid_of(float x);
