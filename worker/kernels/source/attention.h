// Attention of groups of rows: each row sees the prefix that its group shares, and a tail of its own.
//
// A prefix is split into spans of 2,048 keys and these into chunks of 256, each with its own softmax; spans are merged
// in order, then the tail, ordered by position, then a sink. So a row's bits depend on no other row, nor on which
// thread computed a span.
//
// With a window, a row's first key follows from its own position. Earlier keys have weight 0, and merging leaves a row
// unchanged by them: so chunks that no row of a group sees are skipped.
#pragma once
#include "api.h"
#include "threads.h"
#include "vectors.h"

typedef struct attention attention;

// State shared by all layers of a call, in the frame, with copies of the groups. With a `latent_rank` all heads share
// one row per position, and values are the first numbers of keys. Scores are of the first `key_dim` numbers of a row. A
// head takes `num_stripes` neighbouring heads of a cache, each with a part of its dimensions.
attention *attention_new(frame *frame, const attention_sizes *sizes, int latent_rank, int key_dim, int num_stripes,
                         const row_group *groups, int num_groups);

// Keys that a row sees, by slot and in order of positions.
typedef struct {
    int32_t num_prefix, num_tail;  // `num_prefix` is ALL_KEYS if the row sees every key
    int32_t num_padded;            // keys in front that complete a multiple of 64 and are hidden
    int32_t tail[TAIL];
    int32_t prefix[];
} chosen_keys;

#define ALL_KEYS (-1)

// Returns `all`, whose groups have one row each, as it is over chosen keys. Its rows attend as though the chosen keys of
// the prefix were the whole prefix. Both have the same queries. A row has `per_row` choices: one for all heads of keys,
// or one for each, which have equally many keys and the same tail.
attention *attention_over(frame *frame, attention *all, const chosen_keys *const *chosen, int per_row);

// Returns where a row's key (or value) of one head is stored: its first stripe.
void *attention_slot(const attention *attention, int layer, int group, int row, int head, bool is_value);
// Stores one [head_dim] there, as codes if the cache has codes.
void attention_keep(const attention *attention, int layer, int group, int row, int head, bool is_value, const float *from);
// Adds one query [head_dim].
void attention_query(attention *attention, int group, int row, int head, const float *query);

// Attends with all queries to the keys in the caches that the layer's view shows: output [all rows, num_heads, value
// width], rounded to bf16 if the sizes say so.
void attention_run(attention *attention, frame *frame, int layer, const attention_view *view, float *output);
