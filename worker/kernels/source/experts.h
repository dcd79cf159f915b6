// Experts of a layer: each row uses a few, and each expert is read once for all rows of a block that chose it.
#pragma once
#include "api.h"
#include "router.h"

typedef struct {
    expert_sizes sizes;
    router router;
    matrix shared_gate;      // float, one column; empty without a gate
    matrix *gate_up, *down;  // [num_experts]; gates and ups alternate, or ups only
    matrix latent_in, latent_out;  // empty if experts read whole rows
    float *router_scale;  // [hidden] of the router's rows, which are then normed first, or NULL
    float *front_norm, *behind_norm;  // of experts' input and of their sum, or NULL
    decoder_sizes decoder;
    int width;  // of experts' input and output
    bool has_shared_gate;
} experts;

// Memory that the layers of a call share, and the experts used in them.
typedef struct {
    void *places[8];
    size_t bytes[8];
    int64_t num_met;
} expert_room;

experts *experts_new(const expert_sizes *sizes, const decoder_sizes *decoder);
void experts_free(experts *experts);
void experts_load(experts *experts, expert_role role, int expert, const given_weight *given);  // `decoder_load_expert`

// Adds each row's experts, which norm it themselves if they have a norm, to `out` [num_rows, hidden] if it holds the shared expert's output, else writes
// them.
void experts_run(frame *frame, const experts *experts, expert_room *room, int num_rows, const float *rows,
                 const int32_t *token_ids, bool rounds, float *out);
