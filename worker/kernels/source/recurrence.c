// Layers with a state per head in place of keys and values: S = decay * S + key (x) update, then query . S.
// A state's row is multiplied and then added to, never in one rounding: so folding steps gives what rows have left.
#include "api.h"
#include "threads.h"
#include "vectors.h"

#define MOST_STATE_VECTORS 8  // columns of a state that are worked on at a time

typedef struct {
    recurrence call;
    uint8_t places[MOST_STATE_ROWS];  // where in the scratch the state behind each row lies
} recurrence_job;

// One row's step over some columns of a head's state; `from` may be `to`.
INLINE void recurrence_step(const recurrence *call, const float *from, float *to, const float *key, const float *query, float decay,
                 const float *value, float beta, float *update, float *found, int count) {
    vec known[MOST_STATE_VECTORS], sums[MOST_STATE_VECTORS];
    int width = call->value_dim;
    for (int i = 0; i < count; i++) known[i] = sums[i] = vec_set(0.0f);
    if (call->betas) {
        for (int k = 0; k < call->key_dim; k++)
            for (int i = 0; i < count; i++) {
                vec decayed = vec_mul(vec_load(from + (long)k * width + i * LANES), vec_set(decay));
                vec_store(to + (long)k * width + i * LANES, decayed);
                known[i] = vec_fma(decayed, vec_set(key[k]), known[i]);
            }
        from = to, decay = 1.0f;  // which changes no bit
    }
    for (int i = 0; i < count; i++) {
        vec lacking = vec_load(value + i * LANES);
        if (call->betas) lacking = vec_mul(vec_sub(lacking, known[i]), vec_set(beta));
        vec_store(update + i * LANES, known[i] = lacking);
    }
    for (int k = 0; k < call->key_dim; k++)
        for (int i = 0; i < count; i++) {
            vec decayed = vec_mul(vec_load(from + (long)k * width + i * LANES), vec_set(decay));
            vec state = vec_add(decayed, vec_mul(vec_set(key[k]), known[i]));
            vec_store(to + (long)k * width + i * LANES, state);
            sums[i] = vec_fma(state, vec_set(query[k]), sums[i]);
        }
    for (int i = 0; i < count; i++) vec_store(found + i * LANES, sums[i]);
}

// All rows of a head; `slot` gets their updates, then what they have found.
static void run_recurrence(const void *job, int head, void *slot, void *scratch) {
    const recurrence_job *rows = job;
    const recurrence *call = &rows->call;
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
            float beta = call->betas ? call->betas[at] : 1.0f, decay = call->decays[at];
            float *new = update + column, *read = found + column;
            if (count == MOST_STATE_VECTORS) recurrence_step(call, from + column, to + column, key, query, decay, value, beta, new, read, MOST_STATE_VECTORS);
            else if (count == 4) recurrence_step(call, from + column, to + column, key, query, decay, value, beta, new, read, 4);
            else recurrence_step(call, from + column, to + column, key, query, decay, value, beta, new, read, 1);
            column += count * LANES;
        }
    }
}

// Gives each row a place for its state: its parent's where no later row goes on from that. Returns how many there are.
static int take_state_places(recurrence_job *job) {
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

void recurrence_rows(team *team, const recurrence *call) {
    frame *frame = frame_open(team);
    recurrence_job job = {.call = *call};
    size_t size = sizeof(float) * (size_t)call->key_dim * (size_t)call->value_dim;
    size_t row_bytes = sizeof(float) * (size_t)call->value_dim, half = row_bytes * (size_t)call->num_rows;
    void *results[MOST_UNITS];
    stage_plan plan = {.num_units = call->num_heads, .run = run_recurrence, .job = &job, .job_bytes = sizeof job,
                       .scratch_bytes = size * (size_t)take_state_places(&job), .slot_bytes = 2 * half};
    plan.own_slots = frame_take(frame, plan.slot_bytes * (size_t)plan.num_units);
    run_stage(frame, &plan, results);
    for (int head = 0; head < call->num_heads; head++)
        for (int row = 0; row < call->num_rows; row++) {
            const char *update = (const char *)results[head] + row_bytes * (size_t)row;
            size_t to = row_bytes * ((size_t)row * (size_t)call->num_heads + (size_t)head);
            memcpy((char *)call->updates + to, update, row_bytes);
            memcpy((char *)call->found + to, update + half, row_bytes);
        }
    frame_close(frame);
}

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
                state = vec_add(vec_mul(state, vec_set(call->decays[at])), product);
            }
            vec_store((float *)slot + (long)k * width + column, state);
        }
}

void recurrence_fold(team *team, const recurrence *call, float *state) {
    frame *frame = frame_open(team);
    size_t size = sizeof(float) * (size_t)call->key_dim * (size_t)call->value_dim;
    void *results[MOST_UNITS];
    stage_plan plan = {.num_units = call->num_heads, .run = run_fold, .job = call, .job_bytes = sizeof *call,
                       .slot_bytes = size, .own_slots = state};
    run_stage(frame, &plan, results);
    for (int head = 0; head < call->num_heads; head++)
        if (results[head] != (char *)state + size * (size_t)head) memcpy((char *)state + size * (size_t)head, results[head], size);
    frame_close(frame);
}
