// What drafts keep of a chunk of keys and values: means, moments merged into those of its cloud, and codes.
//
// A code has two bits per dimension: the side of the mean, and whether it is far from it (the levels of a normal
// distribution's best quantizer of four). Two dimensions make a nibble, four a byte; a block's keys are side by side.
#include "elementwise.h"
#include "gemm.h"
#include "kv_codes.h"
#include "packing.h"
#include "scan.h"

#define FAR_FROM_MEAN 1.22f                     // in mean distances
enum { MOMENT_STRIDE = 2 };                     // moments use every other position
enum { PIECE = MOMENT_STRIDE * LANES };         // positions at once
enum { MOST_AT_ONCE = 64 };                     // heads whose results are kept at once

typedef struct {
    attention_sizes sizes;
    scanned_keys keys;
    int first_head, chunk;  // index of the head over all layers
} intake;

// Results of one head: mean key and value, spread of keys, moments of its cloud, codes.
typedef struct {
    float *means, *spread, *moments;
    uint8_t *codes;
} head_intake;

static long count_moments(int head_dim) { return 2L * head_dim * (head_dim + 1); }

static size_t intake_bytes(int head_dim) {
    return sizeof(float) * (size_t)(3 * head_dim + count_moments(head_dim)) + (size_t)(SCAN_CHUNK * (head_dim / 4));
}

static head_intake intake_in(void *slot, int head_dim) {
    float *means = slot, *spread = means + 2 * head_dim, *moments = spread + head_dim;
    return (head_intake){means, spread, moments, (uint8_t *)(moments + count_moments(head_dim))};
}

// Where these are stored.
static head_intake kept(const intake *intake, long head) {
    const scanned_keys *keys = &intake->keys;
    int head_dim = intake->sizes.head_dim, chunk = intake->chunk;
    long cloud = head * keys->most_clouds + chunk / CLOUD_CHUNKS;
    return (head_intake){(float *)keys->means + (head * keys->most_chunks + chunk) * head_dim,
                         (float *)keys->spreads + head * head_dim,
                         (float *)keys->moments + cloud * count_moments(head_dim),
                         (uint8_t *)keys->codes + head * code_bytes(keys, head_dim) + (long)chunk * SCAN_CHUNK * (head_dim / 4)};
}

// ---- one head

// Loads keys and values [count, 2 * head_dim] of the chunk's positions from `first` on.
static void load_pairs(const intake *intake, long head, int first, int count, float *rows) {
    const scanned_keys *keys = &intake->keys;
    int head_dim = intake->sizes.head_dim, num_heads = intake->sizes.num_kv_heads;
    kv_form form = {(kv_code)keys->kv_code, (element)intake->sizes.element, head_dim};
    long position = keys->first + (long)intake->chunk * SCAN_CHUNK + first;
    long start = head / num_heads * keys->layer_stride + head % num_heads * keys->head_stride;
    for (int part = 0; part < 2; part++) {
        const char *from = (const char *)keys->cache + (start + part * keys->value_stride) * kv_unit(form);
        for (int i = 0; i < count; i++)
            kv_read(form, from + (position + i) * kv_row_bytes(form), rows + (2 * i + part) * head_dim);
    }
}

// Loads the same minus their means.
static void load_centred(const intake *intake, long head, int first, const float *means, float *rows) {
    int width = 2 * intake->sizes.head_dim;
    load_pairs(intake, head, first, PIECE, rows);
    for (int i = 0; i < PIECE; i++)
        for (int d = 0; d < width; d += LANES)
            vec_store(rows + i * width + d, vec_sub(vec_load(rows + i * width + d), vec_load(means + d)));
}

static void scale_by(float *numbers, long count, float factor) {
    for (long i = 0; i < count; i += LANES) vec_store(numbers + i, vec_mul(vec_load(numbers + i), vec_set(factor)));
}

static void find_means(const intake *intake, long head, float *rows, float *means) {
    int width = 2 * intake->sizes.head_dim;
    memset(means, 0, sizeof(float) * (size_t)width);
    for (int first = 0; first < SCAN_CHUNK; first += PIECE) {
        load_pairs(intake, head, first, PIECE, rows);
        for (int i = 0; i < PIECE; i++) add(means, rows + i * width, width, false);
    }
    scale_by(means, width, 1.0f / SCAN_CHUNK);
}

static void find_spread(const intake *intake, long head, float *rows, const float *means, float *spread) {
    int head_dim = intake->sizes.head_dim;
    memset(spread, 0, sizeof(float) * (size_t)head_dim);
    for (int first = 0; first < SCAN_CHUNK; first += PIECE) {
        load_centred(intake, head, first, means, rows);
        for (int i = 0; i < PIECE; i++)
            for (int d = 0; d < head_dim; d++) spread[d] += __builtin_fabsf(rows[2 * i * head_dim + d]);
    }
    scale_by(spread, head_dim, 1.0f / SCAN_CHUNK);
}

// Transposes sixteen rows' keys: [head_dim, 16].
static void turn_keys(const float *rows, long stride, int head_dim, float *turned) {
    const char *keys[LANES];
    for (int i = 0; i < LANES; i++) keys[i] = (const char *)(rows + i * stride);
    transpose(keys, head_dim, (uint32_t *)turned);
}

// Codes sixteen keys, side by side in their block: levels 0 to 3, from far below to far above the mean.
static void code_keys(const float *turned, const float *spread, int head_dim, uint8_t *codes) {
    for (int d = 0; d < head_dim; d += 4) {
        int32_t bits[LANES] = {0};
        for (int j = 0; j < 4; j++) {
            float limit = FAR_FROM_MEAN * spread[d + j];
            const float *distance = turned + (d + j) * LANES;
            for (int key = 0; key < LANES; key++) {
                int is_above = distance[key] > 0.0f, is_far = __builtin_fabsf(distance[key]) > limit;
                bits[key] |= (2 * is_above + (is_above == is_far)) << 2 * j;
            }
        }
        for (int key = 0; key < LANES; key++) codes[d / 4 * CODE_BLOCK + key] = (uint8_t)bits[key];
    }
}

// Adds covariances of keys and values with keys, [head_dim, head_dim] each.
static void add_changes(const float *rows, const float *turned, int head_dim, float *changes) {
    for (int part = 0; part < 2; part++) {
        operand right = {rows + part * head_dim, LANES, MOMENT_STRIDE * 2 * head_dim, ROWS_F32, NULL, 0};
        gemm_f32(head_dim, head_dim / LANES, LANES, turned, LANES, right, changes + part * head_dim * head_dim, head_dim, true);
    }
}

// Merges a chunk's covariances, and those of the means, with its cloud's earlier ones.
static void join_cloud(const float *means, const float *before, float share, int head_dim, float *moments) {
    float away[512], *changes = moments + 2 * head_dim;
    for (int d = 0; d < 2 * head_dim; d++) {
        away[d] = means[d] - before[d];
        moments[d] = before[d] + share * away[d];
    }
    for (int part = 0; part < 2; part++)
        for (int i = 0; i < head_dim; i++)
            for (int j = 0; j < head_dim; j++) {
                long place = ((long)part * head_dim + i) * head_dim + j;
                float between = (1.0f - share) * away[i] * away[part * head_dim + j], old = before[2 * head_dim + place];
                changes[place] = old + share * (changes[place] * (1.0f * MOMENT_STRIDE / SCAN_CHUNK) + between - old);
            }
}

static void take_in_head(const void *job, int unit, void *slot, void *scratch) {
    const intake *intake = job;
    int head_dim = intake->sizes.head_dim, chunk = intake->chunk;
    long head = intake->first_head + unit;
    head_intake result = intake_in(slot, head_dim), before = kept(intake, head);
    float *rows = scratch, *turned = rows + PIECE * 2 * head_dim, *changes = result.moments + 2 * head_dim;
    find_means(intake, head, rows, result.means);
    if (chunk == 0) find_spread(intake, head, rows, result.means, result.spread);
    else memcpy(result.spread, before.spread, sizeof(float) * (size_t)head_dim);
    memset(changes, 0, sizeof(float) * 2 * (size_t)(head_dim * head_dim));
    for (int first = 0; first < SCAN_CHUNK; first += PIECE) {
        load_centred(intake, head, first, result.means, rows);
        turn_keys(rows, MOMENT_STRIDE * 2 * head_dim, head_dim, turned);
        add_changes(rows, turned, head_dim, changes);
        for (int i = 0; i < PIECE; i += LANES) {
            int block = (first + i) / CODE_BLOCK * CODE_BLOCK;
            turn_keys(rows + i * 2 * head_dim, 2 * head_dim, head_dim, turned);
            code_keys(turned, result.spread, head_dim, result.codes + block * (head_dim / 4) + (first + i) % CODE_BLOCK);
        }
    }
    join_cloud(result.means, before.moments, 1.0f / (float)(chunk % CLOUD_CHUNKS + 1), head_dim, result.moments);
}

// ---- all heads

static void keep_intake(const intake *intake, long head, void *slot) {
    int head_dim = intake->sizes.head_dim;
    head_intake from = intake_in(slot, head_dim), to = kept(intake, head);
    memcpy(to.means, from.means, sizeof(float) * (size_t)head_dim);
    memcpy(to.spread, from.spread, sizeof(float) * (size_t)head_dim);
    memcpy(to.moments, from.moments, sizeof(float) * (size_t)count_moments(head_dim));
    memcpy(to.codes, from.codes, (size_t)(SCAN_CHUNK * (head_dim / 4)));
}

void scan_take_in(team *team, const attention_sizes *sizes, const scanned_keys *keys, int num_layers, int chunk) {
    int num_heads = num_layers * sizes->num_kv_heads, head_dim = sizes->head_dim;
    frame *frame = frame_open(team);
    size_t slot_bytes = (size_t)round_up((long)intake_bytes(head_dim), 64);
    char *slots = frame_take(frame, slot_bytes * MOST_AT_ONCE);
    for (int first = 0; first < num_heads; first += MOST_AT_ONCE) {
        intake job = {*sizes, *keys, first, chunk};
        int count = num_heads - first < MOST_AT_ONCE ? num_heads - first : MOST_AT_ONCE;
        void *results[MOST_AT_ONCE];
        stage_plan plan = {.num_units = count,
                           .run = take_in_head,
                           .job = &job,
                           .job_bytes = sizeof job,
                           .scratch_bytes = sizeof(float) * (size_t)(LANES + 2 * PIECE) * (size_t)head_dim,
                           .slot_bytes = slot_bytes,
                           .own_slots = slots};
        run_stage(frame, &plan, results);
        for (int unit = 0; unit < count; unit++) keep_intake(&job, first + unit, results[unit]);
    }
    frame_close(frame);
}
