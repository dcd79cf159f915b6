// Norms of rows, and rotation of heads by position.
#pragma once
#include "api.h"
#include "elementwise.h"
#include "linear.h"

static inline void norm_load(const decoder_sizes *sizes, float **norm, int count, const void *weight) {
    vector_load(norm, sizes->element, sizes->norm_form == SHIFTED ? 2 * count : count, weight);
    if (sizes->norm_form != ONE_MORE) return;
    for (int i = 0; i < count; i++) (*norm)[i] += 1.0f;
}

INLINE float mean_of(const float *row, int count) {
    vec sum = vec_set(0.0f);
    for (int i = 0; i < count; i += LANES) sum = vec_add(sum, vec_load(row + i));
    return vec_sum(sum) / (float)count;
}

// Root mean square norm, optionally of distances from the mean, with weights, or weights and biases. May run in place.
static inline void norm_with(const decoder_sizes *sizes, float epsilon, const float *row, const float *weight, int count,
                             float *out) {
    bool rounds = sizes->element == BF16, rounds_twice = rounds && sizes->norm_form == ROUNDED_TWICE;
    const float *shift = weight && sizes->norm_form == SHIFTED ? weight + count : NULL;
    vec squares = vec_set(0.0f), centre = vec_set(sizes->norm_form == CENTRED || shift ? mean_of(row, count) : 0.0f);
    for (int i = 0; i < count; i += LANES) {
        vec a = vec_sub(vec_load(row + i), centre);
        squares = vec_fma(a, a, squares);
    }
    vec scale = vec_set(1.0f / __builtin_sqrtf(vec_sum(squares) / (float)count + epsilon));
    for (int i = 0; i < count; i += LANES) {
        vec a = rounded(rounds_twice, vec_mul(vec_sub(vec_load(row + i), centre), scale));
        if (weight) a = vec_mul(a, vec_load(weight + i));
        vec_store(out + i, rounded(rounds, shift ? vec_add(a, vec_load(shift + i)) : a));
    }
}

static inline void norm(const decoder_sizes *sizes, const float *row, const float *weight, int count, float *out) {
    norm_with(sizes, sizes->epsilon, row, weight, count, out);
}

// Rotates pairs of dimensions, one of each half, by a position's angles. Both write up to sixteen floats too many.
static inline void rotate(const float *head, const float *angles, int head_dim, bool rounds, float *out) {
    int half = head_dim / 2;
    const float *cosines = angles, *sines = angles + half;
    for (int i = 0; i < half; i += LANES) {
        vec back = vec_mul(vec_load(head + half + i), vec_load(sines + i));
        vec a = vec_fma(vec_load(head + i), vec_load(cosines + i), vec_sub(vec_set(0.0f), back));
        vec_store(out + i, rounded(rounds, a));
    }
    for (int i = 0; i < half; i += LANES) {
        vec ahead = vec_mul(vec_load(head + i), vec_load(sines + i));
        vec a = vec_fma(vec_load(head + half + i), vec_load(cosines + i), ahead);
        vec_store(out + half + i, rounded(rounds, a));
    }
}
