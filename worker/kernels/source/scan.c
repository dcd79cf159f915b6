// Scanned keys: scores of all codes, the best few exactly, the rest by their moments.
//
// The rest of a cloud: where keys and values are jointly normal, the scores of a query are normal with mean m and
// variance t^2, the weights of those below a threshold u sum to n e^(m + t^2 / 2) P with P = Phi((u - m) / t - t), and
// the mean of their values under these weights is v + b (t^2 - t phi / P), with b what values gain with scores.
#include "scan.h"

#include "elementary.h"
#include "elementwise.h"
#include "packing.h"
#include "scan_lookup.h"

enum { MOST_STRIDE = 16, SAMPLE_OF_BEST = 32 };

typedef struct {
    lookup lookups;
    float query[256], maximum;
    float limit;  // of the scores that are not read exactly
    bool is_flat;
    int num_best;
} scan_query;

typedef struct {
    scan_query *queries;  // [num_queries]
    int8_t *scores;       // [num_queries, most coded keys]
    const char **keys;    // [2 most best], with `values` of one query at a time
    const char **values;
    float *weights;  // [2 most best]
    float *dots;     // [LANES, LANES]
    float *moments;  // [num_queries, most clouds, 2]: mean and deviation of scores
    long most_keys, most_clouds;
} scan_space;

typedef struct {
    const attention *attention;
    const scanned_keys *keys;
    const head_rows *pair;
    long number;  // of the head among those of all layers
    int layer;
} scan_place;

// ---- memory

static scan_space space_at(long num_queries, long most_keys, long most_best, long most_clouds, char *memory) {
    scan_space space = {.most_keys = most_keys, .most_clouds = most_clouds};
    space.queries = (scan_query *)memory;
    space.scores = (int8_t *)(space.queries + num_queries);
    space.keys = (const char **)(space.scores + round_up(num_queries * most_keys, 64));
    space.values = space.keys + 2 * most_best;
    space.weights = (float *)(space.values + 2 * most_best);
    space.dots = space.weights + 2 * most_best;
    space.moments = space.dots + LANES * LANES;
    return space;
}

static scan_space scan_space_at(const attention *attention, char *memory) {
    long most_keys = 0, most_best = 0, most_clouds = 0;
    for (int pair = 0; pair < attention->num_pairs; pair++) {
        const scanned_keys *keys = attention->groups[attention->pairs[pair].group].scanned;
        if (!keys) continue;
        most_keys = num_coded(keys) > most_keys ? num_coded(keys) : most_keys;
        most_best = keys->num_best > most_best ? keys->num_best : most_best;
        most_clouds = num_clouds(keys) > most_clouds ? num_clouds(keys) : most_clouds;
    }
    return space_at(attention->most_queries, most_keys, round_up(most_best, 64), most_clouds, memory);
}

size_t scan_scratch_bytes(const attention *attention) {
    scan_space space = scan_space_at(attention, NULL);
    return (size_t)((char *)(space.moments + 2 * attention->most_queries * space.most_clouds) - (char *)NULL);
}

// ---- scores

static float product(const float *first, const float *second, int count) {
    vec sum = vec_set(0.0f);
    for (int i = 0; i < count; i += LANES) sum = vec_fma(vec_load(first + i), vec_load(second + i), sum);
    return vec_sum(sum);
}

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
    for (long first = 0; first < SCAN_CHUNK; first += 2 * CODE_BLOCK) {  // the usual heads of 64 and 128 are unrolled
        const uint8_t *from = codes + first * num_bytes;
        if (expects) expect((const char *)from + (long)SCAN_CHUNK * num_bytes, 2L * CODE_BLOCK * num_bytes);
        if (num_bytes == 16) score_blocks(&query->lookups, from, 16, offset, scores + first);
        else if (num_bytes == 32) score_blocks(&query->lookups, from, 32, offset, scores + first);
        else score_blocks(&query->lookups, from, num_bytes, offset, scores + first);
    }
}

// ---- the best

// The lowest score that at most about `num_best` keys reach, by some of all blocks.
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

static void find_best(const scan_place *place, const int8_t *scores, scan_query *query, scan_space space) {
    const attention *attention = place->attention;
    const scanned_keys *keys = place->keys;
    long row_bytes = (long)attention->sizes.head_dim * attention->element_bytes;
    long element = place->layer * keys->layer_stride + place->pair->head * keys->head_stride;
    const char *first = (const char *)keys->cache + element * attention->element_bytes + keys->first * row_bytes;
    int most = 2 * keys->num_best, count = 0;
    int8_t least = threshold(scores, num_coded(keys), keys->num_best);
    query->limit = attention->sizes.scale * (query->lookups.origin + ((float)least - 0.5f) * query->lookups.step);
    for (long block = num_coded(keys) - CODE_BLOCK; block >= 0 && count < most; block -= CODE_BLOCK)
        for (uint64_t left = at_least(scores + block, least); left && count < most; left &= left - 1) {
            const char *key = first + (block + __builtin_ctzll(left)) * row_bytes;
            space.keys[count] = key;
            space.values[count] = key + keys->value_stride * attention->element_bytes;
            for (long i = 0; i < row_bytes; i += 64) {
                __builtin_prefetch(key + i, 0, 2);
                __builtin_prefetch(space.values[count] + i, 0, 2);
            }
            count++;
        }
    query->num_best = count;
}

// Scores of sixteen keys, to base 2.
static void weigh_keys(const attention *attention, const float *query, const char *const *keys, float *dots, float *out) {
    const char *rows[LANES];
    for (int i = 0; i < LANES; i++) {
        vec sum = vec_set(0.0f);
        for (int d = 0; d < attention->sizes.head_dim; d += LANES)
            sum = vec_fma(load_elements(attention, keys[i], d), vec_load(query + d), sum);
        vec_store(dots + i * LANES, sum);
        rows[i] = (const char *)(dots + i * LANES);
    }
    uint32_t turned[LANES * LANES];
    transpose(rows, LANES, turned);
    vec sum = vec_load((const float *)turned);
    for (int i = 1; i < LANES; i++) sum = vec_add(sum, vec_load((const float *)turned + i * LANES));
    vec_store(out, vec_mul(sum, vec_set(attention->scale)));
}

// Adds the best keys, exactly, to what is there of the query; weights are relative to `query->maximum`.
static void add_best(const attention *attention, scan_query *query, scan_space space, int number, part part) {
    int count = query->num_best, head_dim = attention->sizes.head_dim, padded = (int)round_up(count, LANES);
    query->maximum = -3.0e38f;
    part.sum[number] = 0.0f;
    if (!count) return;
    for (int i = count; i < padded; i++) space.keys[i] = space.keys[0];
    for (int i = 0; i < padded; i += LANES) weigh_keys(attention, query->query, space.keys + i, space.dots, space.weights + i);
    for (int i = 0; i < count; i++) query->maximum = query->maximum > space.weights[i] ? query->maximum : space.weights[i];
    vec sum = vec_set(0.0f);
    for (int i = 0; i < padded; i += LANES)
        vec_store(space.weights + i, vec_exp2(vec_sub(vec_load(space.weights + i), vec_set(query->maximum))));
    for (int i = count; i < padded; i++) space.weights[i] = 0.0f;
    for (int i = 0; i < padded; i += LANES) sum = vec_add(sum, vec_load(space.weights + i));
    part.sum[number] = vec_sum(sum);
    sum_values(attention, space.weights, space.values, count, part.output + (long)number * head_dim);
}

// ---- the rest

// Logarithm of the share P of a normal distribution below x, and its density there over P (Abramowitz and Stegun
// 26.2.17; far below the mean, where both are next to nothing, by their asymptotic series).
static void normal(float x, float *log_share, float *density) {
    double size = x < 0 ? -x : x, log_density = -0.5 * size * size - 0.91893853;
    if (x < -5.0f) {
        *density = (float)(size + 1.0 / size);
        *log_share = (float)(log_density - log_of(size + 1.0 / size));
        return;
    }
    double t = 1.0 / (1.0 + 0.2316419 * size), height = exp_of(log_density);
    double series = t * (0.31938153 + t * (-0.356563782 + t * (1.781477937 + t * (-1.821255978 + t * 1.330274429))));
    double share = x < 0 ? height * series : 1.0 - height * series;
    *density = (float)(height / share);
    *log_share = (float)log_of(share);
}

// A row of numbers times a matrix [count, count].
static void times_matrix(const float *row, const float *matrix, int count, float *out) {
    for (int column = 0; column < count; column += 4 * LANES) {
        int num_blocks = count - column < 4 * LANES ? (count - column) / LANES : 4;
        vec sums[4] = {vec_set(0.0f), vec_set(0.0f), vec_set(0.0f), vec_set(0.0f)};
        for (int i = 0; i < count; i++)
            for (int n = 0; n < num_blocks; n++)
                sums[n] = vec_fma(vec_set(row[i]), vec_load(matrix + (long)i * count + column + n * LANES), sums[n]);
        for (int n = 0; n < num_blocks; n++) vec_store(out + column + n * LANES, sums[n]);
    }
}

typedef struct {
    const float *mean_key, *mean_value, *key_changes, *value_changes;
} cloud;

static cloud cloud_at(const scan_place *place, int number) {
    long head_dim = place->attention->sizes.head_dim;
    const float *first = place->keys->moments + (place->number * place->keys->most_clouds + number) * 2 * head_dim * (head_dim + 1);
    const float *changes = first + 2 * head_dim;
    return (cloud){first, first + head_dim, changes, changes + head_dim * head_dim};
}

// Mean and deviation of a query's scores in each cloud; where all are flat, no key is worth reading.
static void look_at_clouds(const scan_place *place, scan_query *query, float *moments) {
    int head_dim = place->attention->sizes.head_dim;
    float scale = place->attention->sizes.scale;
    query->is_flat = true;
    for (int i = 0; i < num_clouds(place->keys); i++) {
        cloud cloud = cloud_at(place, i);
        float spread[256];
        times_matrix(query->query, cloud.key_changes, head_dim, spread);
        float variance = scale * scale * product(query->query, spread, head_dim);
        moments[2 * i] = scale * product(query->query, cloud.mean_key, head_dim);
        moments[2 * i + 1] = __builtin_sqrtf(variance > 1e-4f ? variance : 1e-4f);
        query->is_flat = query->is_flat && moments[2 * i + 1] < place->keys->flat_deviation;
    }
}

static void rescale(scan_query *query, float maximum, int head_dim, float *sum, float *output) {
    float shrink = exp2_of(query->maximum - maximum);
    scale_rows(output, 1, head_dim, &shrink);
    *sum *= shrink;
    query->maximum = maximum;
}

static void add_cloud(const scan_place *place, int number, scan_query *query, const float *moments, float *sum,
                      float *output) {
    int head_dim = place->attention->sizes.head_dim, num_chunks = place->keys->num_chunks - number * CLOUD_CHUNKS;
    cloud cloud = cloud_at(place, number);
    float mean = moments[2 * number], deviation = moments[2 * number + 1], log_share = 0.0f, density = 0.0f, gains[256];
    if (!query->is_flat) normal((query->limit - mean) / deviation - deviation, &log_share, &density);
    float num_keys = (float)(SCAN_CHUNK * (num_chunks < CLOUD_CHUNKS ? num_chunks : CLOUD_CHUNKS));
    float height = (mean + 0.5f * deviation * deviation + log_share + (float)log_of(num_keys)) * 1.44269504f;
    if (height > query->maximum) rescale(query, height, head_dim, sum, output);
    float weight = exp2_of(height - query->maximum), gain = place->attention->sizes.scale * (1.0f - density / deviation);
    times_matrix(query->query, cloud.value_changes, head_dim, gains);
    *sum += weight;
    for (int d = 0; d < head_dim; d += LANES) {
        vec value = vec_fma(vec_load(gains + d), vec_set(gain), vec_load(cloud.mean_value + d));
        vec_store(output + d, vec_fma(value, vec_set(weight), vec_load(output + d)));
    }
}

// ---- all of it

static void score_keys(const scan_place *place, scan_space space) {
    for (int chunk = 0; chunk < place->keys->num_chunks; chunk++) {
        bool expects = true;
        for (int i = 0; i < place->pair->num_queries; i++) {
            if (space.queries[i].is_flat) continue;
            int8_t *scores = space.scores + i * space.most_keys + (long)chunk * SCAN_CHUNK;
            score_chunk(place, chunk, &space.queries[i], expects, scores);
            expects = false;
        }
    }
}

void run_scan(const attention *attention, int layer, const head_rows *pair, void *slot, void *scratch) {
    const scanned_keys *keys = attention->groups[pair->group].scanned;
    scan_space space = scan_space_at(attention, scratch);
    scan_place place = {attention, keys, pair, (long)layer * attention->sizes.num_kv_heads + pair->head, layer};
    part part = part_at(slot, pair->num_queries);
    int head_dim = attention->sizes.head_dim;
    for (int i = 0; i < pair->num_queries; i++) {
        begin_query(&place, i, &space.queries[i]);
        look_at_clouds(&place, &space.queries[i], space.moments + 2 * i * space.most_clouds);
    }
    score_keys(&place, space);
    for (int i = 0; i < pair->num_queries; i++) {
        scan_query *query = &space.queries[i];
        float *output = part.output + (long)i * head_dim;
        memset(output, 0, sizeof(float) * (size_t)head_dim);
        query->num_best = 0;
        if (!query->is_flat) find_best(&place, space.scores + i * space.most_keys, query, space);
        add_best(attention, query, space, i, part);
        for (int cloud = 0; cloud < num_clouds(keys); cloud++)
            add_cloud(&place, cloud, query, space.moments + 2 * i * space.most_clouds, &part.sum[i], output);
        part.maximum[i] = query->maximum;
    }
}
