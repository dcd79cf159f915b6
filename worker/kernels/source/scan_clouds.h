// Weights of the keys that are not among the best, by their moments.
//
// If keys and values are jointly normal, a query's scores are normal with mean m and variance t^2, the weights of those
// below a threshold u sum to n e^(m + t^2 / 2) P with P = Phi((u - m) / t - t), and the mean of their values under
// these weights is v + b (t^2 - t phi / P), where b is the slope of values by scores.
#pragma once
#include "elementary.h"
#include "scan_query.h"

// Computes the logarithm of a normal distribution's share P below x, and its density there over P (Abramowitz and
// Stegun 26.2.17; far below the mean by their asymptotic series).
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

// Multiplies a row with a matrix [count, count].
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

// Computes mean and deviation of a query's scores in each cloud; if all are flat, no key is read.
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
