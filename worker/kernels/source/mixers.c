// Gated delta nets (Qwen3-Next, Qwen3.5), Mamba-2 and short convolutions (LFM2): a projection, a convolution over the
// last inputs of a row's path, a state, gates and norms, a projection back.
//
// A row reads only inputs and state of its own path, so it has the same bits in a tree, in a prompt and alone. Rows are
// rounded where transformers rounds.
#include "mixers.h"

#include <stdlib.h>

#include "convolution.h"
#include "elementwise.h"
#include "linear.h"
#include "recurrence.h"
#include "router.h"

#define LENGTH_EPSILON 1e-6f  // of queries' and keys' lengths in delta nets
#define NUM_PARTS 4           // of a projected row

struct mixer {
    mixer_sizes sizes;
    matrix in, out;
    int first_columns[NUM_PARTS];  // by role
    int width;                     // of outputs and gates
    bool rounds;
    float *taps, *tap_bias, *rates, *step_bias, *skip, *norm;  // or NULL
    float *scales;  // of a projected row, 1 in its padding; or NULL
};

// ---- weights

static int part_width(const mixer *mixer, mixer_role role) {
    const mixer_sizes *sizes = &mixer->sizes;
    bool is_state = sizes->form != CONVOLUTION;
    switch (role) {
        case MIX_INPUTS: return sizes->num_channels;
        case MIX_GATES: return mixer->width;
        case MIX_BETAS: return sizes->form == STATE_SPACE ? 0 : is_state ? sizes->num_heads : sizes->num_channels;
        default: return sizes->num_heads;
    }
}

mixer *mixer_new(const mixer_sizes *sizes, const decoder_sizes *decoder) {
    mixer *fresh = calloc(1, sizeof(mixer));
    fresh->sizes = *sizes;
    fresh->rounds = decoder->element == BF16;
    fresh->width = sizes->form == CONVOLUTION ? sizes->num_channels : sizes->num_heads * sizes->value_dim;
    int columns = 0;
    for (int role = 0; role < NUM_PARTS; role++) {
        fresh->first_columns[role] = columns;
        columns += (int)round_up(part_width(fresh, (mixer_role)role), LANES);
    }
    fresh->in = matrix_new((element)decoder->element, decoder->hidden, columns);
    fresh->out = matrix_new((element)decoder->element, fresh->width, decoder->hidden);
    return fresh;
}

void mixer_free(mixer *mixer) {
    if (!mixer) return;
    matrix_free(&mixer->in);
    matrix_free(&mixer->out);
    float *vectors[] = {mixer->taps, mixer->tap_bias, mixer->rates, mixer->step_bias, mixer->skip, mixer->norm, mixer->scales};
    for (size_t i = 0; i < sizeof vectors / sizeof *vectors; i++) free(vectors[i]);
    free(mixer);
}

// Loads logarithms of decay rates.
static void rates_load(mixer *mixer, const float *logarithms) {
    floats_load(&mixer->rates, mixer->sizes.num_heads, logarithms);
    for (int head = 0; head < mixer->sizes.num_heads; head++) mixer->rates[head] = (float)exp_or_nan(logarithms[head]);
}

// Loads scales into the columns of their roles.
static void scales_load(mixer *mixer, const float *scales) {
    mixer->scales = realloc(mixer->scales, sizeof(float) * (size_t)mixer->in.columns);
    for (int i = 0; i < mixer->in.columns; i++) mixer->scales[i] = 1.0f;
    for (int role = 0; role < NUM_PARTS; role++) {
        int count = part_width(mixer, (mixer_role)role);
        memcpy(mixer->scales + mixer->first_columns[role], scales, sizeof(float) * (size_t)count);
        scales += count;
    }
}

void mixer_load(mixer *mixer, mixer_role role, const given_weight *given) {
    const mixer_sizes *sizes = &mixer->sizes;
    const void *numbers = given->numbers;
    switch (role) {
        case MIX_OUTPUT: matrix_load(&mixer->out, 0, ALONE, mixer->out.columns, given); break;
        case MIX_TAPS: floats_load(&mixer->taps, sizes->conv_width * sizes->num_channels, numbers); break;
        case MIX_TAP_BIAS: floats_load(&mixer->tap_bias, sizes->num_channels, numbers); break;
        case MIX_RATES: rates_load(mixer, numbers); break;
        case MIX_STEP_BIAS: floats_load(&mixer->step_bias, sizes->num_heads, numbers); break;
        case MIX_SKIP: floats_load(&mixer->skip, sizes->num_heads, numbers); break;
        case MIX_NORM: floats_load(&mixer->norm, mixer->width, numbers); break;
        case MIX_SCALES: scales_load(mixer, numbers); break;
        default: matrix_load(&mixer->in, mixer->first_columns[role] / LANES, ALONE, part_width(mixer, role), given);
    }
}

// ---- the convolution

static float *part_of(const mixer *mixer, const mixer_room *room, long row, mixer_role role) {
    return room->projected + row * mixer->in.columns + mixer->first_columns[role];
}

// Stores a row's inputs for later rows of its path.
static void keep_inputs(const mixer *mixer, const mixer_room *room, long row, const layer_steps *steps, int step) {
    const mixer_sizes *sizes = &mixer->sizes;
    float *inputs = part_of(mixer, room, row, MIX_INPUTS);
    if (sizes->form == CONVOLUTION) {
        const float *gates = part_of(mixer, room, row, MIX_BETAS);
        for (int i = 0; i < sizes->num_channels; i += LANES)
            vec_store(inputs + i, rounded(mixer->rounds, vec_mul(vec_load(inputs + i), vec_load(gates + i))));
    }
    long at = (long)(step + sizes->conv_width - 1) * sizes->num_channels;
    char *to = (char *)steps->inputs + at * (mixer->rounds ? 2 : 4);
    store(mixer->rounds ? BF16 : F32, inputs, sizes->num_channels, to);
}

static void convolve(const mixer *mixer, const layer_steps *steps, const int32_t *before, int step, float *out) {
    const mixer_sizes *sizes = &mixer->sizes;
    const convolution form = {sizes->conv_width, sizes->num_channels, mixer->rounds, sizes->form != CONVOLUTION, mixer->taps,
                              mixer->tap_bias};
    convolve_row(&form, steps->inputs, before, step, out);
}

// ---- what goes into the state

static float softplus_of(float x) { return x <= 20.0f ? (float)log_of(1.0 + exp_of(x)) : x; }

// Stores sixteen heads' numbers, rounded if the model's are; those after the last head are dropped.
static void put_heads(const mixer *mixer, const float *some, int first, bool rounds, float *to) {
    int left = mixer->sizes.num_heads - first;
    float place[LANES];
    vec_store(place, rounded(rounds && mixer->rounds, vec_load(some)));
    memcpy(to + first, place, sizeof(float) * (size_t)(left < LANES ? left : LANES));
}

// Computes betas (shares of updates), and decays e^(-rate * softplus(number + bias)).
static void delta_factors(const mixer *mixer, const float *betas, const float *numbers, float *shares, float *decays) {
    for (int first = 0; first < mixer->sizes.num_heads; first += LANES) {
        float share[LANES] = {0}, decay[LANES] = {0};
        for (int i = 0; i < LANES && first + i < mixer->sizes.num_heads; i++) {
            float step = softplus_of(numbers[first + i] + mixer->step_bias[first + i]);
            share[i] = sigmoid_of(betas[first + i]);
            decay[i] = (float)exp_or_nan(-mixer->rates[first + i] * step);
        }
        put_heads(mixer, share, first, true, shares);
        put_heads(mixer, decay, first, false, decays);
    }
}

// Computes time steps softplus(number + bias) within their limits, and decays e^(-rate * step).
static void time_steps(const mixer *mixer, const float *numbers, float *steps, float *decays) {
    const mixer_sizes *sizes = &mixer->sizes;
    for (int first = 0; first < sizes->num_heads; first += LANES) {
        float place[LANES] = {0}, decay[LANES] = {0};
        for (int i = 0; i < LANES && first + i < sizes->num_heads; i++) place[i] = numbers[first + i] + mixer->step_bias[first + i];
        vec_store(place, rounded(mixer->rounds, vec_load(place)));
        for (int i = 0; i < LANES; i++) place[i] = softplus_of(place[i]);
        vec_store(place, rounded(mixer->rounds, vec_load(place)));
        for (int i = 0; i < LANES && first + i < sizes->num_heads; i++) {
            float step = place[i] < sizes->least_step ? sizes->least_step : place[i];
            place[i] = step > sizes->most_step ? sizes->most_step : step;
            decay[i] = (float)exp_or_nan(-mixer->rates[first + i] * place[i]);
        }
        put_heads(mixer, place, first, false, steps);
        put_heads(mixer, decay, first, false, decays);
    }
}

// Scales heads to length one, times `scale`.
static void of_length_one(const float *heads, int num_heads, int head_dim, float scale, float *out) {
    for (const float *end = heads + (long)num_heads * head_dim; heads < end; heads += head_dim, out += head_dim) {
        vec squares = vec_set(0.0f);
        for (int i = 0; i < head_dim; i += LANES) squares = vec_fma(vec_load(heads + i), vec_load(heads + i), squares);
        vec share = vec_set(1.0f / __builtin_sqrtf(vec_sum(squares) + LENGTH_EPSILON));
        for (int i = 0; i < head_dim; i += LANES)
            vec_store(out + i, vec_mul(vec_mul(vec_load(heads + i), share), vec_set(scale)));
    }
}

// Computes a row's query, key, value and factors; key and decay are stored in the sequence's steps.
static void ready_row(const mixer *mixer, const mixer_room *room, long row, float *key, float *decays) {
    const mixer_sizes *sizes = &mixer->sizes;
    const float *convolved = room->convolved + row * sizes->num_channels;
    int key_width = sizes->num_key_heads * sizes->key_dim;
    float *query = room->queries + row * key_width, *value = room->values + row * mixer->width;
    float *betas = room->betas + row * sizes->num_heads, *numbers = part_of(mixer, room, row, MIX_STEPS);
    if (sizes->form == DELTA_NET) {
        float scale = 1.0f / __builtin_sqrtf((float)sizes->key_dim);
        of_length_one(convolved, sizes->num_key_heads, sizes->key_dim, scale, query);
        of_length_one(convolved + key_width, sizes->num_key_heads, sizes->key_dim, 1.0f, key);
        memcpy(value, convolved + 2 * key_width, sizeof(float) * (size_t)mixer->width);
        delta_factors(mixer, part_of(mixer, room, row, MIX_BETAS), numbers, betas, decays);
        return;
    }
    memcpy(key, convolved + mixer->width, sizeof(float) * (size_t)key_width);
    memcpy(query, convolved + mixer->width + key_width, sizeof(float) * (size_t)key_width);
    time_steps(mixer, numbers, betas, decays);
    for (int head = 0; head < sizes->num_heads; head++)
        for (int i = head * sizes->value_dim; i < (head + 1) * sizes->value_dim; i += LANES)
            vec_store(value + i, vec_mul(vec_load(convolved + i), vec_set(betas[head])));
}

// ---- the rows of a sequence up to their state

static void ready_sequence(const mixer *mixer, const mixer_room *room, const sequence_steps *rows, int number, long first,
                           recurrence *to) {
    const mixer_sizes *sizes = &mixer->sizes;
    const layer_steps *steps = rows->layers + number;
    long key_width = (long)sizes->num_key_heads * sizes->key_dim, step = rows->first_step;
    for (int row = 0; row < rows->num_rows; row++) keep_inputs(mixer, room, first + row, steps, rows->first_step + row);
    for (int row = 0; row < rows->num_rows; row++) {
        const int32_t *before = rows->before + row * (sizes->conv_width - 1);
        float *out = room->convolved + (first + row) * sizes->num_channels;
        convolve(mixer, steps, before, rows->first_step + row, out);
        if (sizes->form == CONVOLUTION) continue;
        float *key = steps->keys + (step + row) * key_width, *decays = steps->decays + (step + row) * sizes->num_heads;
        ready_row(mixer, room, first + row, key, decays);
    }
    *to = (recurrence){.num_rows = rows->num_rows, .num_heads = sizes->num_heads, .num_key_heads = sizes->num_key_heads,
                       .key_dim = sizes->key_dim, .value_dim = sizes->value_dim, .num_decays = 1, .parents = rows->parents,
                       .states = &steps->state, .queries = room->queries + first * key_width,
                       .keys = steps->keys + step * key_width, .values = room->values + first * mixer->width,
                       .betas = sizes->form == DELTA_NET ? room->betas + first * sizes->num_heads : NULL,
                       .decays = steps->decays + step * sizes->num_heads,
                       .updates = steps->updates + step * mixer->width, .found = room->found + first * mixer->width};
}

// ---- what comes out of it

// Adds a share of the row's own values to the output.
static void add_own(const mixer *mixer, const float *values, float *found) {
    int value_dim = mixer->sizes.value_dim;
    for (int head = 0; head < mixer->sizes.num_heads; head++)
        for (int i = head * value_dim; i < (head + 1) * value_dim; i += LANES)
            vec_store(found + i, vec_fma(vec_load(values + i), vec_set(mixer->skip[head]), vec_load(found + i)));
}

static vec scale_of(const mixer *mixer, const float *numbers) {
    vec squares = vec_set(0.0f);
    for (int i = 0; i < mixer->sizes.norm_width; i += LANES) squares = vec_fma(vec_load(numbers + i), vec_load(numbers + i), squares);
    return vec_set(1.0f / __builtin_sqrtf(vec_sum(squares) / (float)mixer->sizes.norm_width + mixer->sizes.epsilon));
}

// Norms, then gates; rounded after each.
static void norm_and_gate(const mixer *mixer, float *found, const float *gates, float *out) {
    bool rounds = mixer->rounds;
    for (int i = 0; i < mixer->width; i += LANES) vec_store(found + i, rounded(rounds, vec_load(found + i)));
    for (int first = 0; first < mixer->width; first += mixer->sizes.norm_width) {
        vec scale = scale_of(mixer, found + first);
        for (int i = first; i < first + mixer->sizes.norm_width; i += LANES) {
            vec a = rounded(rounds, vec_mul(vec_load(found + i), scale));
            a = rounded(rounds, vec_mul(a, vec_load(mixer->norm + i)));
            vec_store(out + i, rounded(rounds, vec_mul(a, silu(vec_load(gates + i)))));
        }
    }
}

// Gates, then norms; rounded at the end.
static void gate_and_norm(const mixer *mixer, float *found, const float *gates, float *out) {
    for (int i = 0; i < mixer->width; i += LANES) vec_store(found + i, vec_mul(vec_load(found + i), silu(vec_load(gates + i))));
    for (int first = 0; first < mixer->width; first += mixer->sizes.norm_width) {
        vec scale = scale_of(mixer, found + first);
        for (int i = first; i < first + mixer->sizes.norm_width; i += LANES)
            vec_store(out + i, rounded(mixer->rounds, vec_mul(vec_mul(vec_load(found + i), scale), vec_load(mixer->norm + i))));
    }
}

static void gate_alone(const mixer *mixer, const float *found, const float *gates, float *out) {
    bool is_convolution = mixer->sizes.form == CONVOLUTION;
    for (int i = 0; i < mixer->width; i += LANES) {
        vec gate = vec_load(gates + i);
        if (!is_convolution) gate = rounded(mixer->rounds, silu(gate));
        vec_store(out + i, rounded(mixer->rounds, vec_mul(vec_load(found + i), gate)));
    }
}

static void finish_row(const mixer *mixer, const mixer_room *room, long row) {
    const float *gates = part_of(mixer, room, row, MIX_GATES), *convolved = room->convolved + row * mixer->sizes.num_channels;
    float *found = room->found + row * mixer->width, *out = room->mixed + row * mixer->width;
    if (mixer->sizes.form == STATE_SPACE) add_own(mixer, convolved, found);
    if (mixer->sizes.form == CONVOLUTION) gate_alone(mixer, convolved, gates, out);
    else if (!mixer->sizes.norm_width) gate_alone(mixer, found, gates, out);
    else if (mixer->sizes.form == DELTA_NET) norm_and_gate(mixer, found, gates, out);
    else gate_and_norm(mixer, found, gates, out);
}

// ---- a layer

mixer_room mixer_room_new(frame *frame, const mixer *mixer, int num_rows, int num_sequences) {
    const mixer_sizes *sizes = &mixer->sizes;
    size_t rows = sizeof(float) * (size_t)num_rows, width = rows * (size_t)mixer->width;
    return (mixer_room){.read = sizes->in_scale == 1.0f ? NULL : frame_take(frame, rows * (size_t)mixer->in.depth),
                        .projected = frame_take(frame, rows * (size_t)mixer->in.columns),
                        .convolved = frame_take(frame, rows * (size_t)sizes->num_channels),
                        .queries = frame_take(frame, rows * (size_t)(sizes->num_key_heads * sizes->key_dim)),
                        .values = frame_take(frame, width),
                        .betas = frame_take(frame, rows * (size_t)sizes->num_heads),
                        .found = frame_take(frame, width),
                        .mixed = frame_take(frame, width),
                        .calls = frame_take(frame, sizeof(recurrence) * (size_t)num_sequences)};
}

// Computes the input projection, with scales of its input and output.
static void project(frame *frame, const mixer *mixer, const mixer_room *room, int num_rows, const float *normed) {
    long columns = mixer->in.columns, count = (long)num_rows * mixer->in.depth;
    if (room->read) {
        memcpy(room->read, normed, sizeof(float) * (size_t)count);
        scale_numbers(room->read, count, mixer->sizes.in_scale, mixer->rounds);
        normed = room->read;
    }
    linear(frame, &mixer->in, num_rows, normed, room->projected, columns, mixer->rounds);
    if (!mixer->scales) return;
    for (float *row = room->projected; row < room->projected + num_rows * columns; row += columns)
        for (int i = 0; i < columns; i += LANES)
            vec_store(row + i, rounded(mixer->rounds, vec_mul(vec_load(row + i), vec_load(mixer->scales + i))));
}

void mixer_run(frame *frame, const mixer *mixer, const mixer_room *room, const forward_call *call, int number,
               const float *normed, float *out) {
    project(frame, mixer, room, call->num_rows, normed);
    long first = 0;
    for (int i = 0; i < call->num_sequences; first += call->sequences[i].num_rows, i++)
        ready_sequence(mixer, room, &call->sequences[i], number, first, &room->calls[i]);
    if (mixer->sizes.num_heads) recurrence_run(frame, room->calls, call->num_sequences);
    for (long row = 0; row < call->num_rows; row++) finish_row(mixer, room, row);
    linear(frame, &mixer->out, call->num_rows, room->mixed, out, mixer->out.columns, mixer->rounds);
    if (mixer->sizes.out_scale != 1.0f)
        scale_numbers(out, (long)call->num_rows * mixer->out.columns, mixer->sizes.out_scale, mixer->rounds);
}
