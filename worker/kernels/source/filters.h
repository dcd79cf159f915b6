// The filters of worker/sampling/filters.py over one row's candidates, as in `transformers`.
#pragma once
#include <math.h>

#include "elementary.h"

// The parameters of filters.py, in the same order.
typedef struct {
    int64_t top_k;    // 0: all
    float rest;       // 1 - top_p; below 0: no such filter
    float log_min_p;  // -inf: no such filter
    float eta;        // 0: no such filter
    float root_eta;
} filter_params;

#define NUM_BUCKETS 2048
#define BUCKETS_PER_UNIT 32.0f  // of a score's distance from the best one

// The tokens that can still be drawn, in ascending order. `score` and `weight` have room up to the next multiple of
// BLOCK; after `count`, scores are -inf.
typedef struct {
    float *score;
    int32_t *id;  // NULL: all tokens, from 0
    int64_t count;
    float peak;  // highest score
} candidates;

typedef struct {
    float *weight;    // of each candidate, as a probability
    int32_t *id;      // room for the candidates' ids
    int32_t *member;  // candidates that a search still considers
    int32_t *bucket;  // of each member
    double *mass;     // [NUM_BUCKETS]
} filter_room;

// Cut in the order (score, id): candidates above `score` stay, and those of that score from index `first` on.
typedef struct {
    float score;
    int64_t first;
} cut_point;

static void pad(candidates *kept) {
    for (int64_t i = kept->count; i % BLOCK; i++) {
        kept->score[i] = -INFINITY;
        if (kept->id) kept->id[i] = 0;
    }
}

// Drops candidates before a cut.
static void keep_from(candidates *kept, cut_point cut, const filter_room *room) {
    int64_t count = 0;
    for (int64_t start = 0; start < kept->count; start += LANES) {
        int any = 0;
        for (int i = 0; i < LANES; i++) any |= kept->score[start + i] >= cut.score;
        if (!any) continue;
        for (int64_t i = start; i < start + LANES; i++) {
            float score = kept->score[i];
            int32_t id = kept->id ? kept->id[i] : (int32_t)i;
            kept->score[count] = score;
            room->id[count] = id;
            count += score > cut.score || (score == cut.score && i >= cut.first);
        }
    }
    kept->id = room->id;
    kept->count = count;
    pad(kept);
}

// Returns the sum of `count` numbers: sixteen lanes over stretches of 1,024, then stretches in order.
static double total(const float *x, int64_t count) {
    double sum = 0.0;
    for (int64_t start = 0; start < count; start += 1024) {
        int64_t end = start + 1024 < count ? start + 1024 : count;
        vec lanes = vec_set(0.0f);
        for (int64_t i = start; i < end; i += LANES) lanes = vec_add(lanes, vec_load(x + i));
        sum += (double)vec_sum(lanes);
    }
    return sum;
}

// Writes the candidates' softmax to `weight`; returns the logarithm of its denominator, relative to the best score's.
static double softmax(const candidates *kept, float *weight) {
    vec peak = vec_set(kept->peak);
    for (int64_t i = 0; i < kept->count; i += LANES)
        vec_store(weight + i, vec_exp(vec_sub(vec_load(kept->score + i), peak)));
    for (int64_t i = kept->count; i % LANES; i++) weight[i] = 0.0f;
    double denominator = total(weight, kept->count);
    vec divisor = vec_set((float)denominator);
    for (int64_t i = 0; i < kept->count; i += LANES) vec_store(weight + i, vec_div(vec_load(weight + i), divisor));
    return log_of(denominator);
}

// Makes candidates from a score on members; returns the sum of the others' weights, in the order of `total`.
static double split_at(const candidates *kept, const float *weight, float floor, const filter_room *room, int64_t *count) {
    double below = 0.0;
    *count = 0;
    for (int64_t start = 0; start < kept->count; start += 1024) {
        int64_t end = start + 1024 < kept->count ? start + 1024 : kept->count;
        float lanes[LANES] = {0.0f};
        for (int64_t i = start; i < end; i += LANES) {
            int any = 0;
            for (int j = 0; j < LANES; j++) {
                lanes[j] += kept->score[i + j] < floor ? weight[i + j] : 0.0f;
                any |= kept->score[i + j] >= floor;
            }
            for (int64_t j = i; any && j < i + LANES && j < end; j++) {
                room->member[*count] = (int32_t)j;
                *count += kept->score[j] >= floor;
            }
        }
        below += (double)vec_sum(vec_load(lanes));
    }
    return below;
}

// Sums the members' weights per bucket, and skips buckets while the running sum is at most `limit`.
static int32_t skip_buckets(const filter_room *room, const float *weight, int64_t count, float limit, double *below) {
    int32_t cut = NUM_BUCKETS - 1, last = 0;
    memset(room->mass, 0, NUM_BUCKETS * sizeof *room->mass);
    for (int64_t m = 0; m < count; m++) {
        int32_t bucket = room->bucket[m];
        room->mass[bucket] += weight ? (double)weight[room->member[m]] : 1.0;
        cut = bucket < cut ? bucket : cut;
        last = bucket > last ? bucket : last;
    }
    for (; cut < last && (float)(*below + room->mass[cut]) <= limit; cut++) *below += room->mass[cut];
    return cut;
}

// Keeps the members in one bucket.
static int64_t open_bucket(const filter_room *room, int32_t bucket, int64_t count) {
    int64_t num_left = 0;
    for (int64_t start = 0; start < count; start += LANES) {
        int64_t end = start + LANES < count ? start + LANES : count;
        int any = 0;
        for (int i = 0; i < LANES; i++) any |= room->bucket[start + i] == bucket;
        for (int64_t m = start; any && m < end; m++) {
            room->member[num_left] = room->member[m];
            num_left += room->bucket[m] == bucket;
        }
    }
    return num_left;
}

// Sorts members into buckets by distance from the best score, the best ones last.
static void fill_by_distance(const candidates *kept, const filter_room *room, int64_t count) {
    for (int64_t m = 0; m < count; m++) {
        float distance = (kept->peak - kept->score[room->member[m]]) * BUCKETS_PER_UNIT;
        room->bucket[m] = NUM_BUCKETS - 1 - (int32_t)(distance < NUM_BUCKETS - 1 ? distance : NUM_BUCKETS - 1);
    }
}

// Sorts members into buckets by some bits of the score.
static void fill_by_bits(const candidates *kept, const filter_room *room, int64_t count, int shift) {
    for (int64_t m = 0; m < count; m++)
        room->bucket[m] = (int32_t)((order_of(kept->score[room->member[m]]) >> shift) % NUM_BUCKETS);
}

// Returns the first member in the order (score, id) at which the running sum of weights, from `below` on, exceeds
// `limit`, else the last. Without weights each counts one. Instead of sorting, it sums buckets and opens the one with
// the cut: by distance from the best score, then by ever lower bits of the score.
static cut_point find_cut(
    const candidates *kept, const float *weight, float limit, double below, int64_t count, const filter_room *room
) {
    static const int SHIFTS[] = {0, 21, 10, 0};
    for (int level = 0; level < 4 && count > 1; level++) {
        if (level) fill_by_bits(kept, room, count, SHIFTS[level]);
        else fill_by_distance(kept, room, count);
        count = open_bucket(room, skip_buckets(room, weight, count, limit, &below), count);
    }
    int64_t m = 0;  // all scores are equal from here on
    for (; m < count - 1; m++) {
        below += weight ? (double)weight[room->member[m]] : 1.0;
        if ((float)below > limit) break;
    }
    return (cut_point){kept->score[room->member[m]], room->member[m]};
}

static void keep_top_k(candidates *kept, int64_t top_k, const filter_room *room) {
    if (top_k >= kept->count) return;
    for (int64_t i = 0; i < kept->count; i++) room->member[i] = (int32_t)i;
    cut_point cut = find_cut(kept, NULL, (float)(kept->count - top_k), 0.0, kept->count, room);
    if (cut.score > -INFINITY) keep_from(kept, (cut_point){cut.score, 0}, room);
}

// `rest` is 1 - top_p: the probability that is left out.
static void keep_top_p(candidates *kept, float rest, const filter_room *room) {
    int64_t count;
    double log_denominator = softmax(kept, room->weight);
    // All tokens this unlikely have at most half of `rest` together: they are not examined one by one.
    float floor = kept->peak - (float)(log_of(2.0 * (double)kept->count / (double)rest) - log_denominator);
    double below = split_at(kept, room->weight, floor, room, &count);
    keep_from(kept, find_cut(kept, room->weight, rest, below, count, room), room);
}

static void keep_min_p(candidates *kept, float log_min_p, const filter_room *room) {
    keep_from(kept, (cut_point){kept->peak + log_min_p, 0}, room);
}

// Returns the sum of p log(1 / p), with p = exp(score - peak) / denominator; scores 87 below the best count as 0.
static double entropy(const candidates *kept, const float *probability, double log_denominator) {
    vec peak = vec_set(kept->peak), far = vec_set(-87.0f), zero = vec_set(0.0f);
    double sum = 0.0;
    for (int64_t start = 0; start < kept->count; start += 1024) {
        int64_t end = start + 1024 < kept->count ? start + 1024 : kept->count;
        vec lanes = zero;
        for (int64_t i = start; i < end; i += LANES) {
            vec distance = vec_max(vec_sub(vec_load(kept->score + i), peak), far);
            lanes = vec_sub(lanes, vec_mul(vec_load(probability + i), distance));
        }
        sum += (double)vec_sum(lanes);
    }
    return log_denominator + sum;
}

static void keep_eta(candidates *kept, float eta, float root_eta, const filter_room *room) {
    double log_denominator = softmax(kept, room->weight);
    float likely[LANES], lowest[LANES];
    vec_store(likely, vec_exp(vec_set((float)-entropy(kept, room->weight, log_denominator))));
    float least = root_eta * likely[0] < eta ? root_eta * likely[0] : eta;
    for (int i = 0; i < LANES; i++) lowest[i] = kept->peak;
    for (int64_t start = 0; start < kept->count; start += LANES)
        for (int i = 0; i < LANES; i++) {
            float score = room->weight[start + i] >= least ? kept->score[start + i] : kept->peak;
            lowest[i] = score < lowest[i] ? score : lowest[i];
        }
    for (int i = 1; i < LANES; i++) lowest[0] = lowest[i] < lowest[0] ? lowest[i] : lowest[0];
    if (lowest[0] > -INFINITY) keep_from(kept, (cut_point){lowest[0], 0}, room);
}

// Applies the requested filters, in the order of filters.py.
static void filter(candidates *kept, const filter_params *params, const filter_room *room) {
    if (params->top_k) keep_top_k(kept, params->top_k, room);
    if (params->rest >= 0.0f) keep_top_p(kept, params->rest, room);
    if (params->log_min_p > -INFINITY) keep_min_p(kept, params->log_min_p, room);
    if (params->eta > 0.0f) keep_eta(kept, params->eta, params->root_eta, room);
}
