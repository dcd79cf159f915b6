// Scores of all codes, and the best few keys exactly.
#pragma once
#include "elementary.h"
#include "packing.h"
#include "scan_query.h"

enum { MOST_STRIDE = 16, SAMPLE_OF_BEST = 32 };

static const float *mean_of_chunk(const scan_place *place, int chunk) {
    return place->keys->means + (place->number * place->keys->most_chunks + chunk) * place->attention->sizes.head_dim;
}

static void begin_query(const scan_place *place, int number, scan_query *to) {
    const attention *attention = place->attention;
    int head_dim = attention->sizes.head_dim;
    long first = place->pair->first_query + (long)number * attention->depth;
    const char *from = (const char *)attention->queries + first * (attention->uses_bf16_products ? 2 : 4);
    load(attention->uses_bf16_products ? BF16 : F32, from, head_dim, to->query);
    begin_lookup(to->query, place->keys->spreads + place->number * head_dim, head_dim, &to->lookups);
    to->lookups.origin = -3.0e38f;
    for (int chunk = 0; chunk < place->keys->num_chunks; chunk++) {
        float mean = product(to->query, mean_of_chunk(place, chunk), head_dim);
        to->lookups.origin = mean > to->lookups.origin ? mean : to->lookups.origin;
    }
}

static void score_chunk(const scan_place *place, int chunk, const scan_query *query, bool expects, int8_t *scores) {
    int head_dim = place->attention->sizes.head_dim, num_bytes = head_dim / 4;
    float mean = product(query->query, mean_of_chunk(place, chunk), head_dim);
    int8_t offset = narrowed((mean - query->lookups.origin) / query->lookups.step);
    const uint8_t *codes = place->keys->codes + place->number * code_bytes(place->keys, head_dim);
    codes += (long)chunk * SCAN_CHUNK * num_bytes;
    for (long first = 0; first < SCAN_CHUNK; first += 2 * CODE_BLOCK) {  // the usual head sizes 64 and 128 are unrolled
        const uint8_t *from = codes + first * num_bytes;
        if (expects) expect((const char *)from + (long)SCAN_CHUNK * num_bytes, 2L * CODE_BLOCK * num_bytes);
        if (num_bytes == 16) score_blocks(&query->lookups, from, 16, offset, scores + first);
        else if (num_bytes == 32) score_blocks(&query->lookups, from, 32, offset, scores + first);
        else score_blocks(&query->lookups, from, num_bytes, offset, scores + first);
    }
}

// ---- the best

// Returns the lowest score that at most about `num_best` keys reach, estimated from some of the blocks.
static int8_t threshold(const int8_t *scores, long num_keys, int num_best) {
    int stride = num_best / SAMPLE_OF_BEST, low = -128, high = 127;
    stride = stride < 1 ? 1 : stride > MOST_STRIDE ? MOST_STRIDE : stride;
    while (low < high) {
        int middle = (low + high) >> 1, found = 0;
        for (long block = 0; block < num_keys; block += (long)CODE_BLOCK * stride)
            found += __builtin_popcountll(at_least(scores + block, (int8_t)middle));
        if (found > num_best / stride) low = middle + 1;
        else high = middle;
    }
    return (int8_t)low;
}

// How rows of the scanned cache are stored.
static kv_form scanned_form(const attention *attention, const scanned_keys *keys) {
    return (kv_form){(kv_code)keys->kv_code, (element)attention->sizes.element, attention->sizes.head_dim};
}

static void find_best(const scan_place *place, const int8_t *scores, scan_query *query, scan_space space) {
    const attention *attention = place->attention;
    const scanned_keys *keys = place->keys;
    kv_form form = scanned_form(attention, keys);
    long row_bytes = kv_row_bytes(form);
    long element = place->layer * keys->layer_stride + place->pair->head * keys->head_stride;
    const char *first = (const char *)keys->cache + element * kv_unit(form) + keys->first * row_bytes;
    int most = 2 * keys->num_best, count = 0;
    int8_t least = threshold(scores, num_coded(keys), keys->num_best);
    query->limit = attention->sizes.scale * (query->lookups.origin + ((float)least - 0.5f) * query->lookups.step);
    for (long block = num_coded(keys) - CODE_BLOCK; block >= 0 && count < most; block -= CODE_BLOCK)
        for (uint64_t left = at_least(scores + block, least); left && count < most; left &= left - 1) {
            const char *key = first + (block + __builtin_ctzll(left)) * row_bytes;
            space.keys[count] = key;
            space.values[count] = key + keys->value_stride * kv_unit(form);
            for (long i = 0; i < row_bytes; i += 64) {
                __builtin_prefetch(key + i, 0, 2);
                __builtin_prefetch(space.values[count] + i, 0, 2);
            }
            count++;
        }
    query->num_best = count;
}

// Returns the terms of a key's score.
INLINE vec dots_of(const kv_code code, kv_form form, const char *key, const float *query) {
    vec sum = vec_set(0.0f);
    for (int d = 0; d < form.head_dim; d += LANES) sum = vec_fma(kv_load(code, form, key, d), vec_load(query + d), sum);
    return sum;
}

// Computes scores of sixteen keys, to base 2.
static void weigh_keys(const attention *attention, kv_form form, const float *query, const char *const *keys, float *dots,
                       float *out) {
    const char *rows[LANES];
    for (int i = 0; i < LANES; i++) {
        vec sum = form.code == KV_PLAIN  ? dots_of(KV_PLAIN, form, keys[i], query)
                  : form.code == KV_INT8 ? dots_of(KV_INT8, form, keys[i], query)
                                         : dots_of(KV_E4M3, form, keys[i], query);
        vec_store(dots + i * LANES, sum);
        rows[i] = (const char *)(dots + i * LANES);
    }
    uint32_t turned[LANES * LANES];
    transpose(rows, LANES, turned);
    vec sum = vec_load((const float *)turned);
    for (int i = 1; i < LANES; i++) sum = vec_add(sum, vec_load((const float *)turned + i * LANES));
    vec_store(out, vec_mul(sum, vec_set(attention->scale)));
}

// Adds the best keys exactly to the query's part; weights are relative to `query->maximum`.
static void add_best(const scan_place *place, scan_query *query, scan_space space, int number, part part) {
    const attention *attention = place->attention;
    kv_form form = scanned_form(attention, place->keys);
    int count = query->num_best, head_dim = attention->sizes.head_dim, padded = (int)round_up(count, LANES);
    query->maximum = -3.0e38f;
    part.sum[number] = 0.0f;
    if (!count) return;
    for (int i = count; i < padded; i++) space.keys[i] = space.keys[0];
    for (int i = 0; i < padded; i += LANES) 
        weigh_keys(attention, form, query->query, space.keys + i, space.dots, space.weights + i);
    for (int i = 0; i < count; i++) query->maximum = query->maximum > space.weights[i] ? query->maximum : space.weights[i];
    vec sum = vec_set(0.0f);
    for (int i = 0; i < padded; i += LANES)
        vec_store(space.weights + i, vec_exp2(vec_sub(vec_load(space.weights + i), vec_set(query->maximum))));
    for (int i = count; i < padded; i++) space.weights[i] = 0.0f;
    for (int i = 0; i < padded; i += LANES) sum = vec_add(sum, vec_load(space.weights + i));
    part.sum[number] = vec_sum(sum);
    sum_values(form, head_dim, space.weights, space.values, count, part.output + (long)number * head_dim);
}
