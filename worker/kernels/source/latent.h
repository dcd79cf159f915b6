// Latent attention: all heads of a layer share one latent vector per position, which a cache stores instead of keys and
// values, followed by the rotated part of the key, and by the key of an indexer if the decoder has some.
#pragma once
#include "attention.h"
#include "indexer.h"
#include "linear.h"

typedef struct {
    decoder_sizes sizes;
    matrix query_down, query, key;  // `query_down` only if queries have latent vectors
    matrix key_up;    // [still_dim, num_heads * latent_rank]: per head, from its query to the latent vector
    matrix value_up;  // [latent_rank, num_heads * value_dim]: per head, from the latent vector to its values
    float *query_norm, *key_norm;  // of latent vectors
    indexer indexer;
} latent_weights;

// Memory that the layers of a call share.
typedef struct {
    float *down, *queries, *absorbed;  // [num_rows, ...] widest latent vector; heads; heads times key_up
    char *gathered;                    // rows by head
} latent_room;

latent_weights latent_new(const decoder_sizes *sizes);
void latent_free(latent_weights *latent);
// Returns the matrix of a role, and its columns; NULL for other roles.
matrix *latent_matrix(latent_weights *latent, weight_role role, int *num_columns);

// Returns the number of groups of heads, each one unit of work per cache. Larger groups pack a cache's rows less often
// but need more memory. Results do not depend on it.
int latent_groups(const decoder_sizes *sizes, int num_rows);
latent_room latent_room_new(frame *frame, const decoder_sizes *sizes, int num_rows);

// Stores the rows' latent vectors, attends, and returns the heads' values, [num_rows, num_heads * value_dim]. `mixed`
// has room for [num_rows, num_heads * latent_rank]. `index` is NULL in decoders without indexers.
const float *latent_run(frame *frame, const latent_weights *latent, const latent_room *room, index_room *index,
                        attention *attention, const attention_view *view, const forward_call *call, int place,
                        const float *normed, float *mixed);

// out [num_rows, num_groups, out_width] from the first numbers of rows [num_rows, num_groups, row_width], each group by
// its own columns. `gathered` has `grouped_bytes`.
void multiply_groups_of_heads(frame *frame, const matrix *matrix, int num_groups, bool rounds, int num_rows, const float *rows,
                              int row_width, float *out, int out_width, char *gathered);
size_t grouped_bytes(const matrix *matrix, int num_groups, int num_rows);

// Returns the numbers of a cache's row that scores multiply.
int latent_key_dim(const decoder_sizes *sizes);
