// Layers that mix a row with those in front of it by a state or a convolution, in place of attention.
#pragma once
#include "api.h"
#include "threads.h"

typedef struct mixer mixer;

mixer *mixer_new(const mixer_sizes *sizes, const decoder_sizes *decoder);
void mixer_free(mixer *mixer);  // NULL is none
void mixer_load(mixer *mixer, mixer_role role, const void *weight, const void *bias);
void mixer_load_quantized(mixer *mixer, mixer_role role, const quantized_rows *weight, const void *bias);

// Places of numbers of all rows of a call, which the mixers of its layers share.
typedef struct {
    float *read, *projected, *convolved, *queries, *values, *betas, *found, *mixed;
    recurrence *calls;  // of the sequences
} mixer_room;

mixer_room mixer_room_new(frame *frame, const mixer *mixer, int num_rows, int num_sequences);
// From normed rows [num_rows, hidden] to what the layer adds to them; `number` is the layer's among those with a mixer.
void mixer_run(frame *frame, const mixer *mixer, const mixer_room *room, const forward_call *call, int number,
               const float *normed, float *out);
