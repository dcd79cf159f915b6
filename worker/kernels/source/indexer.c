// Indexers: scores of keys, and the choice of the best.
#include "indexer.h"

#include <stdlib.h>

#include "heads.h"
#include "index_scores.h"
#include "packing.h"

enum { MOST_SCORES = 8 << 20, SCORING_WORTH_HELP = 1 << 19 };

#define INDEX_EPSILON 1e-6f  // of the norms of keys

static int index_turned_dim(const decoder_sizes *sizes) { return sizes->head_dim - sizes->latent_rank - sizes->index_dim; }

indexer indexer_new(const decoder_sizes *sizes) {
    element kind = (element)sizes->element;
    return (indexer){.query = matrix_new(kind, sizes->query_rank, sizes->index_heads * sizes->index_dim),
                     .key = matrix_new(kind, sizes->hidden, sizes->index_dim),
                     .weight = matrix_new(kind, sizes->hidden, sizes->index_heads)};
}

void indexer_free(indexer *indexer) {
    matrix_free(&indexer->query);
    matrix_free(&indexer->key);
    matrix_free(&indexer->weight);
    free(indexer->norm);
}

matrix *indexer_matrix(indexer *indexer, const decoder_sizes *sizes, weight_role role, int *num_columns) {
    *num_columns = role == INDEX_QUERY ? sizes->index_heads * sizes->index_dim
                   : role == INDEX_KEY ? sizes->index_dim
                                       : sizes->index_heads;
    return role == INDEX_QUERY    ? &indexer->query
           : role == INDEX_KEY    ? &indexer->key
           : role == INDEX_WEIGHT ? &indexer->weight
                                  : NULL;
}

// ---- a call

bool index_sees_more(const decoder_sizes *sizes, const row_group *group) {
    for (int row = 0; !group->is_partial && row < group->num_rows; row++)
        if (group->boundary + group->tail_lengths[row] > sizes->num_chosen_keys) return true;
    return false;
}

static bool chooses(const decoder_sizes *sizes, const forward_call *call) {
    for (int i = 0; i < call->num_groups; i++)
        if (index_sees_more(sizes, &call->groups[i])) return true;
    return false;
}

// Returns one row of a group, with a copy of its tail, which late helpers read.
static row_group row_alone(frame *frame, const row_group *group, int row) {
    row_group alone = *group;
    int32_t *tail = frame_take(frame, sizeof *tail * (TAIL + 1));
    memcpy(tail, group->tail_slots + row * TAIL, sizeof *tail * TAIL);
    tail[TAIL] = group->tail_lengths[row];
    alone.num_rows = 1;
    alone.first_slot += row;
    alone.tail_slots = tail;
    alone.tail_lengths = tail + TAIL;
    return alone;
}

const forward_call *rows_alone(frame *frame, const forward_call *call) {
    row_group *rows = frame_take(frame, sizeof *rows * (size_t)call->num_rows), *next = rows;
    for (int i = 0; i < call->num_groups; i++)
        for (int row = 0; row < call->groups[i].num_rows; row++) *next++ = row_alone(frame, &call->groups[i], row);
    forward_call *alone = frame_take(frame, sizeof *alone);
    *alone = *call;
    alone->groups = rows;
    alone->num_groups = call->num_rows;
    return alone;
}

const forward_call *index_rows_alone(frame *frame, const decoder_sizes *sizes, const forward_call *call) {
    return chooses(sizes, call) ? rows_alone(frame, call) : call;
}

size_t chosen_bytes(const decoder_sizes *sizes) {
    return (size_t)round_up((long)sizeof(chosen_keys) + 4 * round_up(sizes->num_chosen_keys, KEYS_AT_ONCE), 64);
}

size_t index_choice_bytes(const decoder_sizes *sizes, int num_rows) {
    return chosen_bytes(sizes) * (size_t)(num_rows * choices_of_row(sizes));
}

long most_keys_seen(const forward_call *call) {
    long most = 0;
    for (int i = 0; i < call->num_groups; i++) most = call->groups[i].boundary > most ? call->groups[i].boundary : most;
    return most + TAIL;
}

// Returns the sizes of a call's scoring of a key per `step` positions, with as many rows as fit.
static scoring scoring_of(const decoder_sizes *sizes, const forward_call *call, int step) {
    long keys = most_keys_seen(call), of_unit = INDEX_SPAN, span = INDEX_SPAN;
    if (sizes->index_block) of_unit = (long)blocks_of_unit(sizes) * sizes->index_block, span = (long)blocks_of_unit(sizes) * sizes->index_heads;
    long units = (keys / step + of_unit - 1) / of_unit, stride = sizes->index_block ? units * span : keys;
    long most = MOST_SCORES / stride, of_units = MOST_UNITS / ((keys + of_unit - 1) / of_unit);
    most = most < of_units ? most : of_units;
    most = most < 1 ? 1 : most < call->num_rows ? most : call->num_rows;
    return (scoring){.sizes = sizes, .call = call, .num_rows = (int)most, .units_per_row = (int)units, .span = span, .stride = stride};
}

int index_rows_at_once(const decoder_sizes *sizes, const forward_call *call) { return scoring_of(sizes, call, 1).num_rows; }

size_t index_score_bytes(const decoder_sizes *sizes, const forward_call *call) {
    scoring whole = scoring_of(sizes, call, 1);
    return sizeof(float) * (size_t)(whole.num_rows * whole.stride);
}

index_room *index_room_new(frame *frame, const decoder_sizes *sizes, const forward_call *call) {
    size_t num_rows = (size_t)call->num_rows, rows = sizeof(float) * num_rows, bytes = index_choice_bytes(sizes, call->num_rows);
    index_room *room = frame_take(frame, sizeof *room);
    *room = (index_room){.queries = frame_take(frame, rows * (size_t)index_query_stride(sizes) + 4 * LANES),
                         .keys = frame_take(frame, rows * (size_t)sizes->index_dim + 4 * LANES),
                         .weights = frame_take(frame, rows * (size_t)index_weight_stride(sizes))};
    if (!chooses(sizes, call)) return room;
    size_t num_choices = num_rows * (size_t)choices_of_row(sizes);
    room->scores = frame_take(frame, index_score_bytes(sizes, call));
    room->chosen = frame_take(frame, sizeof(chosen_keys *) * num_choices);
    char *memory = memset(frame_take(frame, bytes), 0, bytes);  // late helpers may read slots that none has written
    for (size_t i = 0; i < num_choices; i++) room->chosen[i] = (chosen_keys *)(memory + i * chosen_bytes(sizes));
    return room;
}

void index_take_choice(frame *frame, index_room *room, const void *choice, size_t bytes, attention *all) {
    memcpy(room->chosen[0], choice, bytes);
    room->attention = attention_over(frame, all, (const chosen_keys *const *)room->chosen, 1);
}

// ---- rows

static void turn(const decoder_sizes *sizes, float *head, const float *angles) {
    int turned = index_turned_dim(sizes);
    float *out = __builtin_alloca(sizeof(float) * (size_t)(turned + 2 * LANES));
    rotate(head, angles, turned, sizes->element == BF16, out);
    memcpy(head, out, sizeof(float) * (size_t)turned);
}

void index_rows(frame *frame, const indexer *indexer, const decoder_sizes *sizes, const index_room *room,
                const forward_call *call, const float *vectors, const float *normed) {
    bool rounds = sizes->element == BF16;
    decoder_sizes shifted = *sizes;
    shifted.norm_form = SHIFTED;
    linear(frame, &indexer->key, call->num_rows, normed, room->keys, sizes->index_dim, rounds);
    if (room->chosen) {
        linear(frame, &indexer->query, call->num_rows, vectors, room->queries, index_query_stride(sizes), rounds);
        linear(frame, &indexer->weight, call->num_rows, normed, room->weights, index_weight_stride(sizes), rounds);
    }
    for (long row = 0; row < call->num_rows; row++) {
        const float *angles = call->angles + (long)call->positions[row] * index_turned_dim(sizes);
        float *key = room->keys + row * sizes->index_dim;
        norm_with(&shifted, INDEX_EPSILON, key, indexer->norm, sizes->index_dim, key);
        turn(sizes, key, angles);
        for (int head = 0; room->chosen && head < sizes->index_heads; head++)
            turn(sizes, room->queries + row * index_query_stride(sizes) + (long)head * sizes->index_dim, angles);
    }
}

// ---- scores

static bool uses_pairs(const decoder_sizes *sizes) { return HAS_BF16_PRODUCTS && sizes->element == BF16; }
static long depth_of(const decoder_sizes *sizes) {
    return sizes->element == BF16 ? round_up(sizes->index_dim, BF16_DEPTH) : sizes->index_dim;
}

static size_t scoring_bytes(const decoder_sizes *sizes) {
    long heads = index_weight_stride(sizes);
    return sizeof(float) * (size_t)(heads * depth_of(sizes) + KEYS_AT_ONCE * depth_of(sizes) + heads * KEYS_AT_ONCE + LANES);
}

scoring_space index_space_at(const decoder_sizes *sizes, void *scratch) {
    float *memory = scratch;
    long heads = index_weight_stride(sizes), depth = depth_of(sizes);
    return (scoring_space){(char *)memory, (char *)(memory + heads * depth), memory + (heads + KEYS_AT_ONCE) * depth};
}

void pack_index_queries(const decoder_sizes *sizes, const float *queries, char *packed) {
    long depth = depth_of(sizes);
    memset(packed, 0, sizeof(float) * (size_t)(index_weight_stride(sizes) * depth));
    for (long head = 0; head < sizes->index_heads; head++)
        for (int d = 0; d < sizes->index_dim; d += LANES) {
            vec numbers = vec_load(queries + head * sizes->index_dim + d);
            if (uses_pairs(sizes)) vec_store_bf16((bf16 *)packed + head * depth + d, numbers);
            else vec_store((float *)packed + head * depth + d, numbers);
        }
}

void multiply_index_keys(const decoder_sizes *sizes, scoring_space space, const char *const *keys, int count) {
    long depth = depth_of(sizes);
    int bytes = element_bytes_of((element)sizes->element), words = sizes->index_dim * bytes / 4, deep = (int)depth * bytes / 4;
    for (int first = 0; first < count; first += LANES) {
        uint32_t *block = (uint32_t *)space.packed + (long)first * deep;
        transpose(keys + first, words, block);
        memset(block + words * LANES, 0, sizeof(uint32_t) * LANES * (size_t)(deep - words));
    }
    bool is_bf16 = sizes->element == BF16;
    operand right = {space.packed, (is_bf16 ? 2L : 1L) * LANES * deep, is_bf16 ? 2 * LANES : LANES, is_bf16 ? PAIRS : ROWS_F32, NULL, 0};
    int heads = sizes->index_heads, blocks = count / LANES;
    if (uses_pairs(sizes))
        gemm_bf16(heads, blocks, (int)depth, (bf16 *)space.queries, depth, right, space.products, KEYS_AT_ONCE, false);
    else gemm_f32(heads, blocks, (int)depth, (float *)space.queries, depth, right, space.products, KEYS_AT_ONCE, false);
}

// Sums weighted heads in order. A sum of -0 becomes +0, which has the same place in the order.
static void sum_heads(const decoder_sizes *sizes, const float *weights, const float *products, int count, float *scores) {
    float scale = 1.0f / __builtin_sqrtf((float)sizes->index_heads * (float)sizes->index_dim);
    vec zero = vec_set(0.0f);
    for (int i = 0; i < count; i += LANES) {
        vec sum = zero;
        for (long head = 0; head < sizes->index_heads; head++) {
            vec product = vec_max(vec_load(products + head * KEYS_AT_ONCE + i), zero);
            sum = vec_fma(vec_set(weights[head] * scale), product, sum);
        }
        vec_store(scores + i, vec_add(sum, zero));
    }
}

// Scores the keys of one row that lie in one span of prefix and tail together.
static void run_scoring(const void *job, int unit, void *slot, void *scratch) {
    const scoring *all = job;
    const decoder_sizes *sizes = all->sizes;
    int row = all->first_row + unit / all->units_per_row, start = unit % all->units_per_row * INDEX_SPAN;
    const row_group *group = &all->call->groups[row];
    int count = (group->boundary + group->tail_lengths[0]) / all->keys.step;
    int end = start + INDEX_SPAN < count ? start + INDEX_SPAN : count;
    float *scores = slot ? slot : all->room->scores + (row - all->first_row) * all->stride + start;
    scoring_space space = index_space_at(sizes, scratch);
    long row_bytes = kv_row_bytes(form_of(all->all, row)), before = (long)all->keys.first_number * element_bytes_of((element)sizes->element);
    const char *keys = head_start(all->all, all->keys.place, row, 0, false) + before;
    if (start >= end) return;
    pack_index_queries(sizes, all->room->queries + row * index_query_stride(sizes), space.queries);
    for (int first = start; first < end; first += KEYS_AT_ONCE) {
        int some = end - first < KEYS_AT_ONCE ? end - first : KEYS_AT_ONCE, padded = (int)round_up(some, LANES);
        const char *rows[KEYS_AT_ONCE];
        for (int i = 0; i < padded; i++) {
            int key = (first + (i < some ? i : some - 1) + 1) * all->keys.step - 1;
            long at = key < group->boundary ? key : group->tail_slots[key - group->boundary];
            rows[i] = keys + at * row_bytes;
        }
        multiply_index_keys(sizes, space, rows, padded);
        sum_heads(sizes, all->room->weights + row * index_weight_stride(sizes), space.products, padded, scores + first - start);
    }
}

// ---- the choice

uint32_t least_chosen(const float *scores, int count, int wanted, int *num_equal) {
    uint32_t found = 0, mask = 0;
    for (int shift = 24; shift >= 0; shift -= 8) {
        int counts[256] = {0}, digit = 255;
        for (int i = 0; i < count; i++) {
            uint32_t order = score_order(scores[i]);
            if ((order & mask) == found) counts[order >> shift & 255]++;
        }
        for (; digit > 0 && counts[digit] < wanted; digit--) wanted -= counts[digit];
        found |= (uint32_t)digit << shift;
        mask |= 255u << shift;
    }
    *num_equal = wanted;
    return found;
}

int index_best(const float *scores, int count, int wanted, int32_t *best) {
    int num_equal, found = 0;
    uint32_t least = least_chosen(scores, count, wanted, &num_equal);
    for (int i = 0; i < count && found < wanted; i++) {
        uint32_t order = score_order(scores[i]);
        if (order < least || (order == least && num_equal-- <= 0)) continue;
        best[found++] = i;
    }
    return found;
}

// Writes the slots of the best keys.
static void choose(const float *scores, const row_group *group, int num_chosen, chosen_keys *chosen) {
    int found = index_best(scores, group->boundary + group->tail_lengths[0], num_chosen, chosen->prefix);
    chosen->num_prefix = chosen->num_tail = 0;
    for (int i = 0; i < found; i++) {
        if (chosen->prefix[i] < group->boundary) chosen->num_prefix++;
        else chosen->tail[chosen->num_tail++] = group->tail_slots[chosen->prefix[i] - group->boundary];
    }
    for (int i = chosen->num_tail; i < TAIL; i++) chosen->tail[i] = group->tail_slots[0];
    chosen->num_padded = (int)(round_up(chosen->num_prefix, KEYS_AT_ONCE) - chosen->num_prefix);
}

static void run_choice(const void *job, int unit, void *slot, void *scratch) {
    const scoring *all = job;
    int row = all->first_row + unit;
    chosen_keys *chosen = slot ? slot : all->room->chosen[row];
    (void)scratch;
    if (index_sees_more(all->sizes, &all->call->groups[row]))
        choose(all->room->scores + unit * all->stride, &all->call->groups[row], all->sizes->num_chosen_keys, chosen);
    else chosen->num_prefix = ALL_KEYS;
}

static scoring scoring_of_rows(const decoder_sizes *sizes, const index_room *room, const forward_call *call, const attention *all,
                               scored_keys keys, int first_row, int num_rows) {
    scoring job = scoring_of(sizes, call, keys.step);
    job.room = room, job.all = all, job.keys = keys, job.first_row = first_row, job.num_rows = num_rows;
    return job;
}

static void score_rows(frame *frame, const scoring *job) {
    stage_plan plan = {.num_units = job->num_rows * job->units_per_row,
                       .run = job->sizes->index_block ? run_block_scoring : run_scoring,
                       .job = job,
                       .job_bytes = sizeof *job,
                       .scratch_bytes = scoring_bytes(job->sizes),
                       .slot_bytes = sizeof(float) * (size_t)job->span,
                       .is_small = job->num_rows * most_keys_seen(job->call) * index_query_stride(job->sizes) < SCORING_WORTH_HELP};
    void *results[MOST_UNITS];
    run_stage(frame, &plan, results);
    for (int unit = 0; unit < plan.num_units; unit++) {
        long start = unit % job->units_per_row * job->span, left = job->stride - start;
        float *scores = job->room->scores + unit / job->units_per_row * job->stride + start;
        if (results[unit]) memcpy(scores, results[unit], sizeof(float) * (size_t)(left < job->span ? left : job->span));
    }
}

void index_score(frame *frame, const decoder_sizes *sizes, const index_room *room, const forward_call *call,
                 const attention *all, scored_keys keys, int first_row, int num_rows) {
    scoring job = scoring_of_rows(sizes, room, call, all, keys, first_row, num_rows);
    score_rows(frame, &job);
}

static void choose_rows(frame *frame, const scoring *job) {
    stage_plan plan = {.num_units = job->num_rows,
                       .run = job->sizes->index_block ? run_block_choice : run_choice,
                       .job = job,
                       .job_bytes = sizeof *job,
                       .scratch_bytes = sizeof(float) * (size_t)job->stride,
                       .slot_bytes = index_choice_bytes(job->sizes, 1),
                       .is_small = job->num_rows * job->stride < SCORING_WORTH_HELP};
    void *results[MOST_UNITS];
    run_stage(frame, &plan, results);
    for (int unit = 0; unit < plan.num_units; unit++) {
        long choice = (long)(job->first_row + unit) * choices_of_row(job->sizes);
        if (results[unit]) memcpy(job->room->chosen[choice], results[unit], plan.slot_bytes);
    }
}

void index_choose(frame *frame, const decoder_sizes *sizes, index_room *room, const forward_call *call, attention *all, int place) {
    int at_once = index_rows_at_once(sizes, call);
    for (int first = 0; first < call->num_rows; first += at_once) {
        int left = call->num_rows - first;
        scored_keys keys = {place, sizes->head_dim - sizes->index_dim, 1};
        scoring job = scoring_of_rows(sizes, room, call, all, keys, first, left < at_once ? left : at_once);
        score_rows(frame, &job);
        choose_rows(frame, &job);
    }
    room->attention = attention_over(frame, all, (const chosen_keys *const *)room->chosen, choices_of_row(sizes));
}
