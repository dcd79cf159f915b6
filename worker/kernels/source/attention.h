// Attention of groups of rows: each row to the prefix that its group shares, and to a tail of its own.
//
// A prefix is taken in spans of 2,048 keys and these in chunks of 256, each a softmax of its own; spans are merged in
// order, then the tail, whose keys stand in the order of positions wherever they lie, then a sink. So nothing that a row
// is made of depends on another row, nor on who computed which span.
//
// With a window, a row's first key follows from its own position. Keys in front of it weigh exactly nothing, and what
// has weighed nothing so far takes in what follows as it is: so a chunk that no row of a group sees is left out.
#pragma once
#include "api.h"
#include "threads.h"
#include "vectors.h"

typedef struct attention attention;

// What all layers of a call have in common; lives in the frame, as do copies of the groups.
// With a `latent_rank` all heads share the rows of one, and values are the first numbers of keys.
attention *attention_new(frame *frame, const attention_sizes *sizes, int latent_rank, const row_group *groups,
                         int num_groups);

// Where a row's key (or its value) of one head is stored.
void *attention_slot(const attention *attention, int layer, int group, int row, int head, bool is_value);
// Keeps one [head_dim] there, in codes where the cache has those.
void attention_keep(const attention *attention, int layer, int group, int row, int head, bool is_value, const float *from);
// Takes one query [head_dim] in.
void attention_query(attention *attention, int group, int row, int head, const float *query);

// Attends with all queries to what the caches hold now and the layer's view shows: output [all rows, num_heads, width of
// a value], rounded to bf16 where the sizes say so.
void attention_run(attention *attention, frame *frame, int layer, const attention_view *view, float *output);
