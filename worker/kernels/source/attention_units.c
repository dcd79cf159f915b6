// One unit of attention: scores, softmax and values, chunk by chunk.
#include "attention_units.h"

#include "elementary.h"
#include "packing.h"
#include "scan.h"

enum { PACKED_KEYS = 64 };  // keys packed at a time

#define NOTHING -3.0e38f  // maximum over no keys

typedef struct {
    char *keys, *values;  // packed
    char *widened;        // [PACKED_KEYS, head_dim] elements, for rows of codes
    char *gathered;       // [2, CHUNK, head_dim] elements, of chosen keys and their values
    float *scores;        // [num_queries, most columns] scores, then weights
    bf16 *weights;        // [num_queries, CHUNK] for products of bf16
    float *shrink;        // [num_queries]
} workspace;

static long columns_at_once(const attention *attention) {
    return attention->most_columns > CHUNK ? attention->most_columns : CHUNK;
}

static long widened_bytes(const attention *attention) {
    return (long)PACKED_KEYS * attention->sizes.head_dim * attention->element_bytes;
}

static workspace workspace_at(const attention *attention, char *memory) {
    long queries = round_up(attention->most_queries, LANES);
    workspace space;
    space.keys = memory;
    space.values = space.keys + round_up(4L * PACKED_KEYS * attention->depth, 64);
    space.widened = space.values + round_up(2L * PACKED_KEYS * attention->sizes.head_dim, 64);
    space.gathered = space.widened + round_up(widened_bytes(attention), 64);
    space.scores = (float *)(space.gathered + (attention->chosen ? 2 * CHUNK / PACKED_KEYS * widened_bytes(attention) : 0));
    space.weights = (bf16 *)(space.scores + queries * columns_at_once(attention));
    space.shrink = (float *)(space.weights + queries * CHUNK);
    return space;
}

size_t scratch_bytes(const attention *attention) {
    long queries = round_up(attention->most_queries, LANES);
    return (size_t)((char *)(workspace_at(attention, NULL).shrink + queries) - (char *)NULL);
}

// ---- parts

size_t part_bytes(int num_queries, int value_dim) {
    return (size_t)round_up(4 * (2 * round_up(num_queries, LANES) + (long)num_queries * value_dim), 64);
}

part part_at(void *slot, int num_queries) {
    float *maximum = slot, *sum = maximum + round_up(num_queries, LANES);
    return (part){maximum, sum, sum + round_up(num_queries, LANES)};
}

void scale_rows(float *rows, int num_rows, int value_dim, const float *factors) {
    for (int i = 0; i < num_rows; i++)
        for (int d = 0; d < value_dim; d += LANES) {
            float *place = rows + (long)i * value_dim + d;
            vec_store(place, vec_mul(vec_load(place), vec_set(factors[i])));
        }
}

void merge(part *whole, part next, int num_queries, int value_dim) {
    for (int first = 0; first < num_queries; first += LANES) {
        vec old = vec_load(whole->maximum + first), new = vec_load(next.maximum + first), maximum = vec_max(old, new);
        vec shrink = vec_exp2(vec_sub(old, maximum)), share = vec_exp2(vec_sub(new, maximum));
        vec sum = vec_mul(vec_load(next.sum + first), share);
        bool is_empty[LANES];
        for (int i = 0; i < LANES; i++) is_empty[i] = whole->sum[first + i] == 0.0f;
        vec_store(whole->maximum + first, maximum);
        vec_store(whole->sum + first, vec_fma(vec_load(whole->sum + first), shrink, sum));
        float shrinks[LANES], shares[LANES];
        vec_store(shrinks, shrink);
        vec_store(shares, share);
        for (int i = 0; i < LANES && first + i < num_queries; i++) {
            float *to = whole->output + (long)(first + i) * value_dim;
            const float *from = next.output + (long)(first + i) * value_dim;
            if (is_empty[i]) memcpy(to, from, sizeof(float) * (size_t)value_dim);  // keeps the signs of zeros
            for (int d = 0; d < value_dim && !is_empty[i]; d += LANES) {
                vec added = vec_mul(vec_load(from + d), vec_set(shares[i]));
                vec_store(to + d, vec_fma(vec_load(to + d), vec_set(shrinks[i]), added));
            }
        }
    }
}

// ---- scores

// Returns up to PACKED_KEYS rows of codes as elements.
static void widen(kv_form form, const char **rows, int count, char *widened) {
    if (form.code == KV_PLAIN) return;
    kv_widen(form, rows, count, widened);
    for (int i = 0; i < count; i++) rows[i] = widened + (long)i * form.head_dim * element_bytes_of(form.element);
}

// Packs a stripe of `count` keys, a multiple of sixteen, into the right side of a product; `next` is read after it.
static operand pack_keys(const attention *attention, const char *const *keys, int stripe, int count, const char *next,
                         long row_bytes, char *packed) {
    int words = attention->key_dim / attention->num_stripes * attention->element_bytes / 4;
    int end = (stripe + 1) * words;
    int words_deep = attention->depth * attention->element_bytes / 4;
    for (int first = 0; first < count; first += LANES) {
        uint32_t *block = (uint32_t *)packed + (long)first * words_deep;
        transpose(keys + first, words, block + (end - words) * LANES);
        if (stripe == attention->num_stripes - 1)
            memset(block + end * LANES, 0, sizeof(uint32_t) * LANES * (size_t)(words_deep - end));
        if (next) expect(next + first * row_bytes, LANES * row_bytes);
    }
    if (attention->element_bytes == 2) return (operand){packed, 2L * LANES * words_deep, 2 * LANES, PAIRS, NULL, 0};
    return (operand){packed, (long)LANES * words_deep, LANES, ROWS_F32, NULL, 0};
}

static void add_scores(const attention *attention, const head_rows *pair, const char *const *keys, int count,
                       const char *next, workspace space, float *scores, long stride) {
    kv_form form = form_of(attention, pair->group);
    operand right;
    for (int stripe = 0; stripe < attention->num_stripes; stripe++) {
        const char *rows[PACKED_KEYS];
        long offset = stripe * stripe_bytes(attention, pair->group);
        for (int i = 0; i < count; i++) rows[i] = keys[i] + offset;
        widen(form, rows, count, space.widened);
        right = pack_keys(attention, rows, stripe, count, next ? next + offset : NULL, kv_row_bytes(form), space.keys);
    }
    int depth = attention->depth, blocks = count / LANES, rows = pair->num_queries;
    if (attention->uses_bf16_products)
        gemm_bf16(rows, blocks, depth, (bf16 *)attention->queries + pair->first_query, depth, right, scores, stride, false);
    else
        gemm_f32(rows, blocks, depth, (float *)attention->queries + pair->first_query, depth, right, scores, stride, false);
}

// ---- spans of the prefix

// Returns the largest of `count` scores, a multiple of 64.
static float largest(const float *scores, int count) {
    vec most[4];
    for (int j = 0; j < 4; j++) most[j] = vec_load(scores + j * LANES);
    for (int i = 4 * LANES; i < count; i += 4 * LANES)
        for (int j = 0; j < 4; j++) most[j] = vec_max(most[j], vec_load(scores + i + j * LANES));
    return vec_max_lane(vec_max(vec_max(most[0], most[1]), vec_max(most[2], most[3])));
}

// Returns 0 for the first `num_unseen` of sixteen keys, 1 for the rest.
INLINE vec seen(int num_unseen) {
    static const float STEP[2 * LANES] = {[LANES] = 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1};
    return vec_load(STEP + LANES - (num_unseen < LANES ? num_unseen : LANES));
}

// Turns scores into weights 2^(score * scale - maximum), 0 for the first `unseen`; returns their sum. Unseen ones
// before the last multiple of 64 are left alone.
static float weigh(const attention *attention, float *scores, bf16 *weights, int unseen, int count, float maximum) {
    vec sums[4], scale = vec_set(attention->scale), shift = vec_set(-maximum);
    for (int j = 0; j < 4; j++) sums[j] = vec_set(0.0f);
    for (int i = unseen / PACKED_KEYS * PACKED_KEYS; i < count; i += 4 * LANES)
        for (int j = 0; j < 4; j++) {
            vec weight = vec_exp2(vec_fma(vec_load(scores + i + j * LANES), scale, shift));
            if (i + j * LANES < unseen) weight = vec_mul(weight, seen(unseen - i - j * LANES));
            sums[j] = vec_add(sums[j], weight);
            if (attention->uses_bf16_products) vec_store_bf16(weights + i + j * LANES, weight);
            else vec_store(scores + i + j * LANES, weight);
        }
    return vec_sum(vec_add(vec_add(sums[0], sums[2]), vec_add(sums[1], sums[3])));
}

// Adds biases to a chunk's unscaled scores.
static void add_biases(const attention *attention, const float *biases, int num_queries, int count, float *scores) {
    vec unscaled = vec_set(1.0f / attention->sizes.scale);
    for (int query = 0; query < num_queries; query++)
        for (int i = 0; i < count; i += LANES) {
            float *place = scores + (long)query * CHUNK + i;
            vec_store(place, vec_fma(vec_load(biases + i), unscaled, vec_load(place)));
        }
}

// Caps unscaled scores, which stay unscaled.
static void cap_scores(const unit_job *job, int num_queries, int count, long stride, float *scores) {
    float scale = job->attention->sizes.scale;
    vec share = vec_set(scale / job->softcap), most = vec_set(job->softcap / scale);
    for (int query = 0; query < num_queries; query++)
        for (int i = 0; i < count; i += LANES) {
            float *place = scores + query * stride + i;
            vec_store(place, vec_mul(vec_tanh(vec_mul(vec_load(place), share)), most));
        }
}

// Zeroes the weights of whole unseen blocks, and replaces scores of unseen keys beside seen ones by a seen one.
static void hide(const attention *attention, int unseen, float *scores, bf16 *weights) {
    int whole = unseen / PACKED_KEYS * PACKED_KEYS;
    if (attention->uses_bf16_products) memset(weights, 0, sizeof(bf16) * (size_t)whole);
    else memset(scores, 0, sizeof(float) * (size_t)whole);
    for (int i = whole; i < unseen; i++) scores[i] = scores[unseen];
}

// One query's softmax over a chunk without the first `unseen` keys, merged into the part.
static void softmax_of_query(const attention *attention, int unseen, int count, bool is_first, workspace space, int query,
                             part part) {
    float *scores = space.scores + (long)query * CHUNK, old = part.maximum[query];
    bf16 *weights = space.weights + (long)query * CHUNK;
    int untouched = unseen / PACKED_KEYS * PACKED_KEYS;
    if (unseen) hide(attention, unseen, scores, weights);
    if (unseen == count) {
        space.shrink[query] = part.sum[query] = 0.0f;
        part.maximum[query] = NOTHING;
        return;
    }
    float maximum = largest(scores + untouched, count - untouched) * attention->scale;
    maximum = !is_first && old > maximum ? old : maximum;
    float sum = weigh(attention, scores, weights, unseen, count, maximum);
    space.shrink[query] = is_first ? 0.0f : exp2_of(old - maximum);
    part.sum[query] = is_first ? sum : __builtin_fmaf(part.sum[query], space.shrink[query], sum);
    part.maximum[query] = maximum;
}

// Adds a stripe of weighted values to its columns of the part.
static void add_values(const attention *attention, kv_form form, int num_queries, const char *values, int first, int count,
                       const char *next, bool is_first, workspace space, float *output) {
    int row_dim = form.head_dim, value_dim = attention->value_dim;
    int width = value_dim / attention->num_stripes, blocks = width / LANES;
    long row_bytes = kv_row_bytes(form);
    if (form.code != KV_PLAIN) {
        const char *coded[PACKED_KEYS];
        for (int i = 0; i < count; i++) coded[i] = values + i * row_bytes;
        widen(form, coded, count, space.widened);
        values = space.widened;
    }
    if (!attention->uses_bf16_products) {
        expect(next, count * row_bytes);
        layout layout = attention->element_bytes == 2 ? ROWS_BF16 : ROWS_F32;
        operand plain = {values, LANES, row_dim, layout, NULL, 0};
        gemm_f32(num_queries, blocks, count, space.scores + first, CHUNK, plain, output, value_dim, !is_first);
        return;
    }
    const bf16 *rows = (const bf16 *)values;
    for (int i = 0; i < count; i += 2) {
        expect(next + i * row_bytes, 2 * row_bytes);
        interleave(rows + (long)i * row_dim, rows + (long)(i + 1) * row_dim, width, (bf16 *)space.values + (long)i * width);
    }
    operand packed = {space.values, 2 * LANES, 2L * width, PAIRS, NULL, 0};
    gemm_bf16(num_queries, blocks, count, space.weights + first, CHUNK, packed, output, value_dim, !is_first);
}

// A chunk of a span, and how many of its first keys each row does not see.
typedef struct {
    const head_rows *pair;
    const char *keys, *values;
    const int32_t *first_seen;  // as in the plan
    int start, count, unseen;   // slots; no row sees the first `unseen`, whole blocks
} key_chunk;

static int unseen_by(const key_chunk *chunk, int row) {
    int unseen = chunk->first_seen ? chunk->first_seen[row] - chunk->start : 0;
    return unseen < 0 ? 0 : unseen < chunk->count ? unseen : chunk->count;
}

// Copies chosen keys of the prefix side by side; the first ones repeat a key to fill a multiple of 64.
static const char *gather_chosen(const chosen_keys *chosen, const char *keys, long row_bytes, int start, int count, char *to) {
    for (int i = 0; i < count; i++) {
        int place = start + i - chosen->num_padded;
        memcpy(to + i * row_bytes, keys + chosen->prefix[place < 0 ? 0 : place] * row_bytes, (size_t)row_bytes);
    }
    return to;
}

static key_chunk key_chunk_of(const unit_job *job, const span *span, int start, workspace space) {
    const attention *attention = job->attention;
    const head_rows *pair = &attention->pairs[span->pair];
    long first = start * kv_row_bytes(form_of(attention, pair->group));
    key_chunk found = {.pair = pair,
                   .keys = head_start(attention, job->layer, pair->group, pair->head, false) + first,
                   .values = head_start(attention, job->layer, pair->group, pair->head, true) + first,
                   .first_seen = job->plan->first_seen[pair->group],
                   .start = start};
    int left = span->start + span->count - start, least = found.count = left < CHUNK ? left : CHUNK;
    const chosen_keys *chosen = chosen_of(attention, pair->group, pair->head);
    if (chosen) {
        long row_bytes = kv_row_bytes(form_of(attention, pair->group));
        const char *keys = found.keys - first, *values = found.values - first;
        found.keys = gather_chosen(chosen, keys, row_bytes, start, found.count, space.gathered);
        found.values = found.keys;
        if (values != keys)
            found.values = gather_chosen(chosen, values, row_bytes, start, found.count, space.gathered + CHUNK * row_bytes);
    }
    for (int row = 0; row < attention->groups[pair->group].num_rows; row++) {
        int unseen = unseen_by(&found, row);
        least = unseen < least ? unseen : least;
    }
    found.unseen = least / PACKED_KEYS * PACKED_KEYS;
    return found;
}

static void score_keys_of(const unit_job *job, const key_chunk *chunk, workspace space) {
    const attention *attention = job->attention;
    long row_bytes = kv_row_bytes(form_of(attention, chunk->pair->group));
    const float *biases = attention->groups[chunk->pair->group].biases;
    int num_queries = chunk->pair->num_queries, unseen = chunk->unseen;
    for (int first = unseen; first < chunk->count; first += PACKED_KEYS) {
        const char *rows[PACKED_KEYS];
        for (int i = 0; i < PACKED_KEYS; i++) rows[i] = chunk->keys + (first + i) * row_bytes;
        const char *next = chunk->values + first * row_bytes;
        add_scores(attention, chunk->pair, rows, PACKED_KEYS, next, space, space.scores + first, CHUNK);
    }
    if (job->softcap) cap_scores(job, num_queries, chunk->count - unseen, CHUNK, space.scores + unseen);
    if (biases) add_biases(attention, biases + chunk->start, num_queries, chunk->count, space.scores);
}

static void run_span(const unit_job *job, const span *span, void *slot, workspace space) {
    const attention *attention = job->attention;
    kv_form form = form_of(attention, attention->pairs[span->pair].group);
    long row_bytes = kv_row_bytes(form);
    int num_queries = attention->pairs[span->pair].num_queries;
    part part = part_at(slot, num_queries);
    for (int start = span->start; start < span->start + span->count; start += CHUNK) {
        key_chunk chunk = key_chunk_of(job, span, start, space);
        bool is_first = start == span->start;
        score_keys_of(job, &chunk, space);
        for (int i = 0; i < num_queries; i++)
            softmax_of_query(attention, unseen_by(&chunk, i / attention->heads_per_kv), chunk.count, is_first, space, i, part);
        if (!is_first) scale_rows(part.output, num_queries, attention->value_dim, space.shrink);
        for (int first = chunk.unseen; first < chunk.count; first += PACKED_KEYS) {
            for (int stripe = 0; stripe < attention->num_stripes; stripe++) {
                long offset = stripe * stripe_bytes(attention, chunk.pair->group) + first * row_bytes;
                float *output = part.output + stripe * (attention->value_dim / attention->num_stripes);
                add_values(attention, form, num_queries, chunk.values + offset, first, PACKED_KEYS,
                           chunk.keys + CHUNK * row_bytes + offset, is_first && first == chunk.unseen, space, output);
            }
        }
    }
}

// ---- tails

// Adds weighted values of `blocks` times sixteen dimensions from `first` on, key by key.
INLINE void add_tail(const int blocks, const kv_code code, kv_form form, const float *weights, const char *const *values,
                     int count, int first, float *output) {
    vec sum[4];
    for (int n = 0; n < blocks; n++) sum[n] = vec_set(0.0f);
    for (int i = 0; i < count; i++)
        for (int n = 0; n < blocks; n++)
            sum[n] = vec_fma(vec_set(weights[i]), kv_load(code, form, values[i], first + n * LANES), sum[n]);
    for (int n = 0; n < blocks; n++) vec_store(output + first + n * LANES, sum[n]);
}

INLINE void sum_rows(const kv_code code, kv_form form, int value_dim, const float *weights, const char *const *values, int count,
                     float *output) {
    int d = 0;
    for (; value_dim - d >= 4 * LANES; d += 4 * LANES) add_tail(4, code, form, weights, values, count, d, output);
    for (; d < value_dim; d += LANES) add_tail(1, code, form, weights, values, count, d, output);
}

void sum_values(kv_form form, int value_dim, const float *weights, const char *const *values, int count, float *output) {
    switch (form.code) {
        case KV_PLAIN: sum_rows(KV_PLAIN, form, value_dim, weights, values, count, output); break;
        case KV_INT8: sum_rows(KV_INT8, form, value_dim, weights, values, count, output); break;
        case KV_E4M3: sum_rows(KV_E4M3, form, value_dim, weights, values, count, output); break;
    }
}

// One query's softmax over its tail: of the TAIL scores in the row, those from `start` to `end` count, if any.
static void tail_of_query(const attention *attention, int group, const float *scores, const int32_t *columns, int start,
                          int end, const char *const *values, int query, part part) {
    float window[TAIL];
    for (int i = 0; i < TAIL; i++) window[i] = scores[columns[i >= start && i < end ? i : start]];
    float maximum = largest(window, TAIL) * attention->scale;
    for (int i = 0; i < TAIL; i += LANES) {
        vec score = vec_fma(vec_load(window + i), vec_set(attention->scale), vec_set(-maximum));
        vec_store(window + i, vec_exp2(score));
    }
    for (int i = 0; i < TAIL; i++) window[i] = i >= start && i < end ? window[i] : 0.0f;
    vec sum = vec_load(window);
    for (int i = LANES; i < TAIL; i += LANES) sum = vec_add(sum, vec_load(window + i));
    part.maximum[query] = end > start ? maximum : NOTHING;
    part.sum[query] = vec_sum(sum);
    int width = attention->value_dim / attention->num_stripes;
    for (int stripe = 0; stripe < attention->num_stripes; stripe++) {
        const char *rows[TAIL];
        for (int i = start; i < end; i++) rows[i] = values[i] + stripe * stripe_bytes(attention, group);
        sum_values(form_of(attention, group), width, window + start, rows + start, end - start,
                   part.output + (long)query * attention->value_dim + stripe * width);
    }
}

static void run_tails(const unit_job *job, const head_rows *pair, void *slot, workspace space) {
    const attention *attention = job->attention;
    const int32_t *first_seen = job->plan->first_seen[pair->group];
    int layer = job->layer, boundary = attention->groups[pair->group].boundary;
    const tail_columns *tail = &attention->tails[pair->group];
    long row_bytes = kv_row_bytes(form_of(attention, pair->group));
    const char *keys = head_start(attention, layer, pair->group, pair->head, false);
    const char *values = head_start(attention, layer, pair->group, pair->head, true);
    for (int first = 0; first < tail->num_columns; first += PACKED_KEYS) {
        int count = tail->num_columns - first < PACKED_KEYS ? tail->num_columns - first : PACKED_KEYS;
        const char *rows[PACKED_KEYS];
        for (int i = 0; i < count; i++) rows[i] = keys + tail->slots[first + i] * row_bytes;
        add_scores(attention, pair, rows, count, NULL, space, space.scores + first, tail->num_columns);
    }
    if (job->softcap) cap_scores(job, pair->num_queries, tail->num_columns, tail->num_columns, space.scores);
    part part = part_at(slot, pair->num_queries);
    for (int row = 0; row < attention->groups[pair->group].num_rows; row++) {
        const int32_t *columns = tail->columns + row * TAIL;
        const char *rows[TAIL];
        int start = first_seen && first_seen[row] > boundary ? first_seen[row] - boundary : 0;
        for (int i = 0; i < tail->lengths[row]; i++) rows[i] = values + tail->slots[columns[i]] * row_bytes;
        for (int i = 0; i < attention->heads_per_kv; i++) {
            int query = row * attention->heads_per_kv + i;
            tail_of_query(attention, pair->group, space.scores + (long)query * tail->num_columns, columns, start,
                          tail->lengths[row], rows, query, part);
        }
    }
}

void run_unit(const void *job, int unit, void *slot, void *scratch) {
    const unit_job *all = job;
    const span *span = &all->plan->units[all->first_unit + unit];
    const head_rows *pair = &all->attention->pairs[span->pair];
    workspace space = workspace_at(all->attention, scratch);
    switch (span->kind) {
        case PREFIX: run_span(all, span, slot, space); break;
        case SCANNED: run_scan(all->attention, all->layer, pair, slot, scratch); break;
        case TAILS: run_tails(all, pair, slot, space); break;
    }
}
