// Indexers: a small score of every key that a row sees decides to which keys it attends.
//
// score = sum over heads of weight * relu(query . key), heads in order, in float. The `num_chosen_keys` best are chosen,
// by the order of their bits as integers; ties go to the lower position. So a choice depends on the row's own path alone.
// A layer without an indexer sees what the last layer with one chose. So it is in DeepSeek sparse attention.
//
// With an `index_block` (MiniMax M3), each head of keys has a choice and an index query of its own, and the score of a
// block is the largest query . key. A row sees its own block, as far as it has come, and the best others.
#pragma once
#include "attention.h"
#include "linear.h"

typedef struct {
    matrix query, key, weight;
    float *norm;  // of keys: weights, then biases; NULL without an indexer
} indexer;

// What the layers of a call share.
typedef struct {
    float *queries, *keys, *weights;  // [num_rows, ...]
    float *scores;                    // of the rows that are scored together
    chosen_keys **chosen;             // [num_rows], or by row and head of keys; NULL if all rows see all keys
    attention *attention;             // over the chosen keys
} index_room;

indexer indexer_new(const decoder_sizes *sizes);
void indexer_free(indexer *indexer);
// Returns the matrix of a role, and its columns; NULL for other roles.
matrix *indexer_matrix(indexer *indexer, const decoder_sizes *sizes, weight_role role, int *num_columns);

// Returns whether a row of a group sees more keys than are chosen.
bool index_sees_more(const decoder_sizes *sizes, const row_group *group);
// Returns a call, with one row per group if some row sees more keys than are chosen. Rows of partial caches see all.
const forward_call *index_rows_alone(frame *frame, const decoder_sizes *sizes, const forward_call *call);
index_room *index_room_new(frame *frame, const decoder_sizes *sizes, const forward_call *call);

// Computes the rows' queries from `vectors` [num_rows, query_rank], and keys and weights from their input.
void index_rows(frame *frame, const indexer *indexer, const decoder_sizes *sizes, const index_room *room,
                const forward_call *call, const float *vectors, const float *normed);
// Chooses each row's keys in a layer; `all` has their keys stored.
void index_choose(frame *frame, const decoder_sizes *sizes, index_room *room, const forward_call *call, attention *all, int place);

// The steps of `index_choose`, for rows of a call in which each row is a group.

// Where the scored keys lie.
typedef struct {
    int place, first_number;  // layer of the caches, and number within a row
    int step;                 // positions per key, which lies at the last of them
} scored_keys;

// Returns a call with one row per group.
const forward_call *rows_alone(frame *frame, const forward_call *call);
// Returns the most positions that a row sees, which is also the stride of scores.
long most_keys_seen(const forward_call *call);
// Returns how many rows are scored together.
int index_rows_at_once(const decoder_sizes *sizes, const forward_call *call);
size_t index_score_bytes(const decoder_sizes *sizes, const forward_call *call);
INLINE long index_query_stride(const decoder_sizes *sizes) { return (long)sizes->index_heads * sizes->index_dim; }
INLINE long index_weight_stride(const decoder_sizes *sizes) { return round_up(sizes->index_heads, LANES); }
// Writes `room->scores` of so many rows from `first_row` on.
void index_score(frame *frame, const decoder_sizes *sizes, const index_room *room, const forward_call *call,
                 const attention *all, scored_keys keys, int first_row, int num_rows);
// Writes the numbers of the best scores in order, and returns how many there are.
int index_best(const float *scores, int count, int wanted, int32_t *best);

// The choices of a call as bytes, for the next call of the same rows.
size_t index_choice_bytes(const decoder_sizes *sizes, int num_rows);
void index_take_choice(frame *frame, index_room *room, const void *choice, size_t bytes, attention *all);
