// Draws x_t = argmax_v(processed_logit_t[v] / T + G(key, t, v)), the same tokens as worker/sampling/sampler.py.
#include "draw.h"

#include "noise.h"

#define ALIGNMENT 64
#define LARGEST_NOISE 23.0f

typedef struct {
    float *score;  // [vocab], rounded up to a multiple of BLOCK
    filter_room filters;
} scratch_room;

int64_t sampling_scratch_size(int64_t vocab) {
    return 5 * round_up(vocab, BLOCK) * (int64_t)sizeof(float) + NUM_BUCKETS * (int64_t)sizeof(double) + ALIGNMENT;
}

static scratch_room scratch_at(void *memory, int64_t vocab) {
    float *start = (float *)(((uintptr_t)memory + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT);
    int64_t size = round_up(vocab, BLOCK);
    int32_t *lists = (int32_t *)(start + 2 * size);
    return (scratch_room){start, {start + size, lists, lists + size, lists + 2 * size, (double *)(lists + 3 * size)}};
}

INLINE int any_from(const float *score, float floor, int count) {
    int any = 0;
    for (int i = 0; i < count; i++) any |= score[i] >= floor;
    return any;
}

static float highest(const float *score, int64_t count) {
    vec peak = vec_set(-INFINITY);
    for (int64_t i = 0; i < count; i += LANES) peak = vec_max(vec_load(score + i), peak);
    return vec_max_lane(peak);
}

// Returns the first candidate with the highest score.
static int64_t first_of(const float *score, float peak) {
    int64_t i = 0;
    while (!any_from(score + i, peak, BLOCK)) i += BLOCK;
    while (score[i] != peak) i++;
    return i;
}

static int any_nan(const float *lanes) {
    int any = 0;
    for (int i = 0; i < LANES; i++) any |= is_nan_bits(bits_of(lanes[i]));
    return any;
}

// Copies a row and pads it to whole blocks, without negative zeros. Returns the first NaN, or -1.
static int64_t copy_row(const float *row, int64_t vocab, float *score) {
    vec zero = vec_set(0.0f), differences = zero;
    int64_t whole = vocab / LANES * LANES;
    for (int64_t i = 0; i < whole; i += LANES) {
        vec logits = vec_add(vec_load(row + i), zero);
        vec_store(score + i, logits);
        differences = vec_add(differences, vec_sub(logits, logits));  // 0, or NaN after NaN and infinities
    }
    for (int64_t i = whole; i < vocab; i++) score[i] = row[i] + 0.0f;
    for (int64_t i = vocab; i % BLOCK; i++) score[i] = -INFINITY;
    int64_t i = is_nan_bits(bits_of(vec_sum(differences))) ? 0 : whole;
    while (i < whole && !any_nan(row + i)) i += LANES;
    while (i < vocab && !is_nan_bits(bits_of(row[i]))) i++;
    return i < vocab ? i : -1;
}

// Divides positive and multiplies negative logits of the tokens in the window (Keskar et al. 2019).
static void penalise(float *score, int64_t vocab, const int32_t *counts, float penalty) {
    for (int64_t i = 0; i < vocab; i++) {
        float raised = score[i] * penalty, lowered = score[i] / penalty;
        float penalised = score[i] < 0.0f ? raised : lowered;
        score[i] = counts[i] > 0 ? penalised : score[i];
    }
}

// Masks tokens that are not allowed.
static void keep_allowed(float *score, int64_t vocab, const uint32_t *mask) {
    for (int64_t i = 0; i < vocab; i++) score[i] = mask[i / 32] >> (i % 32) & 1u ? score[i] : -INFINITY;
}

// Adds the bias, and masks tokens that are impossible at this position.
static void shift(float *score, int64_t position, const adjustments *adjusted) {
    for (int64_t i = 0; i < adjusted->num_biased; i++) score[adjusted->bias_ids[i]] += adjusted->bias[i];
    for (int64_t i = 0; i < adjusted->num_banned; i++) score[adjusted->banned_ids[i]] = -INFINITY;
    if (position >= adjusted->first_unmasked) return;
    for (int64_t i = 0; i < adjusted->num_masked; i++) score[adjusted->masked_ids[i]] = -INFINITY;
}

// Subtracts the count penalties. A count's product is exact, so rounding happens once, and then to float32.
static void hold_back(float *score, int64_t vocab, const int32_t *counts, double frequency, double presence) {
    for (int64_t start = 0; start < vocab; start += LANES) {
        int64_t end = start + LANES < vocab ? start + LANES : vocab;
        int32_t any = 0;
        for (int64_t i = start; i < end; i++) any |= counts[i];
        for (int64_t i = start; any && i < end; i++)
            if (counts[i] > 0) score[i] -= (float)(frequency * (double)counts[i] + presence);
    }
}

// Divides logits by the temperature; if that overflows float32, uses distances from the best one, which draw the same.
static void temper(candidates *kept, float temperature) {
    if (temperature == 1.0f) return;
    float quotient = kept->peak / temperature;
    float shift = temperature < 1.0f && isinf(quotient) ? kept->peak : 0.0f;
    for (int64_t i = 0; i < kept->count; i++) kept->score[i] = (kept->score[i] - shift) / temperature + 0.0f;
    kept->peak = (kept->peak - shift) / temperature + 0.0f;
}

// The best token so far: the highest sum of score and noise, ties by the lower id.
typedef struct {
    float value;
    int32_t id;
} best_token;

INLINE void contend(best_token *best, float score, int32_t id, uint32_t word) {
    float value = score + gumbel(word);
    if (value > best->value || (value == best->value && id < best->id)) *best = (best_token){value, id};
}

// Compares tokens that can beat the best one; noise of others is not computed. Without `ids` they follow `first`.
INLINE void contend_all(
    best_token *best, const float *score, const int32_t *ids, int32_t first, const uint32_t *words, int count
) {
    uint32_t reaches[BLOCK];
    uint32_t any = 0;
    for (int i = 0; i < count; i++) {
        reaches[i] = score[i] + gumbel_bound(words[i]) >= best->value;
        any |= reaches[i];
    }
    if (!any) return;
    for (int i = 0; i < count; i++)
        if (reaches[i]) contend(best, score[i], ids ? ids[i] : first + i, words[i]);
}

// Puts the candidates of a long list back in their places, with the others masked.
static void spread(candidates *kept, int64_t vocab, float *score) {
    for (int64_t i = 0; i < round_up(vocab, BLOCK); i++) score[i] = -INFINITY;
    for (int64_t i = 0; i < kept->count; i++) score[kept->id[i]] = kept->score[i];
    *kept = (candidates){score, NULL, vocab, kept->peak};
}

static int64_t best_with_noise(const candidates *kept, noise_source noise) {
    best_token best = {-INFINITY, 0};
    uint32_t words[BLOCK];
    int64_t peak = first_of(kept->score, kept->peak);
    int32_t favourite = kept->id ? kept->id[peak] : (int32_t)peak;
    philox(noise, (uint32_t)favourite / QUAD, words);
    contend(&best, kept->peak, favourite, words[favourite % QUAD]);
    int step = kept->id ? LANES : BLOCK;
    for (int64_t start = 0; start < kept->count; start += step) {
        const float *score = kept->score + start;
        if (!any_from(score, best.value - LARGEST_NOISE, step)) continue;
        if (kept->id) {
            list_words(noise, kept->id + start, words);
            contend_all(&best, score, kept->id + start, 0, words, LANES);
        } else {
            block_words(noise, start, words);
            contend_all(&best, score, NULL, (int32_t)start, words, BLOCK);
        }
    }
    return best.id;
}

int64_t plain_row(const float *row, int64_t vocab, void *memory, candidates *kept) {
    float *score = scratch_at(memory, vocab).score;
    int64_t nan = copy_row(row, vocab, score);
    *kept = (candidates){score, NULL, vocab, nan < 0 ? highest(score, vocab) : 0.0f};
    return nan;
}

void process_row(
    candidates *kept, int64_t position, const sampling_params *params, const int32_t *counts,
    const adjustments *adjusted, const uint32_t *mask, void *memory
) {
    int64_t vocab = kept->count;
    scratch_room scratch = scratch_at(memory, vocab);
    if (mask) keep_allowed(scratch.score, vocab, mask);
    if (adjusted) shift(scratch.score, position, adjusted);
    if (counts) penalise(scratch.score, vocab, counts, params->penalty);
    if (adjusted && adjusted->output.counts)
        hold_back(scratch.score, vocab, adjusted->output.counts, adjusted->frequency, adjusted->presence);
    if (mask || counts || adjusted) kept->peak = highest(scratch.score, vocab);
    if (params->temperature == 0.0f || isinf(kept->peak)) return;
    temper(kept, params->temperature);
    filter(kept, &params->filters, &scratch.filters);
}

int64_t draw_token(
    const float *row, int64_t vocab, int64_t position, const sampling_params *params, const int32_t *counts,
    const adjustments *adjusted, const uint32_t *mask, void *memory, bool *is_drawable
) {
    candidates kept;
    int64_t nan = plain_row(row, vocab, memory, &kept);
    *is_drawable = nan < 0 && isfinite(kept.peak);
    if (nan >= 0) return nan;
    process_row(&kept, position, params, counts, adjusted, mask, memory);
    if (params->temperature == 0.0f || isinf(kept.peak)) return first_of(kept.score, kept.peak);
    if (kept.id && kept.count * QUAD > vocab) spread(&kept, vocab, scratch_at(memory, vocab).filters.weight);
    return best_with_noise(&kept, noise_at(params->noise_key, position));
}

void sampling_noise_row(uint64_t noise_key, int64_t position, int64_t vocab, float *noise) {
    for (int64_t start = 0; start < vocab; start += BLOCK) {
        uint32_t words[BLOCK];
        float block[BLOCK];
        block_words(noise_at(noise_key, position), start, words);
        for (int i = 0; i < BLOCK; i++) block[i] = gumbel(words[i]);
        int64_t size = vocab - start < BLOCK ? vocab - start : BLOCK;
        memcpy(noise + start, block, (size_t)size * sizeof(float));
    }
}
