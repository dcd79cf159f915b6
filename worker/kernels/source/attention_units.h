// Units of attention: the rows of one group and head over one span of the prefix, or over their tails.
#pragma once
#include "attention.h"
#include "gemm.h"
#include "kv_codes.h"

// The keys of all tails of a group, each once.
typedef struct {
    const int32_t *slots;    // [num_columns] in the cache
    const int32_t *columns;  // [num_rows, TAIL] column of each key of a row's tail
    const int32_t *lengths;  // [num_rows]
    int num_columns;         // a multiple of sixteen
} tail_columns;

// The queries of a group's rows that share a head of keys: by row, then by head.
typedef struct {
    int group, head, num_queries;
    long first_query;  // elements from the first pair's
} head_rows;

enum { CHUNK = 256 };  // keys per softmax

typedef enum { PREFIX, SCANNED, TAILS } span_kind;

// Keys of the prefix from `start` on, or all keys of another kind. A pair's spans come in order, its tails last.
typedef struct {
    span_kind kind;
    int pair, start, count;
} span;

// The units of all layers with one window.
typedef struct window_plan {
    int window, num_slots;      // `num_slots`: units that may run at a time
    const int32_t **first_seen;  // [num_groups] the first slot that each row sees, or NULL: all rows see all
    span *units;
    int *first_unit;  // [num_pairs + 1] first unit of each pair
    struct window_plan *next;
} window_plan;

struct attention {
    attention_sizes sizes;
    int element_bytes, depth, heads_per_kv, key_dim, value_dim, num_stripes;
    bool uses_bf16_products;
    float scale;  // of scores, to base 2
    const row_group *groups;
    const tail_columns *tails;
    const chosen_keys *const *chosen;  // [num_groups, choices_per_group], or NULL: rows see all keys
    int choices_per_group;             // 1, or one for each head of keys
    head_rows *pairs;
    window_plan *plans;
    void *queries;
    int num_pairs, most_queries, most_columns, num_slots;
    char *slots;
    void **parts;
};

// State of each query after some keys: outputs are weighted by 2^(score - maximum) and not yet divided.
typedef struct {
    float *maximum, *sum, *output;  // [num_queries], [num_queries], [num_queries, value_dim]
} part;

typedef struct {
    const attention *attention;
    const window_plan *plan;
    float softcap;
    int layer, first_unit;
} unit_job;

// Returns how rows of a group's cache are stored, each a stripe of a head.
INLINE kv_form form_of(const attention *attention, int group) {
    int width = attention->sizes.head_dim / attention->num_stripes;
    return (kv_form){(kv_code)attention->groups[group].kv_code, (element)attention->sizes.element, width};
}

// Returns the bytes between two stripes of a head.
INLINE long stripe_bytes(const attention *attention, int group) {
    return attention->groups[group].head_stride * kv_unit(form_of(attention, group));
}

// Returns the keys that the row of a group sees with a head of keys, or NULL if these are all.
INLINE const chosen_keys *chosen_of(const attention *attention, int group, int head) {
    int per_group = attention->choices_per_group;
    const chosen_keys *chosen = attention->chosen ? attention->chosen[group * per_group + head % per_group] : NULL;
    return chosen && chosen->num_prefix != ALL_KEYS ? chosen : NULL;
}

INLINE const char *head_start(const attention *attention, int layer, int group, int head, bool is_value) {
    const row_group *rows = &attention->groups[group];
    long element = layer * rows->layer_stride + head * attention->num_stripes * rows->head_stride + (is_value ? rows->value_stride : 0);
    return (const char *)rows->cache + element * kv_unit(form_of(attention, group));
}

// Prefetches memory, which may lie beyond an end; called for a little at a time, between products.
INLINE void expect(const char *memory, long bytes) {
    for (long i = 0; i < bytes; i += 64) __builtin_prefetch(memory + i, 0, 2);
}

// Sums weighted values, key by key: output [value_dim].
void sum_values(kv_form form, int value_dim, const float *weights, const char *const *values, int count, float *output);
void scale_rows(float *rows, int num_rows, int value_dim, const float *factors);

size_t part_bytes(int num_queries, int value_dim);
part part_at(void *slot, int num_queries);
void merge(part *whole, part next, int num_queries, int value_dim);

size_t scratch_bytes(const attention *attention);
void run_unit(const void *job, int unit, void *slot, void *scratch);
