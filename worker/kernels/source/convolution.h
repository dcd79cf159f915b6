// Causal convolutions over the last inputs of a row's path, per channel.
#pragma once
#include "elementwise.h"

typedef struct {
    int width, num_channels;
    bool rounds, has_silu;  // of the output
    const float *taps;      // [width, num_channels]
    const float *bias;      // NULL: none
} convolution;

static vec input_at(bool rounds, const void *inputs, long at) {
    return rounds ? vec_load_bf16((const bf16 *)inputs + at) : vec_load((const float *)inputs + at);
}

// Adds the first input's product, then later ones in order, then the bias; `before` are the steps of the inputs.
static void convolve_row(const convolution *form, const void *inputs, const int32_t *before, int step, float *out) {
    int width = form->width, num_channels = form->num_channels;
    for (int i = 0; i < num_channels; i += LANES) {
        vec sum = vec_set(0.0f);
        for (int tap = 0; tap < width; tap++) {
            long at = (long)((tap < width - 1 ? before[tap] : step) + width - 1) * num_channels + i;
            sum = vec_fma(input_at(form->rounds, inputs, at), vec_load(form->taps + (long)tap * num_channels + i), sum);
        }
        if (form->bias) sum = vec_add(sum, vec_load(form->bias + i));
        sum = rounded(form->rounds, sum);
        vec_store(out + i, form->has_silu ? rounded(form->rounds, silu(sum)) : sum);
    }
}
