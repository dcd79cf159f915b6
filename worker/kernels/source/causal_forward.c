// Causal attention forward. Scores are transposed, one key per row and queries side by side: so softmax and sums cross
// no lanes, and weights come out in the next product's layout.
#include "causal_blocks.h"
#include "threads.h"

#if HAS_CAUSAL_ATTENTION
enum { QUERY_BLOCKS = 2, UNITS_AT_ONCE = 512 };  // query blocks per unit, which packs keys once for all

// State of a block of queries of one head after some keys, transposed: [64 dimensions][64 queries].
typedef struct {
    float output[AREA], maximum[SIDE], sum[SIDE];
    bf16 query[AREA];  // words
} query_state;

typedef struct {
    float scores[AREA];                                                        // [64 keys][64 queries]
    bf16 keys[AREA], rows[AREA], pairs[AREA], values[AREA];  // `values` are transposed
    bf16 weights[AREA];                                                        // pairs of keys
    query_state states[];                                                            // [QUERY_BLOCKS, group]
} forward_scratch;

// Results of a unit, per state.
typedef struct {
    bf16 output[AREA];
    float softmax[2][SIDE];
} forward_part;

typedef struct {
    const causal_call *call;
    int first_unit, num_pairs, num_spans;  // pairs of a batch and a key head; spans of QUERY_BLOCKS
} forward_job;

typedef struct {
    int batch, kv_head, first_block, num_blocks;
} forward_place;

// Returns which queries a unit has; those with the most keys come first.
static forward_place place_of_unit(const forward_job *job, int unit) {
    int all = job->first_unit + unit, pair = all % job->num_pairs;
    int first = (job->num_spans - 1 - all / job->num_pairs) * QUERY_BLOCKS;
    int left = (job->call->length + SIDE - 1) / SIDE - first, num_kv_heads = job->call->num_kv_heads;
    return (forward_place){pair / num_kv_heads, pair % num_kv_heads, first, left < QUERY_BLOCKS ? left : QUERY_BLOCKS};
}

// Computes scaled scores of two blocks, and updates the maxima `most`.
INLINE void score(const bool is_diagonal, const bf16 *keys, const bf16 *query, float scale, float *scores, vec *most) {
    for (int first = 0; first < SIDE; first += TILE_HEIGHT) {
        sums sum;
        clear(sum);
        add_product(keys + first * SIDE, query, sum);
        for (int r = 0; r < TILE_HEIGHT; r++)
            for (int n = 0; n < STRIPES; n++) {
                vec scaled = vec_mul(sum[r][n], vec_set(scale));
                most[n] = is_diagonal ? _mm512_mask_max_ps(most[n], seen_by(first + r, n), most[n], scaled)
                                      : vec_max(most[n], scaled);
                vec_store(scores + (first + r) * SIDE + n * LANES, scaled);
            }
    }
}

INLINE vec weight(const bool is_diagonal, const float *scores, int key, int n, vec most) {
    vec weight = vec_exp2(vec_sub(vec_load(scores + key * SIDE + n * LANES), most));
    return is_diagonal ? _mm512_maskz_mov_ps(seen_by(key, n), weight) : weight;
}

// Turns scores into rounded weights 2^(score - most); adds the unrounded ones to `sum` [STRIPES].
INLINE void weigh_scores(const bool is_diagonal, const float *scores, const vec *most, bf16 *weights, vec *sum) {
    for (int i = 0; i < PAIRS_DEEP; i++)
        for (int n = 0; n < STRIPES; n++) {
            vec first = weight(is_diagonal, scores, 2 * i, n, most[n]);
            vec second = weight(is_diagonal, scores, 2 * i + 1, n, most[n]);
            sum[n] = vec_add(sum[n], vec_add(first, second));
            store_pairs(weights + n * STRIPE + i * 2 * LANES, first, second);
        }
}

INLINE void attend_to_block(const bool is_diagonal, forward_scratch *space, query_state *state, float scale) {
    vec most[STRIPES], shrink[STRIPES], sum[STRIPES];
    for (int n = 0; n < STRIPES; n++) most[n] = vec_load(state->maximum + n * LANES);
    score(is_diagonal, space->keys, state->query, scale, space->scores, most);
    for (int n = 0; n < STRIPES; n++) {
        shrink[n] = vec_exp2(vec_sub(vec_load(state->maximum + n * LANES), most[n]));
        sum[n] = vec_mul(vec_load(state->sum + n * LANES), shrink[n]);
        vec_store(state->maximum + n * LANES, most[n]);
    }
    weigh_scores(is_diagonal, space->scores, most, space->weights, sum);
    for (int n = 0; n < STRIPES; n++) vec_store(state->sum + n * LANES, sum[n]);
    add_block(space->values, space->weights, shrink, state->output);
}

static void pack_keys_and_values(const causal_call *call, forward_place place, int block, forward_scratch *space) {
    gather_keys(call, &call->key, place.batch, place.kv_head, block, space->keys);
    gather_keys(call, &call->value, place.batch, place.kv_head, block, space->rows);
    pairs_of_rows(space->rows, space->pairs);
    rows_of_words(space->pairs, space->values);
}

static void begin_state(const causal_call *call, int batch, int head, int block, bf16 *rows, query_state *state) {
    gather_rows(call, &call->query, batch, head, block, rows);
    words_of_rows(rows, state->query);
    memset(state->output, 0, sizeof state->output);
    memset(state->sum, 0, sizeof state->sum);
    for (int i = 0; i < SIDE; i++) state->maximum[i] = -3.0e38f;
}

static void end_state(const query_state *state, bf16 *words, forward_part *part) {
    for (int i = 0; i < SIDE; i += LANES) {
        vec_store(part->softmax[0] + i, vec_load(state->maximum + i));
        vec_store(part->softmax[1] + i, vec_div(vec_set(1.0f), vec_load(state->sum + i)));
    }
    turn_rounded(state->output, part->softmax[1], words, part->output);
}

static void forward_unit(const void *argument, int unit, void *slot, void *scratch) {
    const forward_job *job = argument;
    const causal_call *call = job->call;
    forward_scratch *space = scratch;
    forward_place place = place_of_unit(job, unit);
    float scale = score_scale(call);
    int group = group_of(call), num_states = group * place.num_blocks;
    for (int i = 0; i < num_states; i++) {
        int head = place.kv_head * group + i % group;
        begin_state(call, place.batch, head, place.first_block + i / group, space->rows, &space->states[i]);
    }
    for (int block = 0, first = blocks_before(call) + place.first_block; block < first + place.num_blocks; block++) {
        pack_keys_and_values(call, place, block, space);
        for (int i = 0; i < num_states; i++) {
            int own = first + i / group;
            if (own > block) attend_to_block(false, space, &space->states[i], scale);
            else if (own == block) attend_to_block(true, space, &space->states[i], scale);
        }
    }
    for (int i = 0; i < num_states; i++) end_state(&space->states[i], space->rows, (forward_part *)slot + i);
}

static void write_parts(const forward_job *job, int unit, const forward_part *parts) {
    const causal_call *call = job->call;
    forward_place place = place_of_unit(job, unit);
    int group = group_of(call);
    long padded = round_up(call->length, SIDE);
    for (int i = 0; i < group * place.num_blocks; i++) {
        int head = place.kv_head * group + i % group, block = place.first_block + i / group;
        scatter_rows(call, parts[i].output, &call->output, place.batch, head, block);
        float *softmax = call->softmax + ((long)place.batch * call->num_heads + head) * 2 * padded + block * SIDE;
        memcpy(softmax, parts[i].softmax[0], sizeof parts[i].softmax[0]);
        memcpy(softmax + padded, parts[i].softmax[1], sizeof parts[i].softmax[1]);
    }
}

void causal_forward(team *team, const causal_call *call) {
    frame *frame = frame_open(team);
    causal_call *copy = frame_take(frame, sizeof *copy);
    *copy = *call;
    int group = group_of(call), num_pairs = call->batch_size * call->num_kv_heads;
    int num_spans = (call->length + QUERY_BLOCKS * SIDE - 1) / (QUERY_BLOCKS * SIDE), num_units = num_spans * num_pairs;
    size_t num_states = (size_t)(group * QUERY_BLOCKS), slot_bytes = sizeof(forward_part) * num_states;
    int at_once = num_units < UNITS_AT_ONCE ? num_units : UNITS_AT_ONCE;
    char *slots = frame_take(frame, slot_bytes * (size_t)at_once);
    for (int first = 0; first < num_units; first += at_once) {
        forward_job job = {copy, first, num_pairs, num_spans};
        stage_plan plan = {.num_units = num_units - first < at_once ? num_units - first : at_once,
                           .run = forward_unit,
                           .job = &job,
                           .job_bytes = sizeof job,
                           .scratch_bytes = sizeof(forward_scratch) + sizeof(query_state) * num_states,
                           .slot_bytes = slot_bytes,
                           .own_slots = slots,
                           .is_small = is_small_call(call)};
        void *results[UNITS_AT_ONCE];
        run_stage(frame, &plan, results);
        for (int unit = 0; unit < plan.num_units; unit++) write_parts(&job, unit, results[unit]);
    }
    frame_close(frame);
}
#endif
