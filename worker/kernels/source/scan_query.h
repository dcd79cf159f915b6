// State of one query while it scans the keys of a head.
#pragma once
#include "elementwise.h"
#include "scan.h"
#include "scan_lookup.h"

typedef struct {
    lookup lookups;
    float query[256], maximum;
    float limit;  // scores below it are not read exactly
    bool is_flat;
    int num_best;
} scan_query;

typedef struct {
    scan_query *queries;  // [num_queries]
    int8_t *scores;       // [num_queries, most coded keys]
    const char **keys;    // [2 most best], with `values` of one query at a time
    const char **values;
    float *weights;  // [2 * num_best]
    float *dots;     // [LANES, LANES]
    float *moments;  // [num_queries, most clouds, 2]: mean and deviation of scores
    long most_keys, most_clouds;
} scan_space;

typedef struct {
    const attention *attention;
    const scanned_keys *keys;
    const head_rows *pair;
    long number;  // index of the head over all layers
    int layer;
} scan_place;

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

static float product(const float *first, const float *second, int count) {
    vec sum = vec_set(0.0f);
    for (int i = 0; i < count; i += LANES) sum = vec_fma(vec_load(first + i), vec_load(second + i), sum);
    return vec_sum(sum);
}
