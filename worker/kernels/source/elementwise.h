// What is done to rows number by number, in the floats that they are between operations.
#pragma once
#include "api.h"
#include "vectors.h"

INLINE vec rounded(bool rounds, vec a) { return rounds ? vec_round_bf16(a) : a; }

// a / (1 + e^-a), with the exponential of what is negative alone
INLINE vec silu(vec a) {
    vec zero = vec_set(0.0f), minus = vec_sub(zero, a);
    vec power = vec_exp(vec_sub(zero, vec_max(a, minus)));
    vec positive = vec_max(zero, a), negative = vec_mul(vec_sub(a, positive), power);
    return vec_div(vec_add(positive, negative), vec_add(vec_set(1.0f), power));
}

INLINE void add(float *to, const float *rows, long count, bool rounds) {
    for (long i = 0; i < count; i += LANES) vec_store(to + i, rounded(rounds, vec_add(vec_load(to + i), vec_load(rows + i))));
}

INLINE void scale_numbers(float *numbers, long count, float scale, bool rounds) {
    for (long i = 0; i < count; i += LANES)
        vec_store(numbers + i, rounded(rounds, vec_mul(vec_load(numbers + i), vec_set(scale))));
}

INLINE void load(element element, const void *from, long count, float *to) {
    for (long i = 0; i < count; i += LANES)
        vec_store(to + i, element == BF16 ? vec_load_bf16((const bf16 *)from + i) : vec_load((const float *)from + i));
}

INLINE void store(element element, const float *from, long count, void *to) {
    for (long i = 0; i < count; i += LANES) {
        if (element == BF16) vec_store_bf16((bf16 *)to + i, vec_load(from + i));
        else vec_store((float *)to + i, vec_load(from + i));
    }
}
