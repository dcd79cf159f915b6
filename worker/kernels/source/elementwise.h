// Elementwise operations on rows of floats.
#pragma once
#include "api.h"
#include "elementary.h"
#include "vectors.h"

INLINE vec rounded(bool rounds, vec a) { return rounds ? vec_round_bf16(a) : a; }

// Rounds one number to bf16.
INLINE float rounded_one(float a) {
    float lanes[LANES];
    vec_store(lanes, vec_round_bf16(vec_set(a)));
    return lanes[0];
}

// Returns the smaller number; NaN in `a` stays, since vec_max returns its second operand then.
INLINE vec least(vec a, vec b) {
    vec zero = vec_set(0.0f);
    return vec_sub(zero, vec_max(vec_sub(zero, b), vec_sub(zero, a)));
}

// Returns a number within a limit, or itself without one (0).
INLINE vec within(float limit, vec a) { return limit == 0.0f ? a : vec_max(vec_set(-limit), least(a, vec_set(limit))); }

// a / (1 + e^-b), by exponentials of negative numbers; a and b have the same sign
INLINE vec by_sigmoid(vec a, vec b) {
    vec zero = vec_set(0.0f), minus = vec_sub(zero, b);
    vec power = vec_exp(vec_sub(zero, vec_max(b, minus)));
    vec positive = vec_max(zero, a), negative = vec_mul(vec_sub(a, positive), power);
    return vec_div(vec_add(positive, negative), vec_add(vec_set(1.0f), power));
}

// 1 / (1 + e^-a); for negative a: e^a / (1 + e^a). NaN stays.
INLINE vec sigmoid(vec a) {
    vec zero = vec_set(0.0f), one = vec_set(1.0f), minus = vec_sub(zero, a);
    vec power = vec_exp(vec_sub(zero, vec_max(a, minus)));
    vec is_positive = vec_sub(zero, vec_max(vec_sub(zero, one), vec_mul(vec_max(zero, a), vec_set(-3e38f))));  // 1 or 0
    return vec_div(vec_max(power, is_positive), vec_add(one, power));
}

INLINE vec silu(vec a) { return by_sigmoid(a, a); }

// GELU by tanh(b), b = sqrt(2 / pi) (a + 0.044715 a^3), since (1 + tanh(b)) / 2 = 1 / (1 + e^-2b)
INLINE vec gelu_tanh(vec a) {
    vec share = vec_fma(vec_mul(a, a), vec_set(0.07135481627260025f), vec_set(1.5957691216057308f));
    return by_sigmoid(a, vec_mul(a, share));
}

INLINE vec relu2(vec a) {
    vec positive = vec_max(vec_set(0.0f), a);
    return vec_mul(positive, positive);
}

// xIELU (Huang and Schlag 2024): p a^2 + b a for positive a, else n (e^min(a, e) - 1 - a) + b a; curve: p, n, b, e
INLINE vec xielu(vec a, const float *curve) {
    vec zero = vec_set(0.0f), one = vec_set(1.0f), positive = vec_max(zero, a), negative = vec_sub(a, positive);
    vec is_positive = vec_sub(zero, vec_max(vec_sub(zero, one), vec_mul(positive, vec_set(-3e38f))));  // 1 or 0
    vec low = vec_sub(zero, vec_max(vec_set(-curve[3]), vec_sub(zero, a)));
    vec bent = vec_sub(vec_expm1(vec_max(low, vec_set(-20.0f))), negative);
    bent = vec_mul(vec_mul(bent, vec_sub(one, is_positive)), vec_set(curve[1]));
    vec square = vec_mul(vec_mul(positive, vec_set(curve[0])), positive);
    return vec_fma(a, vec_set(curve[2]), vec_add(square, bent));
}

// `curve` is used by XIELU only.
INLINE vec activated(activation activation, const float *curve, vec a) {
    if (activation == XIELU) return xielu(a, curve);
    return activation == GELU_TANH ? gelu_tanh(a) : activation == RELU2 ? relu2(a) : silu(a);
}

typedef struct {
    activation activation;
    const float *curve;
    float limit, slope;  // `gate_limit` and `gate_slope` of sizes
    bool rounds;
} gate_form;

// Returns activated gates times ups, not yet rounded.
INLINE vec gated(const gate_form *form, vec gate, vec up) {
    if (form->limit != 0.0f) gate = least(gate, vec_set(form->limit));
    up = within(form->limit, up);
    if (form->slope == 0.0f) return vec_mul(rounded(form->rounds, activated(form->activation, form->curve, gate)), up);
    vec share = rounded(form->rounds, by_sigmoid(gate, vec_mul(gate, vec_set(form->slope))));
    return vec_mul(rounded(form->rounds, vec_add(up, vec_set(1.0f))), share);
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
