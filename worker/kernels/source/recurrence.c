// Layers with a state per head instead of keys and values: S = decay * S + key (x) update, then query . S. A state's
// row is rounded after the product and after the sum, so folding steps gives the same bits as the rows.
#include "recurrence.h"

#include "vectors.h"

#define MOST_STATE_VECTORS 8  // vectors of a state's columns processed together

typedef struct {
    recurrence call;
    uint8_t places[MOST_STATE_ROWS];  // where each row's state is in the scratch
} sequence_job;

typedef struct {
    const sequence_job *sequences;
    int num_heads, first_unit;
} recurrence_job;

// Computes one row's step for some columns of a head's state; `from` may be `to`.
INLINE void recurrence_step(const recurrence *call, const float *from, float *to, const float *key, const float *query, const float *decays,
                 const float *value, float beta, float *update, float *found, int count) {
    vec known[MOST_STATE_VECTORS], sums[MOST_STATE_VECTORS];
    int width = call->value_dim, next = call->num_decays > 1;  // `next`: distance between the decays of a state's rows
    const float none = 1.0f;
    for (int i = 0; i < count; i++) known[i] = sums[i] = vec_set(0.0f);
    if (call->betas) {
        for (int k = 0; k < call->key_dim; k++)
            for (int i = 0; i < count; i++) {
                vec decayed = vec_mul(vec_load(from + (long)k * width + i * LANES), vec_set(decays[k * next]));
                vec_store(to + (long)k * width + i * LANES, decayed);
                known[i] = vec_fma(decayed, vec_set(key[k]), known[i]);
            }
        from = to, decays = &none, next = 0;  // changes no bit
    }
    for (int i = 0; i < count; i++) {
        vec lacking = vec_load(value + i * LANES);
        if (call->betas) lacking = vec_mul(vec_sub(lacking, known[i]), vec_set(beta));
        vec_store(update + i * LANES, known[i] = lacking);
    }
    for (int k = 0; k < call->key_dim; k++)
        for (int i = 0; i < count; i++) {
            vec decayed = vec_mul(vec_load(from + (long)k * width + i * LANES), vec_set(decays[k * next]));
            vec state = vec_add(decayed, vec_mul(vec_set(key[k]), known[i]));
            vec_store(to + (long)k * width + i * LANES, state);
            sums[i] = vec_fma(state, vec_set(query[k]), sums[i]);
        }
    for (int i = 0; i < count; i++) vec_store(found + i * LANES, sums[i]);
}

// Runs all rows of a head of a sequence; `slot` gets their updates, then `found`.
static void run_recurrence(const void *job, int unit, void *slot, void *scratch) {
    const recurrence_job *all = job;
    const sequence_job *rows = all->sequences + (all->first_unit + unit) / all->num_heads;
    const recurrence *call = &rows->call;
    int head = (all->first_unit + unit) % all->num_heads;
    int key_dim = call->key_dim, width = call->value_dim, key_head = head / (call->num_heads / call->num_key_heads);
    long size = (long)key_dim * width;
    for (int row = 0; row < call->num_rows; row++) {
        int parent = call->parents[row];
        long at = (long)row * call->num_heads + head, key_at = ((long)row * call->num_key_heads + key_head) * key_dim;
        const float *from = parent < 0 ? call->states[-1 - parent] + head * size : (float *)scratch + rows->places[parent] * size;
        float *to = (float *)scratch + rows->places[row] * size;
        float *update = (float *)slot + (long)row * width, *found = update + (long)call->num_rows * width;
        for (int column = 0; column < width;) {
            int left = (width - column) / LANES, count = left >= MOST_STATE_VECTORS ? MOST_STATE_VECTORS : left >= 4 ? 4 : 1;
            const float *key = call->keys + key_at, *query = call->queries + key_at, *value = call->values + at * width + column;
            const float *decays = call->decays + at * call->num_decays;
            float beta = call->betas ? call->betas[at] : 1.0f;
            float *new = update + column, *read = found + column;
            if (count == MOST_STATE_VECTORS) recurrence_step(call, from + column, to + column, key, query, decays, value, beta, new, read, MOST_STATE_VECTORS);
            else if (count == 4) recurrence_step(call, from + column, to + column, key, query, decays, value, beta, new, read, 4);
            else recurrence_step(call, from + column, to + column, key, query, decays, value, beta, new, read, 1);
            column += count * LANES;
        }
    }
}

// Assigns each row a place for its state: its parent's, if no later row continues that. Returns the number of places.
static int take_state_places(sequence_job *job) {
    int last[MOST_STATE_ROWS], num_places = 0, num_rows = job->call.num_rows;
    const int32_t *parents = job->call.parents;
    for (int row = 0; row < num_rows; row++)
        if (parents[row] >= 0) last[parents[row]] = row;
    for (int row = 0; row < num_rows; row++) {
        bool is_last = parents[row] >= 0 && last[parents[row]] == row;
        job->places[row] = (uint8_t)(is_last ? job->places[parents[row]] : num_places++);
    }
    return num_places;
}

static void keep_head(const recurrence *call, int head, const char *result) {
    size_t row_bytes = sizeof(float) * (size_t)call->value_dim, half = row_bytes * (size_t)call->num_rows;
    for (int row = 0; row < call->num_rows; row++) {
        size_t from = row_bytes * (size_t)row, to = row_bytes * ((size_t)row * (size_t)call->num_heads + (size_t)head);
        memcpy((char *)call->updates + to, result + from, row_bytes);
        memcpy((char *)call->found + to, result + from + half, row_bytes);
    }
}

void recurrence_run(frame *frame, const recurrence *calls, int num_calls) {
    sequence_job *sequences = frame_take(frame, sizeof(sequence_job) * (size_t)num_calls);
    int most_rows = 0, most_places = 0, num_heads = calls->num_heads, num_units = num_calls * num_heads;
    for (int i = 0; i < num_calls; i++) {
        sequences[i].call = calls[i];
        int num_places = take_state_places(&sequences[i]);
        most_places = num_places > most_places ? num_places : most_places;
        most_rows = calls[i].num_rows > most_rows ? calls[i].num_rows : most_rows;
    }
    int wave = num_units < MOST_UNITS ? num_units : MOST_UNITS;
    recurrence_job job = {sequences, num_heads, 0};
    stage_plan plan = {.run = run_recurrence, .job = &job, .job_bytes = sizeof job,
                       .scratch_bytes = sizeof(float) * (size_t)calls->key_dim * (size_t)calls->value_dim * (size_t)most_places,
                       .slot_bytes = 2 * sizeof(float) * (size_t)calls->value_dim * (size_t)most_rows};
    plan.own_slots = frame_take(frame, plan.slot_bytes * (size_t)wave);
    for (; job.first_unit < num_units; job.first_unit += wave) {
        void *results[MOST_UNITS];
        plan.num_units = num_units - job.first_unit < wave ? num_units - job.first_unit : wave;
        run_stage(frame, &plan, results);
        for (int unit = 0; unit < plan.num_units; unit++) {
            int number = job.first_unit + unit;
            keep_head(&calls[number / num_heads], number % num_heads, results[unit]);
        }
    }
}

void recurrence_rows(team *team, const recurrence *call) {
    frame *frame = frame_open(team);
    recurrence_run(frame, call, 1);
    frame_close(frame);
}

// ---- committed steps

static void run_fold(const void *job, int head, void *slot, void *scratch) {
    const recurrence *call = job;
    (void)scratch;
    int key_dim = call->key_dim, width = call->value_dim, key_head = head / (call->num_heads / call->num_key_heads);
    const float *from = call->states[0] + (long)head * key_dim * width;
    for (int k = 0; k < key_dim; k++)
        for (int column = 0; column < width; column += LANES) {
            vec state = vec_load(from + (long)k * width + column);
            for (int row = 0; row < call->num_rows; row++) {
                long at = (long)row * call->num_heads + head;
                vec key = vec_set(call->keys[((long)row * call->num_key_heads + key_head) * key_dim + k]);
                vec product = vec_mul(key, vec_load(call->updates + at * width + column));
                float decay = call->decays[at * call->num_decays + (call->num_decays > 1 ? k : 0)];
                state = vec_add(vec_mul(state, vec_set(decay)), product);
            }
            vec_store((float *)slot + (long)k * width + column, state);
        }
}

// One thread reads and writes a head, so the state may be its own source.
static void fold_layer(frame *frame, const recurrence *call, float *state) {
    size_t size = sizeof(float) * (size_t)call->key_dim * (size_t)call->value_dim;
    void *results[MOST_UNITS];
    stage_plan plan = {.num_units = call->num_heads, .run = run_fold, .job = call, .job_bytes = sizeof *call,
                       .slot_bytes = size, .own_slots = state};
    run_stage(frame, &plan, results);
    for (int head = 0; head < call->num_heads; head++)
        if (results[head] != (char *)state + size * (size_t)head) memcpy((char *)state + size * (size_t)head, results[head], size);
}

void recurrence_fold(team *team, const recurrence *calls, float *const *states, int num_layers) {
    frame *frame = frame_open(team);
    for (int layer = 0; layer < num_layers; layer++) fold_layer(frame, calls + layer, states[layer]);
    frame_close(frame);
}

void rows_keep(const kept_rows *buffers, int num_buffers, int first, const int32_t *chosen, int count) {
    for (int i = 0; i < num_buffers; i++) {
        size_t bytes = (size_t)buffers[i].row_bytes;
        char *to = (char *)buffers[i].rows + (size_t)first * bytes;
        for (int row = 0; row < count; row++)
            if (chosen[row] != row) memcpy(to + (size_t)row * bytes, to + (size_t)chosen[row] * bytes, bytes);
    }
}
