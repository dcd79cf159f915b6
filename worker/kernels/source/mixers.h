// Layers that mix a row with earlier ones through a state or a convolution, instead of attention or besides it.
#pragma once
#include "api.h"
#include "threads.h"

typedef struct mixer mixer;

mixer *mixer_new(const mixer_sizes *sizes, const decoder_sizes *decoder);
void mixer_free(mixer *mixer);  // accepts NULL
void mixer_load(mixer *mixer, mixer_role role, const given_weight *given);

// Memory for all rows of a call, shared by the mixers of its layers.
typedef struct {
    float *read, *projected, *convolved, *queries, *values, *betas, *found, *mixed;
    recurrence *calls;  // of the sequences
} mixer_room;

mixer_room mixer_room_new(frame *frame, const mixer *mixer, int num_rows, int num_sequences);
// Computes what the layer adds to normed rows [num_rows, hidden]; `number` is its index among layers with a mixer.
void mixer_run(frame *frame, const mixer *mixer, const mixer_room *room, const forward_call *call, int number,
               const float *normed, float *out);
