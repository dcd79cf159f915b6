// Attention: which units of work there are, who merges them, and the call for models that have no decoder here.
#include "attention.h"

#include "attention_units.h"
#include "scan.h"

enum { SCANNED_FOR_ONE = 8 };  // keys that are scanned in the time that one is read
enum { SPAN = 2048, MOST_SLOT_BYTES = 32 << 20, ATTENTION_WORTH_HELP = 1 << 19 };

#define LOG2_E 1.44269504088896341f

// The slots that any row's tail names, each once, and where each row finds its own among them.
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
    const row_group *rows = &attention->groups[group];
    head_rows *pair = &attention->pairs[attention->num_pairs++];
    *pair = (head_rows){
        .group = group, .head = head, .first_unit = attention->num_units, .first_query = *num_query_elements};
    pair->num_queries = rows->num_rows * attention->heads_per_kv;
    *num_query_elements += (long)pair->num_queries * attention->depth;
    for (int start = 0; start < rows->boundary; start += SPAN) {
        int count = rows->boundary - start < SPAN ? rows->boundary - start : SPAN;
        attention->units[attention->num_units++] = (span){PREFIX, attention->num_pairs - 1, start, count};
    }
    if (rows->scanned) {
        int count = rows->scanned->num_chunks * SCAN_CHUNK / SCANNED_FOR_ONE;
        attention->units[attention->num_units++] = (span){SCANNED, attention->num_pairs - 1, 0, count};
    }
    attention->units[attention->num_units++] = (span){TAILS, attention->num_pairs - 1, 0, 0};
    pair->num_units = attention->num_units - pair->first_unit;
}

attention *attention_new(frame *frame, const attention_sizes *sizes, const row_group *groups, int num_groups) {
    attention *fresh = frame_take(frame, sizeof(attention));
    int is_bf16 = sizes->element == BF16, num_pairs = num_groups * sizes->num_kv_heads;
    bool uses_pairs = is_bf16 && HAS_BF16_PRODUCTS;
    *fresh = (attention){.sizes = *sizes,
                         .element_bytes = is_bf16 ? 2 : 4,
                         .uses_bf16_products = uses_pairs,
                         .depth = uses_pairs ? (int)round_up(sizes->head_dim, BF16_DEPTH) : sizes->head_dim,
                         .heads_per_kv = sizes->num_heads / sizes->num_kv_heads,
                         .scale = sizes->scale * LOG2_E};
    size_t num_units = 0;
    row_group *copies = frame_take(frame, sizeof(row_group) * (size_t)num_groups);
    tail_columns *tails = frame_take(frame, sizeof(tail_columns) * (size_t)num_groups);
    for (int i = 0; i < num_groups; i++) {
        copies[i] = groups[i];
        if (groups[i].scanned) {
            scanned_keys *scanned = frame_take(frame, sizeof *scanned);
            *scanned = *groups[i].scanned;
            copies[i].scanned = scanned;
        }
        tails[i] = columns_of(frame, &groups[i]);
        num_units += (size_t)((groups[i].boundary + SPAN - 1) / SPAN + 2) * (size_t)sizes->num_kv_heads;
        int num_queries = groups[i].num_rows * fresh->heads_per_kv;
        fresh->most_queries = num_queries > fresh->most_queries ? num_queries : fresh->most_queries;
        fresh->most_columns = tails[i].num_columns > fresh->most_columns ? tails[i].num_columns : fresh->most_columns;
    }
    fresh->groups = copies;
    fresh->tails = tails;
    fresh->pairs = frame_take(frame, sizeof(head_rows) * (size_t)num_pairs);
    fresh->units = frame_take(frame, sizeof(span) * num_units);
    long num_query_elements = 0;
    for (int i = 0; i < num_groups; i++)
        for (int head = 0; head < sizes->num_kv_heads; head++) add_pair(fresh, i, head, &num_query_elements);
    size_t query_bytes = (size_t)(num_query_elements + LANES * fresh->depth) * (uses_pairs ? 2 : 4);
    fresh->queries = memset(frame_take(frame, query_bytes), 0, query_bytes);  // what fills up a depth stays zero
    return fresh;
}

void *attention_slot(const attention *attention, int layer, int group, int row, int head, bool is_value) {
    const row_group *rows = &attention->groups[group];
    long slot = (long)(rows->first_slot + row) * attention->sizes.head_dim;
    return (char *)head_start(attention, layer, group, head, is_value) + slot * attention->element_bytes;
}

void attention_query(attention *attention, int group, int row, int head, const float *query) {
    int kv_head = head / attention->heads_per_kv, place = head % attention->heads_per_kv;
    const head_rows *pair = &attention->pairs[group * attention->sizes.num_kv_heads + kv_head];
    long first = pair->first_query + (long)(row * attention->heads_per_kv + place) * attention->depth;
    for (int d = 0; d < attention->sizes.head_dim; d += LANES) {
        vec values = vec_load(query + d);
        if (attention->uses_bf16_products) vec_store_bf16((bf16 *)attention->queries + first + d, values);
        else vec_store((float *)attention->queries + first + d, values);
    }
}

// A pair's rows of the output: its parts merged in order, divided by their sum.
static void write_output(const attention *attention, const head_rows *pair, void **parts, float *output) {
    const attention_sizes *sizes = &attention->sizes;
    int num_queries = pair->num_queries, head_dim = sizes->head_dim, per_kv = attention->heads_per_kv;
    part whole = part_at(parts[0], num_queries);
    for (int i = 1; i < pair->num_units; i++) merge(&whole, part_at(parts[i], num_queries), num_queries, head_dim);
    for (int i = 0; i < num_queries; i++) {
        float *to = output + ((long)(i / per_kv) * sizes->num_heads + pair->head * per_kv + i % per_kv) * head_dim;
        vec share = vec_set(1.0f / whole.sum[i]);
        for (int d = 0; d < head_dim; d += LANES) {
            vec mean = vec_mul(vec_load(whole.output + (long)i * head_dim + d), share);
            vec_store(to + d, sizes->element == BF16 ? vec_round_bf16(mean) : mean);
        }
    }
}

static size_t most_bytes(size_t a, size_t b) { return a > b ? a : b; }

// As many pairs as fit into the memory for their parts.
static int last_of_wave(const attention *attention, int first_pair, size_t slot_bytes) {
    int last = first_pair, num_units = attention->pairs[first_pair].num_units;
    while (last + 1 < attention->num_pairs) {
        num_units += attention->pairs[last + 1].num_units;
        if (num_units > MOST_UNITS || (size_t)num_units * slot_bytes > MOST_SLOT_BYTES) break;
        last++;
    }
    return last;
}

void attention_run(attention *attention, frame *frame, int layer, float *output) {
    size_t slot_bytes = part_bytes(attention->most_queries, attention->sizes.head_dim);
    if (!attention->slots) {
        size_t num_slots = 0;
        for (int first = 0, last; first < attention->num_pairs; first = last + 1) {
            last = last_of_wave(attention, first, slot_bytes);
            const head_rows *from = &attention->pairs[first], *to = &attention->pairs[last];
            size_t num_units = (size_t)(to->first_unit + to->num_units - from->first_unit);
            num_slots = num_units > num_slots ? num_units : num_slots;
        }
        attention->slots = frame_take(frame, num_slots * slot_bytes);
        attention->parts = frame_take(frame, num_slots * sizeof(void *));
    }
    long first_row = 0;
    for (int first = 0, last; first < attention->num_pairs; first = last + 1) {
        last = last_of_wave(attention, first, slot_bytes);
        int first_unit = attention->pairs[first].first_unit;
        unit_job job = {attention, layer, first_unit};
        stage_plan plan = {.num_units = attention->pairs[last].first_unit + attention->pairs[last].num_units - first_unit,
                           .run = run_unit,
                           .job = &job,
                           .job_bytes = sizeof job,
                           .scratch_bytes = most_bytes(scratch_bytes(attention), scan_scratch_bytes(attention)),
                           .slot_bytes = slot_bytes,
                           .own_slots = attention->slots};
        long work = 0;
        for (int unit = first_unit; unit < first_unit + plan.num_units; unit++)
            work += (long)attention->units[unit].count * attention->sizes.head_dim *
                    (8 + attention->pairs[attention->units[unit].pair].num_queries);
        plan.is_small = work < ATTENTION_WORTH_HELP;
        run_stage(frame, &plan, attention->parts);
        for (int i = first; i <= last; i++) {
            const head_rows *pair = &attention->pairs[i];
            void **parts = attention->parts + pair->first_unit - first_unit;
            write_output(attention, pair, parts, output + first_row * attention->sizes.num_heads * attention->sizes.head_dim);
            if (pair->head == attention->sizes.num_kv_heads - 1) first_row += attention->groups[pair->group].num_rows;
        }
    }
}
