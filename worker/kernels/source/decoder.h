// A decoder and its layers' weights.
#pragma once
#include "attention.h"
#include "compressed.h"
#include "experts.h"
#include "latent.h"
#include "linear.h"
#include "lora.h"
#include "mixers.h"
#include "quantized.h"
#include "streams.h"

// A layer's part of per-layer embeddings.
typedef struct {
    matrix projection, gate, output;
    float *norm, *output_norm;
} ple_weights;

typedef struct {
    matrix qkv, output, gate_up, down;  // gates and ups alternate; or ups only
    float *input_norm, *output_norm, *mlp_norm, *down_norm, *query_norm, *key_norm;  // or NULL
    float *curve;      // of XIELU, or NULL
    float *sinks;      // the view's, or NULL
    layer_adapter *adapters;  // [num_adapters], or NULL
    experts *experts;  // or NULL
    mixer *mixer;      // instead of attention or added to it, or NULL
    latent_weights latent;  // instead of `qkv`, in decoders with latent vectors
    compressed_weights compressed;                // instead of `qkv`, in decoders with compressed attention
    stream_weights attention_streams, mlp_streams;  // in decoders with streams
    float *shared_norm;     // or NULL
    int intermediate;  // columns of gates and ups, or of the expert that all rows use; 0: none
    int num_kv_heads, head_dim;
    float scale;  // of the output; mostly 1
    ple_weights ple;
    int source;  // the layer whose keys it reads, with `shares_keys`
    float *index_query_norm, *index_key_norm;  // NULL without an indexer of blocks, whose matrices end `qkv`
    bool does_not_attend, has_own_heads, shares_keys, has_indexer;  // the last: of blocks
    bool is_still;  // its heads are not rotated
    bool has_other_angles;
    attention_view view;
} layer_weights;

// Returns the width of a head's values in a layer without latent vectors. A cache's row is as wide as a key.
static inline int width_of_values(const decoder_sizes *sizes, int head_dim) {
    return sizes->value_dim && !sizes->latent_rank ? sizes->value_dim : head_dim;
}

struct decoder {
    decoder_sizes sizes;
    const void *embedding;             // [vocab, hidden], or
    quantized_rows packed_embedding;  // the same, of 8 or 4 bits
    float *final_norm;
    matrix head;
    layer_weights *layers;
    const void *ple_table;            // [vocab, num_layers, ple_dim], or
    quantized_rows packed_ple_table;
    attention_sizes wide;  // of layers with heads of their own; `head_dim` is 0 without any
    bool shares_keys;
    adapter_sizes adapters;
    int64_t num_experts_met;
    stream_weights head_streams;
    void *choice;  // of indexers in the last call, for later layers of the same rows
};

// Computes logits of rows [num_rows, hidden] after the final norm: head.c.
void head_apply(frame *frame, const decoder *decoder, int num_rows, const float *normed, float *logits);
