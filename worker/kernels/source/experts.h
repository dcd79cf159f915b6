// Experts of a layer: each row meets its own few, and each expert is read once for all rows of a block that chose it.
#pragma once
#include "api.h"
#include "router.h"

typedef struct {
    expert_sizes sizes;
    router router;
    matrix shared_gate;      // of floats, one column; without any where the part that all rows meet has no gate
    matrix *gate_up, *down;  // [num_experts]; gates and ups in turns; or ups alone
    matrix latent_in, latent_out;  // empty where experts read rows as they are
    activation activation;
    int hidden, width;  // of a row; of what experts read and give
    bool has_gates, has_shared_gate;
} experts;

// Memory that the layers of a call share, and the experts that rows met in them.
typedef struct {
    void *places[7];
    size_t bytes[7];
    int64_t num_met;
} expert_room;

experts *experts_new(const expert_sizes *sizes, const decoder_sizes *decoder);
void experts_free(experts *experts);
// Take a weight and a bias (or NULL) in, as `decoder_load_expert` has them.
void experts_load(experts *experts, expert_role role, int expert, const void *weight, const void *bias);
void experts_load_quantized(experts *experts, expert_role role, int expert, const quantized_rows *weight,
                            const void *bias);

// Adds to `out` [num_rows, hidden], where it holds the part that all rows meet, what the experts of each row give;
// else writes it there.
void experts_run(frame *frame, const experts *experts, expert_room *room, int num_rows, const float *rows, bool rounds,
                 float *out);
