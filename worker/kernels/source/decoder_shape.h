// What follows from all layers of a decoder: their places in caches, and the largest sizes.
#pragma once
#include "decoder.h"

// Returns how many strides of the caches' layers a layer takes.
static inline int cache_strides(const decoder *decoder, const layer_weights *weights) {
    if (decoder->sizes.output_groups) return compressed_stripes(&decoder->sizes, &weights->compressed);
    if (!decoder->wide.head_dim) return 1;
    return weights->num_kv_heads * weights->head_dim / decoder->sizes.head_dim + weights->has_indexer;
}

// Returns the strides that a layer takes in the caches.
static inline int own_strides(const decoder *decoder, const layer_weights *weights) {
    return weights->does_not_attend || weights->shares_keys ? 0 : cache_strides(decoder, weights);
}

// Returns the strides in front of a layer; for layers that share keys, caches begin with those of the first layer.
static inline int strides_before(const decoder *decoder, int layer) {
    int found = 0;
    for (int i = 0; i < layer; i++) found += own_strides(decoder, &decoder->layers[i]);
    return found;
}

static inline int most(int a, int b) { return a > b ? a : b; }

static inline int most_intermediate(const decoder *decoder) {
    int found = 0;
    for (int i = 0; i < decoder->sizes.num_layers; i++) found = most(found, decoder->layers[i].intermediate);
    return found;
}

// Returns the first mixer, which has the size of all others, or NULL.
static inline const mixer *mixer_of(const decoder *decoder) {
    for (int i = 0; i < decoder->sizes.num_layers; i++)
        if (decoder->layers[i].mixer) return decoder->layers[i].mixer;
    return NULL;
}

// Returns the most columns of queries, or with keys and values of all products before attention.
static inline int most_heads(const decoder *decoder, bool with_keys) {
    int found = 0;
    for (int i = 0; i < decoder->sizes.num_layers; i++) {
        const layer_weights *layer = &decoder->layers[i];
        found = most(found, with_keys ? layer->qkv.columns : decoder->sizes.num_heads * layer->head_dim);
    }
    return found;
}

static inline bool mixes_beside_attention(const decoder *decoder) {
    for (int i = 0; i < decoder->sizes.num_layers; i++)
        if (decoder->layers[i].mixer && !decoder->layers[i].does_not_attend) return true;
    return false;
}
