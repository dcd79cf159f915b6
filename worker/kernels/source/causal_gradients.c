// One range of keys with all queries that see it, and sums over ranges.
//
// Scores and weights are transposed, one key per row, as in the forward, whose softmax is reused: weights have the same
// bits. Gradients of scores are scaled once, after all sums.
#include "causal_gradients.h"

#if HAS_CAUSAL_ATTENTION
enum { KEY_BLOCKS = 4 };  // key blocks for which queries are packed once

typedef struct {
    bf16 keys[AREA], values[AREA], turned_keys[AREA];
    float key_gradient[AREA], value_gradient[AREA];  // [64 keys][64 dimensions]
} key_state;

typedef struct {
    bf16 words[AREA], gradient_words[AREA], pairs[AREA], gradient_pairs[AREA];
    float maximum[SIDE], share[SIDE], overlap[SIDE];  // `overlap`: output times its gradient
} packed_queries;

typedef struct {
    key_state keys[KEY_BLOCKS];
    packed_queries queries;
    bf16 weights[AREA], changes[AREA], change_pairs[AREA];  // [64 keys][64 queries]; the last as pairs of keys
    bf16 rows[AREA], output[AREA];
} backward_scratch;

size_t gradient_scratch_bytes(void) { return sizeof(backward_scratch); }

// ---- packing

// Sums products of two blocks' rows over the dimensions.
static void overlap_of_rows(const bf16 *first, const bf16 *second, float *overlap) {
    for (int row = 0; row < SIDE; row += LANES) {
        __m512i partial[LANES];
        for (int i = 0; i < LANES; i++) {
            vec sum = vec_set(0.0f);
            for (int d = 0; d < SIDE; d += 2 * LANES) {
                long place = (row + i) * SIDE + d;
                sum = _mm512_dpbf16_ps(sum, (__m512bh)_mm512_loadu_si512(first + place),
                                       (__m512bh)_mm512_loadu_si512(second + place));
            }
            partial[i] = _mm512_castps_si512(sum);
        }
        transpose_registers(partial);
        vec total = _mm512_castsi512_ps(partial[0]);
        for (int i = 1; i < LANES; i++) total = vec_add(total, _mm512_castsi512_ps(partial[i]));
        vec_store(overlap + row, total);
    }
}

static void pack_queries(const causal_call *call, int batch, int head, int block, backward_scratch *space) {
    packed_queries *to = &space->queries;
    long padded = round_up(call->length, SIDE);
    const float *softmax = call->softmax + ((long)batch * call->num_heads + head) * 2 * padded + block * SIDE;
    gather_rows(call, &call->query, batch, head, block, space->rows);
    words_of_rows(space->rows, to->words);
    pairs_of_rows(space->rows, to->pairs);
    gather_rows(call, &call->output_gradient, batch, head, block, space->rows);
    words_of_rows(space->rows, to->gradient_words);
    pairs_of_rows(space->rows, to->gradient_pairs);
    gather_rows(call, &call->output, batch, head, block, space->output);
    overlap_of_rows(space->rows, space->output, to->overlap);
    memcpy(to->maximum, softmax, sizeof to->maximum);
    memcpy(to->share, softmax + padded, sizeof to->share);
}

static void begin_keys(const causal_call *call, int batch, int head, int block, bf16 *room, key_state *state) {
    gather_keys(call, &call->key, batch, head, block, state->keys);
    gather_keys(call, &call->value, batch, head, block, state->values);
    pairs_of_rows(state->keys, room);
    rows_of_words(room, state->turned_keys);
    memset(state->key_gradient, 0, sizeof state->key_gradient);
    memset(state->value_gradient, 0, sizeof state->value_gradient);
}

// ---- one block of keys, one of queries

INLINE void store_rows(sums from, bf16 *to) {
    for (int r = 0; r < TILE_HEIGHT; r++)
        for (int n = 0; n < STRIPES; n += 2) store_rounded(to + r * SIDE + n * LANES, from[r][n], from[r][n + 1]);
}

// Computes the weights of four keys from `first` on.
INLINE void weigh_rows(const bool is_diagonal, const key_state *state, backward_scratch *space, int first, vec scale,
                       sums weights) {
    const packed_queries *queries = &space->queries;
    clear(weights);
    add_product(state->keys + first * SIDE, queries->words, weights);
    for (int n = 0; n < STRIPES; n++) {
        vec maximum = vec_load(queries->maximum + n * LANES), share = vec_load(queries->share + n * LANES);
        for (int r = 0; r < TILE_HEIGHT; r++) {
            vec weight = vec_mul(vec_exp2(vec_sub(vec_mul(weights[r][n], scale), maximum)), share);
            weights[r][n] = is_diagonal ? _mm512_maskz_mov_ps(seen_by(first + r, n), weight) : weight;
        }
    }
    store_rows(weights, space->weights + first * SIDE);
}

// Computes the gradients of their scores.
INLINE void change_rows(const key_state *state, backward_scratch *space, int first, sums weights) {
    const packed_queries *queries = &space->queries;
    sums changes;
    clear(changes);
    add_product(state->values + first * SIDE, queries->gradient_words, changes);
    for (int n = 0; n < STRIPES; n++) {
        vec overlap = vec_load(queries->overlap + n * LANES);
        for (int r = 0; r < TILE_HEIGHT; r++) changes[r][n] = vec_mul(weights[r][n], vec_sub(changes[r][n], overlap));
        for (int r = 0; r < TILE_HEIGHT; r += 2)
            store_pairs(space->change_pairs + n * STRIPE + (first + r) * LANES, changes[r][n], changes[r + 1][n]);
    }
    store_rows(changes, space->changes + first * SIDE);
}

// `is_before`: keys that get no gradients.
INLINE void add_gradients(const bool is_before, const bool is_diagonal, key_state *state, backward_scratch *space,
                          float scale, float *query) {
    for (int first = 0; first < SIDE; first += TILE_HEIGHT) {
        sums weights;
        weigh_rows(is_diagonal, state, space, first, vec_set(scale), weights);
        change_rows(state, space, first, weights);
    }
    if (!is_before) {
        add_block(space->weights, space->queries.gradient_pairs, NULL, state->value_gradient);
        add_block(space->changes, space->queries.pairs, NULL, state->key_gradient);
    }
    add_block(state->turned_keys, space->change_pairs, NULL, query);
}

// ---- a range of keys

static void end_keys(const backward_job *job, const key_state *state, int place, void *slot) {
    vec scaling = vec_set(job->call->scaling);
    bf16 *keys = key_gradients(slot) + (long)place * AREA, *values = value_gradients(job, slot) + (long)place * AREA;
    for (int i = 0; i < AREA; i += LANES) {
        vec_store_bf16(keys + i, vec_mul(vec_load(state->key_gradient + i), scaling));
        vec_store_bf16(values + i, vec_load(state->value_gradient + i));
    }
}

// Runs `count` blocks of keys with all queries that see any of them.
static void run_keys(const backward_job *job, int pair, int start, int count, bool is_first, void *slot,
                     backward_scratch *space) {
    const causal_call *call = job->call;
    int batch = pair / call->num_kv_heads, kv_head = pair % call->num_kv_heads, group = group_of(call);
    for (int i = 0; i < count; i++) begin_keys(call, batch, kv_head, start + i, space->rows, &space->keys[i]);
    int before = blocks_before(call);
    for (int block = start < before ? 0 : start - before; block < job->num_blocks; block++)
        for (int member = 0; member < group; member++) {
            float *query = query_gradient(job, slot, member, block);
            if (is_first) memset(query, 0, sizeof(float) * AREA);
            pack_queries(call, batch, kv_head * group + member, block, space);
            for (int i = 0; i < count && start + i <= before + block; i++) {
                key_state *state = &space->keys[i];
                if (start + i < before) add_gradients(true, false, state, space, score_scale(call), query);
                else if (start + i == before + block) add_gradients(false, true, state, space, score_scale(call), query);
                else add_gradients(false, false, state, space, score_scale(call), query);
            }
        }
}

void range_unit(const void *argument, int unit, void *slot, void *scratch) {
    const backward_job *job = argument;
    backward_scratch *space = scratch;
    int range = unit / job->num_pairs, first = job->range_starts[range], end = job->range_starts[range + 1];
    for (int start = first; start < end; start += KEY_BLOCKS) {
        int count = end - start < KEY_BLOCKS ? end - start : KEY_BLOCKS;
        run_keys(job, job->first_pair + unit % job->num_pairs, start, count, start == first, slot, space);
        for (int i = 0; i < count; i++) end_keys(job, &space->keys[i], start + i - first, slot);
    }
}

// ---- gradients of queries

// Adds the ranges' shares of one query block of one head.
static void add_shares(const backward_job *job, int pair, int member, int block, float *sum, bf16 *rows) {
    float factors[SIDE];
    int before = blocks_before(job->call);
    memcpy(sum, query_gradient(job, job->parts[pair], member, block), sizeof(float) * AREA);
    for (int range = 1; range < job->num_ranges && job->range_starts[range] <= before + block; range++) {
        const float *share = query_gradient(job, job->parts[range * job->num_pairs + pair], member, block);
        for (int i = 0; i < AREA; i += LANES) vec_store(sum + i, vec_add(vec_load(sum + i), vec_load(share + i)));
    }
    for (int i = 0; i < SIDE; i++) factors[i] = job->call->scaling;
    turn_rounded(sum, factors, (bf16 *)(sum + AREA), rows);
}

void query_unit(const void *argument, int unit, void *slot, void *scratch) {
    const backward_job *job = argument;
    int group = group_of(job->call);
    bf16 *rows = slot;
    for (int i = 0; i < job->blocks_at_once && unit * job->blocks_at_once + i < job->num_blocks; i++)
        for (int head = 0; head < job->num_pairs * group; head++, rows += AREA)
            add_shares(job, head / group, head % group, unit * job->blocks_at_once + i, scratch, rows);
}
#endif
