// GRIFFIN's token-guided fusion before its decoder layer, and its token-enhanced head after it.
#include <stdlib.h>

#include "elementwise.h"
#include "linear.h"

#define LAYER_NORM_EPSILON 1e-5f

enum { MOST_PARTS = 2 };

struct griffin {
    griffin_sizes sizes;
    matrix fuse, expand, contract, head;  // `head`: both features side by side
    float *norm_weights[MOST_PARTS], *norm_biases[MOST_PARTS];
};

griffin *griffin_new(const griffin_sizes *sizes) {
    griffin *fresh = calloc(1, sizeof(griffin));
    int width = sizes->num_parts * sizes->hidden, kind = sizes->element;
    fresh->sizes = *sizes;
    fresh->fuse = matrix_new(kind, 2 * sizes->hidden, sizes->hidden);
    if (sizes->expansion) fresh->expand = matrix_new(kind, width, sizes->expansion);
    if (width) fresh->contract = matrix_new(kind, sizes->expansion ? sizes->expansion : width, sizes->hidden);
    fresh->head = matrix_new(kind, sizes->hidden, 2 * sizes->hidden);
    return fresh;
}

void griffin_free(griffin *griffin) {
    matrix_free(&griffin->fuse);
    matrix_free(&griffin->expand);
    matrix_free(&griffin->contract);
    matrix_free(&griffin->head);
    for (int part = 0; part < MOST_PARTS; part++) {
        free(griffin->norm_weights[part]);
        free(griffin->norm_biases[part]);
    }
    free(griffin);
}

static void load_norm(griffin *griffin, int part, const given_weight *given) {
    vector_load(&griffin->norm_weights[part], griffin->sizes.element, griffin->sizes.hidden, given->numbers);
    vector_load(&griffin->norm_biases[part], griffin->sizes.element, griffin->sizes.hidden, given->bias);
}

void griffin_load(griffin *griffin, int role, const given_weight *given) {
    int hidden = griffin->sizes.hidden;
    switch ((griffin_role)role) {
        case FUSE: matrix_load(&griffin->fuse, 0, ALONE, hidden, given); break;
        case EXPAND: matrix_load(&griffin->expand, 0, ALONE, griffin->sizes.expansion, given); break;
        case CONTRACT: matrix_load(&griffin->contract, 0, ALONE, hidden, given); break;
        case PREDICT: matrix_load(&griffin->head, 0, ALONE, hidden, given); break;
        case REGRESS: matrix_load(&griffin->head, hidden / LANES, ALONE, hidden, given); break;
        case FIRST_PART_NORM: load_norm(griffin, 0, given); break;
        case SECOND_PART_NORM: load_norm(griffin, 1, given); break;
    }
}

// Norms to mean 0 and variance 1, then applies weight and bias; rounded once at the end.
static void layer_norm(const float *row, const float *weight, const float *bias, int count, bool rounds, float *out) {
    vec sums = vec_set(0.0f), squares = vec_set(0.0f);
    for (int i = 0; i < count; i += LANES) sums = vec_add(sums, vec_load(row + i));
    vec mean = vec_set(vec_sum(sums) / (float)count);
    for (int i = 0; i < count; i += LANES) {
        vec a = vec_sub(vec_load(row + i), mean);
        squares = vec_fma(a, a, squares);
    }
    vec scale = vec_set(1.0f / __builtin_sqrtf(vec_sum(squares) / (float)count + LAYER_NORM_EPSILON));
    for (int i = 0; i < count; i += LANES) {
        vec a = vec_mul(vec_sub(vec_load(row + i), mean), scale);
        vec_store(out + i, rounded(rounds, vec_fma(a, vec_load(weight + i), vec_load(bias + i))));
    }
}

// Writes the normed inputs of the second fusion side by side: parts [num_rows, num_parts * hidden].
static void lay_out(const griffin *griffin, int num_rows, const float *pairs, const float *fused, float *parts) {
    int hidden = griffin->sizes.hidden, num_parts = griffin->sizes.num_parts;
    bool rounds = griffin->sizes.element == BF16;
    for (long row = 0; row < num_rows; row++)
        for (int part = 0; part < num_parts; part++) {
            const float *of[] = {pairs + row * 2 * hidden, pairs + row * 2 * hidden + hidden, fused + row * hidden};
            layer_norm(of[griffin->sizes.parts[part]], griffin->norm_weights[part], griffin->norm_biases[part], hidden,
                       rounds, parts + (row * num_parts + part) * hidden);
        }
}

static float *take_rows(frame *frame, int num_rows, int width) {
    return frame_take(frame, sizeof(float) * (size_t)num_rows * (size_t)width);
}

// Adds the second fusion to the first one in `state`.
static void guide(const griffin *griffin, frame *frame, int num_rows, const float *pairs, float *state) {
    const griffin_sizes *sizes = &griffin->sizes;
    bool rounds = sizes->element == BF16;
    float *wide = take_rows(frame, num_rows, sizes->num_parts * sizes->hidden), *guided = take_rows(frame, num_rows, sizes->hidden);
    lay_out(griffin, num_rows, pairs, state, wide);
    if (sizes->expansion) {
        float *expanded = take_rows(frame, num_rows, sizes->expansion);
        linear(frame, &griffin->expand, num_rows, wide, expanded, sizes->expansion, rounds);
        for (long i = 0; i < (long)num_rows * sizes->expansion; i += LANES)
            vec_store(expanded + i, rounded(rounds, silu(vec_load(expanded + i))));
        wide = expanded;
    }
    linear(frame, &griffin->contract, num_rows, wide, guided, sizes->hidden, rounds);
    add(state, guided, (long)num_rows * sizes->hidden, rounds);
}

void griffin_fuse(griffin *griffin, team *team, int num_rows, const void *features, const void *embeddings, float *state) {
    frame *frame = frame_open(team);
    int hidden = griffin->sizes.hidden, kind = griffin->sizes.element;
    long bytes = (long)hidden * (kind == BF16 ? 2 : 4);
    float *pairs = take_rows(frame, num_rows, 2 * hidden);
    for (long row = 0; row < num_rows; row++) {
        load(kind, (const char *)features + row * bytes, hidden, pairs + row * 2 * hidden);
        load(kind, (const char *)embeddings + row * bytes, hidden, pairs + row * 2 * hidden + hidden);
    }
    linear(frame, &griffin->fuse, num_rows, pairs, state, hidden, kind == BF16);
    if (griffin->sizes.num_parts) guide(griffin, frame, num_rows, pairs, state);
    frame_close(frame);
}

void griffin_head(griffin *griffin, team *team, int num_rows, const float *state, void *predicted, void *regressed) {
    frame *frame = frame_open(team);
    int hidden = griffin->sizes.hidden, kind = griffin->sizes.element;
    long bytes = (long)hidden * (kind == BF16 ? 2 : 4);
    float *both = take_rows(frame, num_rows, 2 * hidden);
    linear(frame, &griffin->head, num_rows, state, both, 2 * hidden, kind == BF16);
    for (long row = 0; row < num_rows; row++) {
        store(kind, both + row * 2 * hidden, hidden, (char *)predicted + row * bytes);
        store(kind, both + row * 2 * hidden + hidden, hidden, (char *)regressed + row * bytes);
    }
    frame_close(frame);
}
