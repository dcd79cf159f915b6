// Compressed attention: loading, what caches hold of a row, and the keys that it sees.
#include "compressed.h"

#include <stdlib.h>

#include "attention_units.h"
#include "decoder.h"
#include "heads.h"
#include "packing.h"

enum { KEYS_TOGETHER = 64, LISTING_WORTH_HELP = 1 << 17 };

struct compressed_room {
    float *vectors, *kept;  // [num_rows, ...] latent vectors of queries; a key, or what a pool reads
    index_room index;
    float *grouped;         // [num_rows, ...] the input of the output's matrix
    char *gathered;         // rows by group of heads
    size_t chosen_bytes;    // of a row
};

static int turned_of(const decoder_sizes *sizes) { return sizes->head_dim - sizes->still_dim; }

// Returns the stripes that hold so many numbers.
static int stripes_of(const decoder_sizes *sizes, int count) { return (count + sizes->head_dim - 1) / sizes->head_dim; }

// ---- weights

compressed_weights compressed_new(const decoder_sizes *sizes) {
    element kind = (element)sizes->element;
    int width = sizes->num_heads * sizes->head_dim;
    return (compressed_weights){
        .query_down = matrix_new(kind, sizes->hidden, sizes->query_rank),
        .query = matrix_new(kind, sizes->query_rank, width),
        .key = matrix_new(kind, sizes->hidden, sizes->head_dim),
        .output_down = matrix_new(kind, width / sizes->output_groups, sizes->output_groups * sizes->output_rank)};
}

void compressed_free(compressed_weights *weights) {
    matrix_free(&weights->query_down);
    matrix_free(&weights->query);
    matrix_free(&weights->key);
    matrix_free(&weights->output_down);
    indexer_free(&weights->indexer);
    pool *pools[] = {&weights->keys, &weights->index_keys};
    for (int i = 0; i < 2; i++) {
        matrix_free(&pools[i]->projection);
        free(pools[i]->bias);
        free(pools[i]->norm);
    }
    free(weights->query_norm);
    free(weights->key_norm);
}

static pool pool_new(const decoder_sizes *sizes, int series, int dim) {
    return (pool){.projection = matrix_new((element)sizes->element, sizes->hidden, 2 * series * dim), .dim = dim};
}

void compressed_pools(const decoder_sizes *sizes, compressed_weights *weights, int ratio, int series) {
    weights->ratio = ratio, weights->series = series;
    weights->keys = pool_new(sizes, series, sizes->head_dim);
    if (series == 1) return;
    weights->index_keys = pool_new(sizes, series, sizes->index_dim);
    weights->indexer = indexer_new(sizes);
}

matrix *compressed_matrix(compressed_weights *weights, const decoder_sizes *sizes, weight_role role, int *first_block,
                          int *num_columns) {
    pool *of_role = role == INDEX_POOL_KEY || role == INDEX_POOL_GATE ? &weights->index_keys : &weights->keys;
    int width = weights->series * of_role->dim;
    *first_block = 0;
    matrix *found = role == QUERY          ? &weights->query
                    : role == QUERY_DOWN   ? &weights->query_down
                    : role == KEY          ? &weights->key
                    : role == OUTPUT_DOWN  ? &weights->output_down
                    : role == INDEX_QUERY  ? &weights->indexer.query
                    : role == INDEX_WEIGHT ? &weights->indexer.weight
                                           : NULL;
    if (found) {
        *num_columns = role == INDEX_WEIGHT ? sizes->index_heads : found->columns;
        return found;
    }
    if (role != POOL_KEY && role != POOL_GATE && role != INDEX_POOL_KEY && role != INDEX_POOL_GATE) return NULL;
    if (role == POOL_GATE || role == INDEX_POOL_GATE) *first_block = width / LANES;
    *num_columns = width;
    return &of_role->projection;
}

bool compressed_load(compressed_weights *weights, const decoder_sizes *sizes, weight_role role, const void *numbers) {
    int width = weights->series * weights->ratio;
    switch (role) {
        case QUERY_NORM: norm_load(sizes, &weights->query_norm, sizes->query_rank, numbers); return true;
        case KEY_NORM: norm_load(sizes, &weights->key_norm, sizes->head_dim, numbers); return true;
        case POOL_NORM: norm_load(sizes, &weights->keys.norm, sizes->head_dim, numbers); return true;
        case INDEX_POOL_NORM: norm_load(sizes, &weights->index_keys.norm, sizes->index_dim, numbers); return true;
        case POOL_BIAS: floats_load(&weights->keys.bias, width * sizes->head_dim, numbers); return true;
        case INDEX_POOL_BIAS: floats_load(&weights->index_keys.bias, width * sizes->index_dim, numbers); return true;
        default: return false;
    }
}

// ---- stripes of a layer's caches, from its first one on

static int pool_stripes(const decoder_sizes *sizes, const compressed_weights *weights, const pool *pool) {
    return stripes_of(sizes, 2 * weights->series * pool->dim);
}

// Returns the stripe of pooled keys; that of an indexer follows.
static int pooled_stripe(const decoder_sizes *sizes, const compressed_weights *weights) {
    return 1 + pool_stripes(sizes, weights, &weights->keys) + pool_stripes(sizes, weights, &weights->index_keys);
}

int compressed_stripes(const decoder_sizes *sizes, const compressed_weights *weights) {
    return weights->ratio ? pooled_stripe(sizes, weights) + weights->series : 1;
}

// ---- a call

static long most_pooled(const decoder_sizes *sizes, const compressed_weights *weights, const forward_call *call) {
    long seen = weights->ratio ? most_keys_seen(call) / weights->ratio : 0;
    return weights->series == 2 && seen > sizes->num_chosen_keys ? sizes->num_chosen_keys : seen;
}

static index_room room_of_index(frame *frame, const decoder_sizes *sizes, const forward_call *call, size_t chosen_bytes) {
    size_t num_rows = (size_t)call->num_rows, rows = sizeof(float) * num_rows;
    index_room room = {.queries = frame_take(frame, rows * (size_t)index_query_stride(sizes) + 4 * LANES),
                       .weights = frame_take(frame, rows * (size_t)index_weight_stride(sizes)),
                       .scores = frame_take(frame, index_score_bytes(sizes, call)),
                       .chosen = frame_take(frame, sizeof(chosen_keys *) * num_rows)};
    char *memory = memset(frame_take(frame, num_rows * chosen_bytes), 0, num_rows * chosen_bytes);  // for late helpers
    for (size_t i = 0; i < num_rows; i++) room.chosen[i] = (chosen_keys *)(memory + i * chosen_bytes);
    return room;
}

compressed_room *compressed_room_new(frame *frame, const decoder *decoder, const forward_call *call) {
    const decoder_sizes *sizes = &decoder->sizes;
    size_t rows = sizeof(float) * (size_t)call->num_rows, gathered = 0;
    long pooled = 0, window = 0, stripes = 1;
    for (int i = call->first_layer; i < call->end_layer; i++) {
        const layer_weights *layer = &decoder->layers[i];
        long most = most_pooled(sizes, &layer->compressed, call), own = pool_stripes(sizes, &layer->compressed, &layer->compressed.keys);
        size_t bytes = grouped_bytes(&layer->compressed.output_down, sizes->output_groups, call->num_rows);
        pooled = most > pooled ? most : pooled;
        stripes = own > stripes ? own : stripes;
        window = layer->view.window > window ? layer->view.window : window;
        gathered = bytes > gathered ? bytes : gathered;
    }
    compressed_room *room = frame_take(frame, sizeof *room);
    long listed = round_up(pooled + window + TAIL, KEYS_TOGETHER);
    size_t chosen_bytes = (size_t)round_up((long)sizeof(chosen_keys) + 4 * listed, 64);
    *room = (compressed_room){.vectors = frame_take(frame, rows * (size_t)sizes->query_rank + 4 * LANES),
                              .kept = frame_take(frame, rows * (size_t)(stripes * sizes->head_dim) + 4 * LANES),
                              .index = room_of_index(frame, sizes, call, chosen_bytes),
                              .grouped = frame_take(frame, rows * (size_t)(sizes->output_groups * sizes->output_rank)),
                              .gathered = frame_take(frame, gathered),
                              .chosen_bytes = chosen_bytes};
    return room;
}

// Returns where a row of a call lies, counted in positions.
static int position_of(const row_group *row) { return row->boundary + row->tail_lengths[0] - 1; }

// Returns the slot of a position on a row's path.
static long slot_of(const row_group *row, int position) {
    return position < row->boundary ? position : row->tail_slots[position - row->boundary];
}

// Rotates the last dimensions of a head by a position's angles.
static void turn_end(const decoder_sizes *sizes, float *head, int width, const float *angles) {
    int turned = turned_of(sizes);
    float *out = __builtin_alloca(sizeof(float) * (size_t)(turned + 2 * LANES)), *end = head + width - turned;
    rotate(end, angles, turned, sizes->element == BF16, out);
    memcpy(end, out, sizeof(float) * (size_t)turned);
}

// Turns them back, into the order of the model: pairs side by side.
static void turn_back(const decoder_sizes *sizes, float *head, const float *angles) {
    int half = turned_of(sizes) / 2;
    float *turned = __builtin_alloca(sizeof(float) * (size_t)(2 * half + 4 * LANES)), *end = head + sizes->still_dim;
    float *back = __builtin_alloca(sizeof(float) * (size_t)(2 * half + 2 * LANES));
    memcpy(back, angles, sizeof(float) * (size_t)(2 * half));
    for (int i = half; i < 2 * half; i++) back[i] = -back[i];
    rotate(end, back, 2 * half, sizes->element == BF16, turned);
    for (int i = 0; i < half; i++) end[2 * i] = turned[i], end[2 * i + 1] = turned[half + i];
}

static const float *angles_at(const decoder_sizes *sizes, const float *angles, int row) { return angles + (long)row * turned_of(sizes); }

// Computes normed and rotated queries [num_rows, num_heads, head_dim], and passes them to attention.
static void take_all_queries(frame *frame, const compressed_weights *weights, const decoder_sizes *sizes, const compressed_room *room,
                             attention *attention, const forward_call *call, const float *angles, const float *normed, float *wide) {
    bool rounds = sizes->element == BF16;
    linear(frame, &weights->query_down, call->num_rows, normed, room->vectors, sizes->query_rank, rounds);
    for (long row = 0; row < call->num_rows; row++) {
        float *vector = room->vectors + row * sizes->query_rank;
        norm(sizes, vector, weights->query_norm, sizes->query_rank, vector);
    }
    linear(frame, &weights->query, call->num_rows, room->vectors, wide, weights->query.columns, rounds);
    for (int row = 0; row < call->num_rows; row++)
        for (int head = 0; head < sizes->num_heads; head++) {
            float *query = wide + ((long)row * sizes->num_heads + head) * sizes->head_dim;
            norm(sizes, query, NULL, sizes->head_dim, query);
            turn_end(sizes, query, sizes->head_dim, angles_at(sizes, angles, call->positions[row]));
            attention_query(attention, row, 0, head, query);
        }
}

static void keep_keys(frame *frame, const compressed_weights *weights, const decoder_sizes *sizes, const compressed_room *room,
                      attention *attention, const forward_call *call, const float *angles, int place, const float *normed) {
    linear(frame, &weights->key, call->num_rows, normed, room->kept, sizes->head_dim, sizes->element == BF16);
    for (int row = 0; row < call->num_rows; row++) {
        float *key = room->kept + (long)row * sizes->head_dim;
        norm(sizes, key, weights->key_norm, sizes->head_dim, key);
        turn_end(sizes, key, sizes->head_dim, angles_at(sizes, angles, call->positions[row]));
        attention_keep(attention, place, row, 0, 0, false, key);
    }
}

// ---- pooled keys

// Stores what a pool reads of each row in stripes from `place` on.
static void keep_pooled_rows(frame *frame, const pool *pool, const decoder_sizes *sizes, const compressed_room *room,
                             attention *attention, const forward_call *call, int place, int num_stripes, const float *normed) {
    long stride = (long)num_stripes * sizes->head_dim, columns = pool->projection.columns;
    linear(frame, &pool->projection, call->num_rows, normed, room->kept, stride, sizes->element == BF16);
    for (int row = 0; row < call->num_rows; row++) {
        float *kept = room->kept + row * stride;
        memset(kept + columns, 0, sizeof(float) * (size_t)(stride - columns));
        for (int stripe = 0; stripe < num_stripes; stripe++)
            attention_keep(attention, place + stripe, row, 0, 0, false, kept + stripe * sizes->head_dim);
    }
}

// The positions of one pooled key on a row's path.
typedef struct {
    const pool *pool;
    const attention *attention;
    int place, row, ratio, series;
    int first, count;  // of all series' positions, in order, those that exist
    long slots[MOST_POOLED];
} pooled_path;

static pooled_path path_of(const compressed_weights *weights, const pool *pool, const attention *attention,
                           const forward_call *call, int place, int row) {
    pooled_path path = {pool, attention, place, row, weights->ratio, weights->series, 0, weights->ratio * weights->series, {0}};
    int before = position_of(&call->groups[row]) + 1 - path.count;
    path.first = before < 0 ? -before : 0;
    for (int i = path.first; i < path.count; i++) path.slots[i] = slot_of(&call->groups[row], before + i);
    return path;
}

// Loads sixteen of the numbers that the pool keeps of a position.
static vec kept_at(const pooled_path *path, int number, int at) {
    kv_form form = form_of(path->attention, path->row);
    const char *stripe = head_start(path->attention, path->place + at / form.head_dim, path->row, 0, false);
    return kv_load(KV_PLAIN, form, stripe + path->slots[number] * kv_row_bytes(form), at % form.head_dim);
}

static vec gate_at(const pooled_path *path, int number, int d) {
    int width = path->series * path->pool->dim, own = number / path->ratio * path->pool->dim + d;
    return vec_add(kept_at(path, number, width + own), vec_load(path->pool->bias + (long)(number % path->ratio) * width + own));
}

// Weighs sixteen dimensions of the path's keys.
static vec pool_keys(const pooled_path *path, int d, bool rounds) {
    float weights[MOST_POOLED * LANES];
    vec most = vec_set(-3e38f), sum = vec_set(0.0f), found = vec_set(0.0f);
    for (int i = path->first; i < path->count; i++) {
        vec gate = gate_at(path, i, d);
        vec_store(weights + i * LANES, gate);
        most = vec_max(most, gate);
    }
    for (int i = path->first; i < path->count; i++) {
        vec power = vec_exp(vec_sub(vec_load(weights + i * LANES), most));
        vec_store(weights + i * LANES, power);
        sum = vec_add(sum, power);
    }
    for (int i = path->first; i < path->count; i++) {
        vec share = rounded(rounds, vec_div(vec_load(weights + i * LANES), sum));
        found = vec_add(found, rounded(rounds, vec_mul(kept_at(path, i, i / path->ratio * path->pool->dim + d), share)));
    }
    return rounded(rounds, found);
}

// Stores the pooled key of each row that ends a run of positions, and zeros for others.
static void keep_pooled(const compressed_weights *weights, const pool *pool, const decoder_sizes *sizes, attention *attention,
                        const forward_call *call, const float *angles, int from, int to) {
    float *pooled = __builtin_alloca(sizeof(float) * (size_t)(sizes->head_dim + 2 * LANES));
    for (int row = 0; row < call->num_rows; row++) {
        memset(pooled, 0, sizeof(float) * (size_t)sizes->head_dim);
        if ((position_of(&call->groups[row]) + 1) % weights->ratio == 0) {
            pooled_path path = path_of(weights, pool, attention, call, from, row);
            for (int d = 0; d < pool->dim; d += LANES) vec_store(pooled + d, pool_keys(&path, d, sizes->element == BF16));
            norm(sizes, pooled, pool->norm, pool->dim, pooled);
            int first = call->positions[row] + 1 - weights->ratio;
            turn_end(sizes, pooled, pool->dim, angles_at(sizes, angles, first > 0 ? first : 0));
        }
        attention_keep(attention, to, row, 0, 0, false, pooled);
    }
}

static void keep_pools(frame *frame, const compressed_weights *weights, const decoder_sizes *sizes, const compressed_room *room,
                       attention *attention, const forward_call *call, const float *angles, int place, const float *normed) {
    const pool *pools[] = {&weights->keys, &weights->index_keys};
    int from = place + 1, to = place + pooled_stripe(sizes, weights);
    for (int i = 0; i < weights->series; i++) {
        int num_stripes = pool_stripes(sizes, weights, pools[i]);
        keep_pooled_rows(frame, pools[i], sizes, room, attention, call, from, num_stripes, normed);
        keep_pooled(weights, pools[i], sizes, attention, call, angles, from, to + i);
        from += num_stripes;
    }
}

// ---- the keys that rows see

static int num_pooled(const compressed_weights *weights, const row_group *row) {
    return weights->ratio ? (position_of(row) + 1) / weights->ratio : 0;
}

static bool chooses_some(const compressed_weights *weights, const decoder_sizes *sizes, const forward_call *call) {
    for (int row = 0; weights->series == 2 && row < call->num_rows; row++)
        if (num_pooled(weights, &call->groups[row]) > sizes->num_chosen_keys) return true;
    return false;
}

static void index_queries(frame *frame, const compressed_weights *weights, const decoder_sizes *sizes, const compressed_room *room,
                          const forward_call *call, const float *angles, const float *normed) {
    bool rounds = sizes->element == BF16;
    const index_room *index = &room->index;
    linear(frame, &weights->indexer.query, call->num_rows, room->vectors, index->queries, index_query_stride(sizes), rounds);
    linear(frame, &weights->indexer.weight, call->num_rows, normed, index->weights, index_weight_stride(sizes), rounds);
    for (long row = 0; row < call->num_rows; row++)
        for (int head = 0; head < sizes->index_heads; head++) {
            float *query = index->queries + row * index_query_stride(sizes) + (long)head * sizes->index_dim;
            turn_end(sizes, query, sizes->index_dim, angles_at(sizes, angles, call->positions[row]));
        }
}

typedef struct {
    const compressed_weights *weights;
    const decoder_sizes *sizes;
    const compressed_room *room;
    const forward_call *call;
    long stride;  // of scores
    int first_row, window, stripe;  // `stripe`: of pooled keys
} listing;

// Lists the slots of pooled keys that a row sees, then those of its window in front of its tail, and the tail's.
static void run_listing(const void *job, int unit, void *slot, void *scratch) {
    const listing *all = job;
    const row_group *row = &all->call->groups[all->first_row + unit];
    chosen_keys *chosen = slot ? slot : all->room->index.chosen[all->first_row + unit];
    int pooled = num_pooled(all->weights, row), position = position_of(row), start = position + 1 - all->window;
    long shift = all->stripe * row->layer_stride / all->sizes->head_dim;  // from a key to a pooled key, in rows
    (void)scratch;
    if (all->weights->series == 2 && pooled > all->sizes->num_chosen_keys)
        pooled = index_best(all->room->index.scores + unit * all->stride, pooled, all->sizes->num_chosen_keys, chosen->prefix);
    else
        for (int i = 0; i < pooled; i++) chosen->prefix[i] = i;
    for (int i = 0; i < pooled; i++)
        chosen->prefix[i] = (int32_t)(slot_of(row, (chosen->prefix[i] + 1) * all->weights->ratio - 1) + shift);
    start = start > 0 ? start : 0;
    chosen->num_prefix = pooled, chosen->num_tail = 0;
    for (int i = start; i < row->boundary; i++) chosen->prefix[chosen->num_prefix++] = i;
    for (int i = start > row->boundary ? start : row->boundary; i <= position; i++)
        chosen->tail[chosen->num_tail++] = row->tail_slots[i - row->boundary];
    for (int i = chosen->num_tail; i < TAIL; i++) chosen->tail[i] = row->tail_slots[0];
    chosen->num_padded = (int)(round_up(chosen->num_prefix, KEYS_TOGETHER) - chosen->num_prefix);
}

static void list_rows(frame *frame, const listing *job, int num_rows) {
    stage_plan plan = {.num_units = num_rows,
                       .run = run_listing,
                       .job = job,
                       .job_bytes = sizeof *job,
                       .slot_bytes = job->room->chosen_bytes,
                       .is_small = num_rows * job->stride < LISTING_WORTH_HELP};
    void *results[MOST_UNITS];
    run_stage(frame, &plan, results);
    for (int unit = 0; unit < num_rows; unit++)
        if (results[unit]) memcpy(job->room->index.chosen[job->first_row + unit], results[unit], plan.slot_bytes);
}

static void list_keys(frame *frame, const compressed_weights *weights, const decoder_sizes *sizes, const compressed_room *room,
                      const attention *attention, const forward_call *call, int place, int window, bool is_scored) {
    int at_once = index_rows_at_once(sizes, call), stripe = weights->ratio ? pooled_stripe(sizes, weights) : 0;
    for (int first = 0; first < call->num_rows; first += at_once) {
        int left = call->num_rows - first, count = left < at_once ? left : at_once;
        scored_keys keys = {place + stripe + 1, 0, weights->ratio};
        if (is_scored) index_score(frame, sizes, &room->index, call, attention, keys, first, count);
        listing job = {weights, sizes, room, call, most_keys_seen(call), first, window, stripe};
        list_rows(frame, &job, count);
    }
}

const float *compressed_run(frame *frame, const compressed_weights *weights, const decoder_sizes *sizes, compressed_room *room,
                            attention *attention, const attention_view *view, const forward_call *call, const float *angles,
                            int place, const float *normed, float *wide, float *mixed) {
    bool is_scored = chooses_some(weights, sizes, call);
    attention_view whole = {0, 0.0f, view->sinks};
    take_all_queries(frame, weights, sizes, room, attention, call, angles, normed, wide);
    keep_keys(frame, weights, sizes, room, attention, call, angles, place, normed);
    if (weights->ratio) keep_pools(frame, weights, sizes, room, attention, call, angles, place, normed);
    if (is_scored) index_queries(frame, weights, sizes, room, call, angles, normed);
    list_keys(frame, weights, sizes, room, attention, call, place, view->window, is_scored);
    room->index.attention = attention_over(frame, attention, (const chosen_keys *const *)room->index.chosen, 1);
    attention_run(room->index.attention, frame, place, &whole, mixed);
    for (long row = 0; row < call->num_rows; row++)
        for (int head = 0; head < sizes->num_heads; head++)
            turn_back(sizes, mixed + (row * sizes->num_heads + head) * sizes->head_dim, angles_at(sizes, angles, call->positions[row]));
    int width = sizes->num_heads / sizes->output_groups * sizes->head_dim;
    multiply_groups_of_heads(frame, &weights->output_down, sizes->output_groups, sizes->element == BF16, call->num_rows, mixed, width,
                             room->grouped, sizes->output_rank, room->gathered);
    return room->grouped;
}
