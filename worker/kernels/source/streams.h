// Hyper-connections: a row's state has several streams. A part of a layer reads a weighted sum of them; then each stream
// becomes a sum of all, plus a share of the part's output. A row's own streams decide the weights (DeepSeek V4).
#pragma once
#include "api.h"
#include "linear.h"
#include "threads.h"

// Weights in front of the parts: those of the sum, then of the shares, then of the streams among each other. The head has
// the first ones only.
typedef struct {
    matrix mix;    // of floats, from all streams of a row, normed without weights
    float *bias;   // [columns]
    float *scale;  // one number for each kind of weights
    bool is_head;
} stream_weights;

typedef struct {
    float *normed, *mixed;  // [num_rows, ...] the streams; their products
    float *shares;          // [num_rows, num_streams * (1 + num_streams)] the output's shares, then the streams'
    float *front;           // [num_rows, hidden] what the part reads
} stream_room;

stream_weights streams_new(const decoder_sizes *sizes, bool is_head);
void streams_free(stream_weights *weights);
stream_room *stream_room_new(frame *frame, const decoder_sizes *sizes, int num_rows);
// Repeats embeddings at the beginning of `state` for all streams.
void streams_begin(const decoder_sizes *sizes, int num_rows, float *state);
// Returns the sums that a part of a layer reads, or the head.
const float *streams_front(frame *frame, const stream_weights *weights, const decoder_sizes *sizes, const stream_room *room,
                           int num_rows, const float *state);
// Replaces the streams after a part, by its output [num_rows, hidden].
void streams_behind(const decoder_sizes *sizes, const stream_room *room, int num_rows, const float *out, float *state);
