// Compressed attention (DeepSeek V4): all heads share one key per position, which is its value, too. A row sees the keys
// of a window, and one pooled key for each `ratio` positions of its path, behind the last of them. With an indexer it
// sees only the best pooled keys.
//
// A layer's caches have stripes, each as wide as a key: the key, what the pools read of a position (keys of all their
// series, then gates), then the pooled keys, which lie at the last of their positions. So a row depends on its own path
// alone. Rows at other positions hold zeros there.
#pragma once
#include "indexer.h"
#include "linear.h"

enum { MOST_POOLED = 256 };  // positions of a pooled key

// Pooled keys: a softmax of gates and biases over positions, per dimension, weighs their keys; the sum is normed and
// rotated by its first position. With two series, the first one's positions are those before the second one's.
typedef struct {
    matrix projection;   // keys of all series, then gates
    float *bias, *norm;  // [ratio, series * dim], [dim]
    int dim;
} pool;

typedef struct {
    matrix query_down, query, key, output_down;  // the last is applied to groups of heads
    float *query_norm, *key_norm;
    pool keys, index_keys;
    indexer indexer;    // without a matrix of keys
    int ratio, series;  // 0 without pooled keys; an indexer has two series
} compressed_weights;

typedef struct compressed_room compressed_room;

compressed_weights compressed_new(const decoder_sizes *sizes);
void compressed_free(compressed_weights *weights);
// Sets the ratio and series of a layer, before its weights are loaded.
void compressed_pools(const decoder_sizes *sizes, compressed_weights *weights, int ratio, int series);
// Returns a role's matrix, its first block and its columns; NULL for other roles.
matrix *compressed_matrix(compressed_weights *weights, const decoder_sizes *sizes, weight_role role, int *first_block,
                          int *num_columns);
// Loads another weight; returns whether it is one of these.
bool compressed_load(compressed_weights *weights, const decoder_sizes *sizes, weight_role role, const void *numbers);

int compressed_stripes(const decoder_sizes *sizes, const compressed_weights *weights);

// Returns memory that the layers of a call share, in which each row is a group.
compressed_room *compressed_room_new(frame *frame, const decoder *decoder, const forward_call *call);
// Stores the rows' keys and attends; returns what the output's matrix reads. `wide` and `mixed` have room for all heads.
const float *compressed_run(frame *frame, const compressed_weights *weights, const decoder_sizes *sizes, compressed_room *room,
                            attention *attention, const attention_view *view, const forward_call *call, const float *angles,
                            int place, const float *normed, float *wide, float *mixed);
