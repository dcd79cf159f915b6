// Hyper-connections. Weights are computed in floats by scalar steps, so that every build gives the same bits.
#include "streams.h"

#include <stdlib.h>

#include "heads.h"
#include "packing.h"
#include "router.h"

static int mix_columns(const decoder_sizes *sizes, bool is_head) { return sizes->num_streams * (is_head ? 1 : 2 + sizes->num_streams); }
static long mix_stride(const decoder_sizes *sizes) { return round_up(mix_columns(sizes, false), LANES); }
static long share_stride(const decoder_sizes *sizes) { return (long)sizes->num_streams * (1 + sizes->num_streams); }

stream_weights streams_new(const decoder_sizes *sizes, bool is_head) {
    return (stream_weights){.mix = matrix_new(F32, sizes->num_streams * sizes->hidden, mix_columns(sizes, is_head)), .is_head = is_head};
}

void streams_free(stream_weights *weights) {
    matrix_free(&weights->mix);
    free(weights->bias);
    free(weights->scale);
}

stream_room *stream_room_new(frame *frame, const decoder_sizes *sizes, int num_rows) {
    size_t rows = sizeof(float) * (size_t)num_rows, hidden = (size_t)sizes->hidden;
    stream_room *room = frame_take(frame, sizeof *room);
    *room = (stream_room){.normed = frame_take(frame, rows * hidden * (size_t)sizes->num_streams),
                          .mixed = frame_take(frame, rows * (size_t)mix_stride(sizes)),
                          .shares = frame_take(frame, rows * (size_t)share_stride(sizes)),
                          .front = frame_take(frame, rows * hidden)};
    return room;
}

void streams_begin(const decoder_sizes *sizes, int num_rows, float *state) {
    long hidden = sizes->hidden;
    for (long row = num_rows - 1; row >= 0; row--)
        for (long stream = sizes->num_streams - 1; stream >= 0; stream--)
            memmove(state + (row * sizes->num_streams + stream) * hidden, state + row * hidden, sizeof(float) * (size_t)hidden);
}

// ---- weights

// Computes a softmax of each row of logits [num, num], with an epsilon added.
static void softmax_rows(const float *logits, int num, float epsilon, float *out) {
    for (int i = 0; i < num; i++, logits += num, out += num) {
        double most = logits[0], sum = 0.0, powers[MOST_STREAMS];
        for (int k = 1; k < num; k++) most = logits[k] > most ? logits[k] : most;
        for (int k = 0; k < num; k++) sum += powers[k] = exp_or_nan((double)logits[k] - most);
        for (int k = 0; k < num; k++) out[k] = (float)(powers[k] / sum) + epsilon;
    }
}

// Divides the rows of a matrix [num, num] by their sums, or its columns.
static void divide(float *matrix, int num, float epsilon, bool is_by_rows) {
    int step = is_by_rows ? 1 : num, next = is_by_rows ? num : 1;
    for (int i = 0; i < num; i++, matrix += next) {
        float sum = matrix[0];
        for (int k = 1; k < num; k++) sum += matrix[k * step];
        for (int k = 0; k < num; k++) matrix[k * step] /= sum + epsilon;
    }
}

static void mix_streams(const decoder_sizes *sizes, const float *logits, bool rounds, float *out) {
    int num = sizes->num_streams;
    float epsilon = sizes->stream_epsilon;
    softmax_rows(logits, num, epsilon, out);
    divide(out, num, epsilon, false);
    for (int i = 1; i < sizes->num_sinkhorn; i++) {
        divide(out, num, epsilon, true);
        divide(out, num, epsilon, false);
    }
    for (int i = 0; rounds && i < num * num; i++) out[i] = rounded_one(out[i]);
}

// Adds up weighted streams.
static void sum_streams(const decoder_sizes *sizes, const float *weights, int step, const float *streams, bool rounds, float *out) {
    for (int i = 0; i < sizes->hidden; i += LANES) {
        vec sum = vec_set(0.0f);
        for (int stream = 0; stream < sizes->num_streams; stream++)
            sum = vec_fma(vec_set(weights[stream * step]), vec_load(streams + (long)stream * sizes->hidden + i), sum);
        vec_store(out + i, rounded(rounds, sum));
    }
}

const float *streams_front(frame *frame, const stream_weights *weights, const decoder_sizes *sizes, const stream_room *room,
                           int num_rows, const float *state) {
    int num = sizes->num_streams, width = num * sizes->hidden;
    bool rounds = sizes->element == BF16, is_head = weights->is_head;
    decoder_sizes in_floats = *sizes;
    in_floats.element = F32;
    for (long row = 0; row < num_rows; row++) norm(&in_floats, state + row * width, NULL, width, room->normed + row * width);
    linear(frame, &weights->mix, num_rows, room->normed, room->mixed, weights->mix.columns, false);
    for (long row = 0; row < num_rows; row++) {
        float *logits = room->mixed + row * weights->mix.columns, *shares = room->shares + row * share_stride(sizes);
        for (int i = 0; i < mix_columns(sizes, is_head); i++)
            logits[i] = logits[i] * weights->scale[i < num ? 0 : i < 2 * num ? 1 : 2] + weights->bias[i];
        for (int i = 0; i < num; i++) logits[i] = sigmoid_of(logits[i]) + sizes->stream_epsilon;
        sum_streams(sizes, logits, 1, state + row * width, rounds, room->front + row * sizes->hidden);
        for (int i = 0; !is_head && i < num; i++) shares[i] = 2.0f * sigmoid_of(logits[num + i]);
        for (int i = 0; !is_head && rounds && i < num; i++) shares[i] = rounded_one(shares[i]);
        if (!is_head) mix_streams(sizes, logits + 2 * num, rounds, shares + num);
    }
    return room->front;
}

void streams_behind(const decoder_sizes *sizes, const stream_room *room, int num_rows, const float *out, float *state) {
    int num = sizes->num_streams;
    long hidden = sizes->hidden;
    bool rounds = sizes->element == BF16;
    for (long row = 0; row < num_rows; row++) {
        const float *shares = room->shares + row * share_stride(sizes);
        float *streams = state + row * num * hidden, *next = room->normed + row * num * hidden;
        for (int stream = 0; stream < num; stream++) {
            float *to = next + stream * hidden;
            sum_streams(sizes, shares + num + stream, num, streams, rounds, to);
            for (long i = 0; i < hidden; i += LANES) {
                vec share = rounded(rounds, vec_mul(vec_set(shares[stream]), vec_load(out + row * hidden + i)));
                vec_store(to + i, rounded(rounds, vec_add(share, vec_load(to + i))));
            }
        }
        memcpy(streams, next, sizeof(float) * (size_t)(num * hidden));
    }
}
