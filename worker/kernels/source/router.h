// Which experts of a layer each row meets, and with which weights.
#pragma once
#include "api.h"
#include "linear.h"
#include "threads.h"

typedef struct {
    expert_sizes sizes;
    matrix weight;       // of floats, whatever the model's element: one choice for all builds
    float *choice_bias;  // [num_experts] added to scores where experts are chosen, or NULL
} router;

router router_new(const expert_sizes *sizes, int hidden);
void router_free(router *router);
// Choices and weights [num_rows, num_chosen], the best first, ties to the lower number; rounded where the form says so
// and the model `rounds`.
void route(frame *frame, const router *router, int num_rows, const float *rows, bool rounds, int32_t *choices,
           float *weights);

// 1 / (1 + e^-x), rounded once.
float sigmoid_of(float x);
