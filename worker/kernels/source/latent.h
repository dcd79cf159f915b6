// Latent attention: all heads of a layer share one latent vector per position, which a cache holds in place of keys and
// values, and behind it the turned part of the keys.
#pragma once
#include "attention.h"
#include "linear.h"

typedef struct {
    decoder_sizes sizes;
    matrix query_down, query, key;  // the first one where queries have a latent vector of their own
    matrix key_up;    // [still_dim, num_heads * latent_rank]: of each head, from its query to the latent vector
    matrix value_up;  // [latent_rank, num_heads * value_dim]: of each head, from the latent vector to its values
    float *query_norm, *key_norm;  // of latent vectors
} latent_weights;

// Memory that the layers of a call share.
typedef struct {
    float *down, *queries, *absorbed;  // [num_rows, -] the widest latent vector, heads, heads as they meet the cache
    char *gathered;                    // heads one behind the other, each with its rows
} latent_room;

latent_weights latent_new(const decoder_sizes *sizes);
void latent_free(latent_weights *latent);
// The matrix of a role, and its columns; NULL for a role that is none of these.
matrix *latent_matrix(latent_weights *latent, weight_role role, int *num_columns);

// The groups of heads that meet a cache's rows in one unit of work each: they pack its rows anew, and few heads of many
// rows take as much memory as many of few. No bit depends on it.
int latent_groups(const decoder_sizes *sizes, int num_rows);
latent_room latent_room_new(frame *frame, const decoder_sizes *sizes, int num_rows);

// Keeps the rows' latent vectors, attends, and returns what all heads have found, [num_rows, num_heads * value_dim].
// `mixed` has room for [num_rows, num_heads * latent_rank].
const float *latent_run(frame *frame, const latent_weights *latent, const latent_room *room, attention *attention,
                        const attention_view *view, const forward_call *call, int place, const float *normed, float *mixed);
