// Attention: splits a layer into units of work, merges their results, and serves models that have no decoder here.
#include "attention.h"

#include "attention_units.h"
#include "scan.h"

enum { SCANNED_FOR_ONE = 8 };  // scanned keys that take as long as one that is read
enum { SPAN = 2048, MOST_SLOT_BYTES = 32 << 20, ATTENTION_WORTH_HELP = 1 << 19 };

#define LOG2_E 1.44269504088896341f

// Returns the slots in any row's tail, each once, and each row's own among them.
static tail_columns columns_of(frame *frame, const row_group *group) {
    int first = INT32_MAX, last = 0, total = 0;
    for (int row = 0; row < group->num_rows; row++)
        for (int i = 0; i < group->tail_lengths[row]; i++, total++) {
            int slot = group->tail_slots[row * TAIL + i];
            first = slot < first ? slot : first;
            last = slot > last ? slot : last;
        }
    int32_t *column_of = frame_take(frame, sizeof(int32_t) * (size_t)(last - first + 1));
    memset(column_of, -1, sizeof(int32_t) * (size_t)(last - first + 1));
    int32_t *slots = frame_take(frame, sizeof(int32_t) * (size_t)round_up(total, LANES));
    int32_t *columns = frame_take(frame, sizeof(int32_t) * TAIL * (size_t)group->num_rows);
    int32_t *lengths = frame_take(frame, sizeof(int32_t) * (size_t)group->num_rows);
    int count = 0;
    for (int row = 0; row < group->num_rows; row++) {
        lengths[row] = group->tail_lengths[row];
        for (int i = 0; i < lengths[row]; i++) {
            int slot = group->tail_slots[row * TAIL + i];
            int32_t *column = &column_of[slot - first];
            if (*column < 0) slots[*column = count++] = slot;
            columns[row * TAIL + i] = *column;
        }
    }
    for (int i = count; i < round_up(count, LANES); i++) slots[i] = slots[0];
    return (tail_columns){slots, columns, lengths, (int)round_up(count, LANES)};
}

static void add_pair(attention *attention, int group, int head, long *num_query_elements) {
    int num_queries = attention->groups[group].num_rows * attention->heads_per_kv;
    attention->pairs[attention->num_pairs++] = (head_rows){group, head, num_queries, *num_query_elements};
    *num_query_elements += (long)num_queries * attention->depth;
}

attention *attention_new(frame *frame, const attention_sizes *sizes, int latent_rank, int key_dim, int num_stripes,
                         const row_group *groups, int num_groups) {
    attention *fresh = frame_take(frame, sizeof(attention));
    int is_bf16 = sizes->element == BF16, num_pairs = num_groups * sizes->num_kv_heads;
    bool uses_pairs = is_bf16 && HAS_BF16_PRODUCTS;
    *fresh = (attention){.sizes = *sizes,
                         .element_bytes = is_bf16 ? 2 : 4,
                         .uses_bf16_products = uses_pairs,
                         .depth = uses_pairs ? (int)round_up(key_dim, BF16_DEPTH) : key_dim,
                         .key_dim = key_dim,
                         .heads_per_kv = sizes->num_heads / sizes->num_kv_heads,
                         .value_dim = latent_rank ? latent_rank : sizes->head_dim,
                         .num_stripes = num_stripes,
                         .scale = sizes->scale * LOG2_E};
    row_group *copies = frame_take(frame, sizeof(row_group) * (size_t)num_groups);
    tail_columns *tails = frame_take(frame, sizeof(tail_columns) * (size_t)num_groups);
    for (int i = 0; i < num_groups; i++) {
        copies[i] = groups[i];
        if (latent_rank) copies[i].head_stride = copies[i].value_stride = 0;
        if (groups[i].scanned) {
            scanned_keys *scanned = frame_take(frame, sizeof *scanned);
            *scanned = *groups[i].scanned;
            copies[i].scanned = scanned;
        }
        tails[i] = columns_of(frame, &groups[i]);
        int num_queries = groups[i].num_rows * fresh->heads_per_kv;
        fresh->most_queries = num_queries > fresh->most_queries ? num_queries : fresh->most_queries;
        fresh->most_columns = tails[i].num_columns > fresh->most_columns ? tails[i].num_columns : fresh->most_columns;
    }
    fresh->groups = copies;
    fresh->tails = tails;
    fresh->pairs = frame_take(frame, sizeof(head_rows) * (size_t)num_pairs);
    long num_query_elements = 0;
    for (int i = 0; i < num_groups; i++)
        for (int head = 0; head < sizes->num_kv_heads; head++) add_pair(fresh, i, head, &num_query_elements);
    size_t query_bytes = (size_t)(num_query_elements + LANES * fresh->depth) * (uses_pairs ? 2 : 4);
    fresh->queries = memset(frame_take(frame, query_bytes), 0, query_bytes);  // the padding of a depth must be zero
    return fresh;
}

void *attention_slot(const attention *attention, int layer, int group, int row, int head, bool is_value) {
    long slot = attention->groups[group].first_slot + row;
    char *first = (char *)head_start(attention, layer, group, head, is_value);
    return first + slot * kv_row_bytes(form_of(attention, group));
}

void attention_keep(const attention *attention, int layer, int group, int row, int head, bool is_value, const float *from) {
    kv_form form = form_of(attention, group);
    char *to = attention_slot(attention, layer, group, row, head, is_value);
    for (int stripe = 0; stripe < attention->num_stripes; stripe++)
        kv_store(form, from + stripe * form.head_dim, to + stripe * stripe_bytes(attention, group));
}

void attention_query(attention *attention, int group, int row, int head, const float *query) {
    int kv_head = head / attention->heads_per_kv, place = head % attention->heads_per_kv;
    const head_rows *pair = &attention->pairs[group * attention->sizes.num_kv_heads + kv_head];
    long first = pair->first_query + (long)(row * attention->heads_per_kv + place) * attention->depth;
    for (int d = 0; d < attention->key_dim; d += LANES) {
        vec values = vec_load(query + d);
        if (attention->uses_bf16_products) vec_store_bf16((bf16 *)attention->queries + first + d, values);
        else vec_store((float *)attention->queries + first + d, values);
    }
}

// Returns the factor of a query's weighted values, with a sink in the denominator.
static float share_beside(float sink, const part *whole, int query) {
    float score = sink * LOG2_E, old = whole->maximum[query], maximum = old > score ? old : score;
    float shrink = exp2_of(old - maximum);
    return shrink / __builtin_fmaf(whole->sum[query], shrink, exp2_of(score - maximum));
}

// Writes a pair's rows of the output: its parts merged in order, divided by their sum.
static void write_output(const attention *attention, const head_rows *pair, const float *sinks, int num_parts,
                         void **parts, float *output) {
    const attention_sizes *sizes = &attention->sizes;
    int num_queries = pair->num_queries, value_dim = attention->value_dim, per_kv = attention->heads_per_kv;
    part whole = part_at(parts[0], num_queries);
    for (int i = 1; i < num_parts; i++) merge(&whole, part_at(parts[i], num_queries), num_queries, value_dim);
    for (int i = 0; i < num_queries; i++) {
        int head = pair->head * per_kv + i % per_kv;
        float *to = output + ((long)(i / per_kv) * sizes->num_heads + head) * value_dim;
        vec share = vec_set(sinks ? share_beside(sinks[head], &whole, i) : 1.0f / whole.sum[i]);
        for (int d = 0; d < value_dim; d += LANES) {
            vec mean = vec_mul(vec_load(whole.output + (long)i * value_dim + d), share);
            vec_store(to + d, sizes->element == BF16 ? vec_round_bf16(mean) : mean);
        }
    }
}

static size_t most_bytes(size_t a, size_t b) { return a > b ? a : b; }

// Returns the end of as many pairs as the memory for their parts allows.
static int last_of_wave(const attention *attention, const window_plan *plan, int first_pair) {
    int last = first_pair, first_unit = plan->first_unit[first_pair];
    size_t slot_bytes = part_bytes(attention->most_queries, attention->value_dim);
    while (last + 1 < attention->num_pairs) {
        int num_units = plan->first_unit[last + 2] - first_unit;
        if (num_units > MOST_UNITS || (size_t)num_units * slot_bytes > MOST_SLOT_BYTES) break;
        last++;
    }
    return last;
}

// ---- windows

// Returns the first slot that each row of a group sees: the window ends at the row's own position.
static const int32_t *first_seen(frame *frame, const row_group *rows, int window) {
    if (!window || rows->is_partial) return NULL;
    int32_t *first = frame_take(frame, sizeof(int32_t) * (size_t)rows->num_rows);
    for (int row = 0; row < rows->num_rows; row++) {
        int unseen = rows->boundary + rows->tail_lengths[row] - window;
        first[row] = unseen > 0 ? unseen : 0;
    }
    return first;
}

// Returns the start of the first chunk that any row of a group sees.
static int first_chunk(const row_group *rows, const int32_t *first_seen) {
    if (!first_seen) return 0;
    int first = rows->boundary;
    for (int row = 0; row < rows->num_rows; row++) first = first_seen[row] < first ? first_seen[row] : first;
    return first < rows->boundary ? first / CHUNK * CHUNK : first;
}

static span *add_units(const attention *attention, const window_plan *plan, int pair, span *to) {
    int group = attention->pairs[pair].group, end;
    const row_group *rows = &attention->groups[group];
    for (int start = first_chunk(rows, plan->first_seen[group]); start < rows->boundary; start = end) {
        end = (start / SPAN + 1) * SPAN;
        end = end < rows->boundary ? end : rows->boundary;
        *to++ = (span){PREFIX, pair, start, end - start};
    }
    if (rows->scanned) *to++ = (span){SCANNED, pair, 0, rows->scanned->num_chunks * SCAN_CHUNK / SCANNED_FOR_ONE};
    *to++ = (span){TAILS, pair, 0, 0};
    return to;
}

static window_plan *plan_new(frame *frame, const attention *attention, int window) {
    window_plan *plan = frame_take(frame, sizeof *plan);
    size_t num_pairs = (size_t)attention->num_pairs, num_groups = 0, num_units = 0;
    for (size_t pair = 0; pair < num_pairs; pair++) {
        const row_group *rows = &attention->groups[attention->pairs[pair].group];
        num_groups = (size_t)attention->pairs[pair].group + 1;
        num_units += (size_t)((rows->boundary + SPAN - 1) / SPAN + 2);
    }
    *plan = (window_plan){.window = window,
                          .first_seen = frame_take(frame, sizeof(int32_t *) * num_groups),
                          .units = frame_take(frame, sizeof(span) * num_units),
                          .first_unit = frame_take(frame, sizeof(int) * (num_pairs + 1)),
                          .next = attention->plans};
    for (size_t group = 0; group < num_groups; group++)
        plan->first_seen[group] = first_seen(frame, &attention->groups[group], window);
    span *end = plan->units;
    for (int pair = 0; pair < attention->num_pairs; pair++) {
        plan->first_unit[pair] = (int)(end - plan->units);
        end = add_units(attention, plan, pair, end);
    }
    plan->first_unit[num_pairs] = (int)(end - plan->units);
    for (int first = 0, last; first < attention->num_pairs; first = last + 1) {
        last = last_of_wave(attention, plan, first);
        int count = plan->first_unit[last + 1] - plan->first_unit[first];
        plan->num_slots = count > plan->num_slots ? count : plan->num_slots;
    }
    return plan;
}

// Makes room for the results of as many units as run at a time.
static void make_room(frame *frame, attention *attention, const window_plan *plan) {
    if (plan->num_slots <= attention->num_slots) return;
    size_t slot_bytes = part_bytes(attention->most_queries, attention->value_dim);
    attention->num_slots = plan->num_slots;
    attention->slots = frame_take(frame, (size_t)plan->num_slots * slot_bytes);
    attention->parts = frame_take(frame, (size_t)plan->num_slots * sizeof(void *));
}

static const window_plan *plan_of(attention *attention, frame *frame, int window) {
    window_plan *plan = attention->plans;
    while (plan && plan->window != window) plan = plan->next;
    if (!plan) attention->plans = plan = plan_new(frame, attention, window);
    make_room(frame, attention, plan);
    return plan;
}

// ---- chosen keys

// Returns the tail of a row that sees chosen keys.
static tail_columns tail_of(const chosen_keys *chosen) {
    static const int32_t IN_ORDER[TAIL] = {
        0,  1,  2,  3,  4,  5,  6,  7,  8,  9,  10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31,
        32, 33, 34, 35, 36, 37, 38, 39, 40, 41, 42, 43, 44, 45, 46, 47, 48, 49, 50, 51, 52, 53, 54, 55, 56, 57, 58, 59, 60, 61, 62, 63};
    return (tail_columns){chosen->tail, IN_ORDER, &chosen->num_tail, (int)round_up(chosen->num_tail, LANES)};
}

attention *attention_over(frame *frame, attention *all, const chosen_keys *const *chosen, int per_row) {
    size_t num_groups = (size_t)all->pairs[all->num_pairs - 1].group + 1;
    row_group *groups = frame_take(frame, sizeof *groups * num_groups);
    tail_columns *tails = frame_take(frame, sizeof *tails * num_groups);
    attention *fresh = frame_take(frame, sizeof *fresh);
    memcpy(groups, all->groups, sizeof *groups * num_groups);
    memcpy(tails, all->tails, sizeof *tails * num_groups);
    *fresh = *all;
    fresh->groups = groups;
    fresh->tails = tails;
    fresh->chosen = chosen;
    fresh->choices_per_group = per_row;
    fresh->plans = NULL;
    for (size_t i = 0; i < num_groups; i++) {
        const chosen_keys *keys = chosen_of(fresh, (int)i, 0);
        if (!keys) continue;
        groups[i].boundary = keys->num_padded + keys->num_prefix;
        tails[i] = tail_of(keys);
    }
    window_plan *plan = fresh->plans = plan_new(frame, fresh, 0);
    for (size_t i = 0; i < num_groups; i++)
        if (chosen_of(fresh, (int)i, 0)) plan->first_seen[i] = &chosen[i * (size_t)per_row]->num_padded;
    make_room(frame, fresh, plan);
    all->num_slots = fresh->num_slots, all->slots = fresh->slots, all->parts = fresh->parts;  // for later layers
    return fresh;
}

// ---- a layer

// Runs the units of some pairs, with their results in `attention->parts`.
static void run_wave(attention *attention, frame *frame, const unit_job *job, int num_units) {
    stage_plan stage = {.num_units = num_units,
                        .run = run_unit,
                        .job = job,
                        .job_bytes = sizeof *job,
                        .scratch_bytes = most_bytes(scratch_bytes(attention), scan_scratch_bytes(attention)),
                        .slot_bytes = part_bytes(attention->most_queries, attention->value_dim),
                        .own_slots = attention->slots};
    long work = 0;
    for (const span *unit = job->plan->units + job->first_unit; unit < job->plan->units + job->first_unit + num_units; unit++)
        work += (long)unit->count * attention->sizes.head_dim * (8 + attention->pairs[unit->pair].num_queries);
    stage.is_small = work < ATTENTION_WORTH_HELP;
    run_stage(frame, &stage, attention->parts);
}

void attention_run(attention *attention, frame *frame, int layer, const attention_view *view, float *output) {
    const window_plan *plan = plan_of(attention, frame, view->window);
    const attention_sizes *sizes = &attention->sizes;
    long first_row = 0;
    for (int first = 0, last; first < attention->num_pairs; first = last + 1) {
        last = last_of_wave(attention, plan, first);
        const int *first_unit = plan->first_unit;
        unit_job job = {attention, plan, view->softcap, layer, first_unit[first]};
        run_wave(attention, frame, &job, first_unit[last + 1] - first_unit[first]);
        for (int i = first; i <= last; i++) {
            const head_rows *pair = &attention->pairs[i];
            void **parts = attention->parts + first_unit[i] - first_unit[first];
            float *to = output + first_row * sizes->num_heads * attention->value_dim;
            write_output(attention, pair, view->sinks, first_unit[i + 1] - first_unit[i], parts, to);
            if (pair->head == sizes->num_kv_heads - 1) first_row += attention->groups[pair->group].num_rows;
        }
    }
}
