// One draw.
#pragma once
#include "sampling.h"

// Draw from one row; says whether its logits were such that something can be drawn. `memory` as `sampling_scratch_size`.
int64_t draw_token(
    const float *row, int64_t vocab, int64_t position, const sampling_params *params, const int32_t *counts,
    const adjustments *adjusted, void *memory, bool *is_drawable
);
