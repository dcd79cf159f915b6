// Rows of candidates: looked up, mixed and written. Defined by worker/drafters/token_recycling.py.
#include "recycling_rows.h"

#include <float.h>
#include <math.h>

#include "elementary.h"

void exp_of_all(double numbers[MOST_CANDIDATES]) {
    for (int i = 0; i < MOST_CANDIDATES; i++) numbers[i] = exp_of(numbers[i]);
}

void log_of_all(double numbers[MOST_CANDIDATES]) {
    for (int i = 0; i < MOST_CANDIDATES; i++) numbers[i] = log_of(numbers[i]);
}

int put_candidate(candidate *list, int count, int limit, candidate new) {
    if (count == limit && !(new.value > list[limit - 1].value)) return count;
    int place = count < limit ? count++ : limit - 1;
    for (; place && new.value > list[place - 1].value; place--) list[place] = list[place - 1];
    list[place] = new;
    return count;
}

// Reads the candidates of a row; none if the first is unknown.
static int known_of(const candidate_rows *rows, int64_t row, candidate *found) {
    const int32_t *ids = rows->ids + row * rows->width;
    const float *logprobs = rows->logprobs + row * rows->width;
    int count = 0;
    for (int64_t i = 0; i < rows->width && logprobs[i] != -INFINITY; i++)
        found[count++] = (candidate){(double)logprobs[i], ids[i]};
    return count;
}

// Computes the probabilities of candidates, times `share`: the first `count` of [MOST_CANDIDATES].
static void probabilities_of(const candidate *found, int count, double share, double *probabilities) {
    for (int i = 0; i < MOST_CANDIDATES; i++) probabilities[i] = i < count ? found[i].value : 0.0;
    exp_of_all(probabilities);
    for (int i = 0; i < MOST_CANDIDATES; i++) probabilities[i] *= share;
}

static int find(const candidate *list, int count, int32_t id) {
    int place = 0;
    while (place < count && list[place].id != id) place++;
    return place;
}

static int64_t key_of(const recycling_tables *tables, int64_t previous, int64_t token) {
    return previous * tables->vocab + token;
}

// Fibonacci hashing: the high bits of the product with 2^64 / golden ratio.
static int64_t place_of(const recycling_tables *tables, int64_t key) {
    return (int64_t)((uint64_t)key * 0x9E3779B97F4A7C15 >> (64 - tables->pair_bits));
}

int candidates_behind(const recycling_tables *tables, int64_t previous, int64_t token, candidate *found) {
    candidate both[2 * MOST_CANDIDATES], pair[MOST_CANDIDATES];
    double of_both[MOST_CANDIDATES], of_pair[MOST_CANDIDATES], logs[MOST_CANDIDATES] = {0};
    int64_t key = key_of(tables, previous, token), place = place_of(tables, key);
    int num_pair = tables->pair_keys[place] == key ? known_of(&tables->pairs, place, pair) : 0;
    int num_both = known_of(&tables->tokens, token, both), count = 0;
    if (!num_both || !num_pair) {
        memcpy(found, num_both ? both : pair, (size_t)(num_both + num_pair) * sizeof *found);
        return num_both + num_pair;
    }
    probabilities_of(both, num_both, 1.0 - tables->pair_share, of_both);
    probabilities_of(pair, num_pair, tables->pair_share, of_pair);
    for (int i = 0; i < num_both; i++) both[i].value = of_both[i];
    for (int i = 0; i < num_pair; i++) {
        int same = find(both, num_both, pair[i].id);
        if (same == num_both) both[num_both++] = (candidate){0.0, pair[i].id};
        both[same].value += of_pair[i];
    }
    for (int i = 0; i < num_both; i++) count = put_candidate(found, count, NUM_BEST, both[i]);
    for (int i = 0; i < count; i++) logs[i] = found[i].value;
    log_of_all(logs);
    for (int i = 0; i < count; i++) found[i].value = logs[i];
    return count;
}

static void forget(const candidate_rows *rows, int64_t row) {
    for (int64_t i = 0; i < rows->width; i++) rows->logprobs[row * rows->width + i] = -INFINITY;
}

// Averages a row with new candidates [NUM_BEST], without those less likely than FLT_MIN.
static void write_row(
    const candidate_rows *rows, int64_t row, const int64_t *ids, const float *logprobs, double new_share
) {
    candidate old[MOST_CANDIDATES], kept[MOST_CANDIDATES];
    double of_old[MOST_CANDIDATES], of_new[NUM_BEST], logs[MOST_CANDIDATES] = {0};
    int num_old = known_of(rows, row, old), count = 0, width = (int)rows->width;
    double share = num_old ? new_share : 1.0;
    probabilities_of(old, num_old, 1.0 - share, of_old);
    for (int i = 0; i < num_old; i++) old[i].value = of_old[i];
    for (int i = 0; i < NUM_BEST; i++) of_new[i] = share * exp_of((double)logprobs[i]);
    for (int i = 0; i < NUM_BEST; i++) {
        int same = find(old, num_old, (int32_t)ids[i]);
        candidate new = {of_new[i], (int32_t)ids[i]};
        if (same < num_old) new.value += old[same].value, old[same].value = 0.0;
        if (new.value >= FLT_MIN) count = put_candidate(kept, count, width, new);
    }
    for (int i = 0; i < num_old; i++)
        if (old[i].value >= FLT_MIN) count = put_candidate(kept, count, width, old[i]);
    forget(rows, row);
    for (int i = 0; i < count; i++) logs[i] = kept[i].value;
    log_of_all(logs);
    for (int i = 0; i < count; i++) {
        rows->ids[row * width + i] = kept[i].id;
        rows->logprobs[row * width + i] = (float)logs[i];
    }
}

static int comes_again(const int64_t *numbers, int64_t i, int64_t count) {
    int again = 0;
    for (int64_t j = i + 1; j < count; j++) again |= numbers[j] == numbers[i];
    return again;
}

static void write_pairs(
    const recycling_tables *tables, const int64_t *token_ids, const int64_t *ids, const float *logprobs,
    const int64_t *text_rows, const int64_t *previous_ids, int64_t count, int64_t *places
) {
    for (int64_t i = 0; i < count; i++)
        places[i] = place_of(tables, key_of(tables, previous_ids[i], token_ids[text_rows[i]]));
    for (int64_t i = 0; i < count; i++) {
        if (comes_again(places, i, count)) continue;  // two pairs may share a row: the later one wins
        int64_t row = text_rows[i], key = key_of(tables, previous_ids[i], token_ids[row]);
        if (tables->pair_keys[places[i]] != key) forget(&tables->pairs, places[i]);
        tables->pair_keys[places[i]] = key;
        write_row(&tables->pairs, places[i], ids + row * NUM_BEST, logprobs + row * NUM_BEST, tables->new_share);
    }
}

static int all_below(const int64_t *numbers, int64_t count, int64_t limit) {
    int above = 0;
    for (int64_t i = 0; i < count; i++) above |= (uint64_t)numbers[i] >= (uint64_t)limit;  // also finds negative numbers
    return !above;
}

int write_text(
    const recycling_tables *tables, const int64_t *token_ids, const int64_t *ids, const float *logprobs,
    int64_t num_rows, const int64_t *text_rows, const int64_t *previous_ids, int64_t num_text_rows, int64_t *places
) {
    int64_t vocab = tables->vocab;
    if (!all_below(token_ids, num_rows, vocab) || !all_below(ids, num_rows * NUM_BEST, vocab)) return 0;
    if (!all_below(text_rows, num_text_rows, num_rows) || !all_below(previous_ids, num_text_rows, vocab)) return 0;
    for (int64_t i = 0; i < num_rows; i++)
        if (!comes_again(token_ids, i, num_rows))
            write_row(&tables->tokens, token_ids[i], ids + i * NUM_BEST, logprobs + i * NUM_BEST, tables->new_share);
    write_pairs(tables, token_ids, ids, logprobs, text_rows, previous_ids, num_text_rows, places);
    return 1;
}
