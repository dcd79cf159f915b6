// Loading of a decoder: the weights of its layers, its embedding and its head.
#include "decoder.h"

#include <stdlib.h>

#include "embedding.h"
#include "heads.h"
#include "indexer.h"

// Makes the matrices around a layer's attention.
static void set_heads(const decoder_sizes *sizes, layer_weights *layer, int num_kv_heads, int head_dim) {
    int query_columns = sizes->num_heads * head_dim, gate_columns = sizes->gates_heads ? query_columns : 0;
    int value_dim = width_of_values(sizes, head_dim);
    int key_columns = layer->shares_keys ? 0 : num_kv_heads * (head_dim + value_dim);
    int found_columns = sizes->num_heads * (sizes->latent_rank ? sizes->value_dim : value_dim);
    if (sizes->output_groups) found_columns = sizes->output_groups * sizes->output_rank;
    int index_columns = layer->has_indexer ? (sizes->index_heads + 1) * sizes->index_dim : 0;
    layer->num_kv_heads = num_kv_heads, layer->head_dim = head_dim;
    matrix_free(&layer->qkv);
    matrix_free(&layer->output);
    layer->qkv = matrix_new((element)sizes->element, sizes->hidden, query_columns + key_columns + gate_columns + index_columns);
    layer->output = matrix_new((element)sizes->element, found_columns, sizes->hidden);
}

// Replaces a layer's matrices of gates and ups, and of downs.
static void products_new(const decoder_sizes *sizes, layer_weights *layer, int intermediate) {
    matrix_free(&layer->gate_up);
    matrix_free(&layer->down);
    layer->intermediate = intermediate;
    layer->gate_up = matrix_new((element)sizes->element, sizes->hidden, (1 + sizes->has_gates) * intermediate);
    layer->down = matrix_new((element)sizes->element, intermediate, sizes->hidden);
}

decoder *decoder_new(const decoder_sizes *sizes) {
    decoder *fresh = calloc(1, sizeof(decoder));
    fresh->sizes = *sizes;
    fresh->layers = calloc((size_t)sizes->num_layers, sizeof(layer_weights));
    for (int i = 0; i < sizes->num_layers; i++) {
        layer_weights *layer = &fresh->layers[i];
        layer->scale = 1.0f;
        set_heads(sizes, layer, sizes->num_kv_heads, sizes->head_dim);
        if (sizes->latent_rank) layer->latent = latent_new(sizes);
        if (sizes->output_groups) layer->compressed = compressed_new(sizes);
        if (sizes->num_streams) layer->attention_streams = streams_new(sizes, false), layer->mlp_streams = streams_new(sizes, false);
        products_new(sizes, layer, sizes->intermediate);
        if (sizes->ple_dim) layer->ple = ple_new(sizes);
        layer->view.softcap = sizes->score_cap;
    }
    if (sizes->num_streams) fresh->head_streams = streams_new(sizes, true);
    return fresh;
}

void decoder_free(decoder *decoder) {
    for (int i = 0; i < decoder->sizes.num_layers; i++) {
        layer_weights *layer = &decoder->layers[i];
        matrix_free(&layer->qkv);
        matrix_free(&layer->output);
        matrix_free(&layer->gate_up);
        matrix_free(&layer->down);
        free(layer->input_norm);
        free(layer->output_norm);
        free(layer->mlp_norm);
        free(layer->down_norm);
        free(layer->shared_norm);
        free(layer->query_norm);
        free(layer->key_norm);
        free(layer->index_query_norm);
        free(layer->index_key_norm);
        free(layer->sinks);
        for (int adapter = 0; adapter < decoder->adapters.num_adapters; adapter++) adapter_free(&layer->adapters[adapter]);
        free(layer->adapters);
        experts_free(layer->experts);
        mixer_free(layer->mixer);
        latent_free(&layer->latent);
        compressed_free(&layer->compressed);
        streams_free(&layer->attention_streams);
        streams_free(&layer->mlp_streams);
        free(layer->curve);
        ple_free(&layer->ple);
    }
    matrix_free(&decoder->head);
    streams_free(&decoder->head_streams);
    free(decoder->final_norm);
    free(decoder->choice);
    free(decoder->layers);
    free(decoder);
}

typedef struct {
    matrix *matrix;  // NULL for roles without a matrix
    int first_block;
    columns_kind kind;
    int num_columns;
} columns_of_role;

// Returns the matrix and columns of a role; makes the head's matrix.
static columns_of_role role_columns(decoder *decoder, int layer, weight_role role) {
    const decoder_sizes *sizes = &decoder->sizes;
    layer_weights *to = &decoder->layers[layer];
    int query = sizes->num_heads * to->head_dim, key = to->num_kv_heads * to->head_dim;
    int value = to->num_kv_heads * width_of_values(sizes, to->head_dim);
    int keys_and_values = to->shares_keys ? 0 : key + value;
    int hidden = sizes->hidden, mlp = to->intermediate, gates = sizes->has_gates, columns;
    int heads = query + keys_and_values, index_queries = sizes->index_heads * sizes->index_dim;
    matrix *of_latents = sizes->latent_rank ? latent_matrix(&to->latent, role, &columns) : NULL;
    if (of_latents) return (columns_of_role){of_latents, 0, ALONE, columns};
    int first_block = 0;
    matrix *compressed = sizes->output_groups ? compressed_matrix(&to->compressed, sizes, role, &first_block, &columns) : NULL;
    if (compressed) return (columns_of_role){compressed, first_block, ALONE, columns};
    switch (role) {
        case HEAD:
            matrix_free(&decoder->head);
            decoder->head = matrix_new((element)sizes->element, hidden, sizes->vocab);
            return (columns_of_role){&decoder->head, 0, ALONE, sizes->vocab};
        case QUERY: return (columns_of_role){&to->qkv, 0, ALONE, query};
        case KEY: return (columns_of_role){&to->qkv, query / LANES, ALONE, key};
        case VALUE: return (columns_of_role){&to->qkv, (query + key) / LANES, ALONE, value};
        case HEAD_GATE: return (columns_of_role){&to->qkv, heads / LANES, ALONE, query};
        case INDEX_QUERY: return (columns_of_role){&to->qkv, heads / LANES, ALONE, index_queries};
        case INDEX_KEY: return (columns_of_role){&to->qkv, (heads + index_queries) / LANES, ALONE, sizes->index_dim};
        case OUTPUT: return (columns_of_role){&to->output, 0, ALONE, hidden};
        case GATE: return (columns_of_role){&to->gate_up, 0, FIRST_IN_TURN, mlp};
        case UP: return (columns_of_role){&to->gate_up, 0, gates ? SECOND_IN_TURN : ALONE, mlp};
        case DOWN: return (columns_of_role){&to->down, 0, ALONE, hidden};
        case PLE_PROJECTION: return (columns_of_role){&to->ple.projection, 0, ALONE, sizes->ple_dim};
        case PLE_GATE: return (columns_of_role){&to->ple.gate, 0, ALONE, sizes->ple_dim};
        case PLE_OUTPUT: return (columns_of_role){&to->ple.output, 0, ALONE, hidden};
        default: return (columns_of_role){NULL, 0, ALONE, 0};
    }
}

// Loads a part of streams' weights; returns whether the role is one.
static bool load_streams(decoder *decoder, layer_weights *to, weight_role role, const given_weight *given) {
    stream_weights *all[] = {&to->attention_streams, &to->mlp_streams, &decoder->head_streams};
    int num = decoder->sizes.num_streams, part = (int)role - ATTENTION_MIX;
    if (part < 0 || part > HEAD_MIX_SCALE - ATTENTION_MIX) return false;
    stream_weights *weights = all[part / 3];
    int columns = weights->is_head ? num : num * (2 + num);
    if (part % 3 == 0) matrix_load(&weights->mix, 0, ALONE, columns, given);
    else if (part % 3 == 1) floats_load(&weights->bias, columns, given->numbers);
    else floats_load(&weights->scale, weights->is_head ? 1 : 3, given->numbers);
    return true;
}

void decoder_load(decoder *decoder, int layer, int role, const given_weight *given) {
    const decoder_sizes *sizes = &decoder->sizes;
    layer_weights *to = &decoder->layers[layer];
    columns_of_role columns = role_columns(decoder, layer, (weight_role)role);
    if (columns.matrix) {
        matrix_load(columns.matrix, columns.first_block, columns.kind, columns.num_columns, given);
        return;
    }
    const void *weight = given ? given->numbers : NULL;
    if (load_streams(decoder, to, (weight_role)role, given)) return;
    if (sizes->output_groups && compressed_load(&to->compressed, sizes, (weight_role)role, weight)) return;
    int hidden = sizes->hidden;
    bool has_all = sizes->joins_heads || sizes->head_norms_differ, is_latent = sizes->latent_rank;
    int query_width = is_latent ? sizes->query_rank : to->head_dim * (has_all ? sizes->num_heads : 1);
    int key_width = is_latent ? sizes->latent_rank : to->head_dim * (has_all ? to->num_kv_heads : 1);
    switch ((weight_role)role) {
        case EMBEDDING:
            decoder->embedding = weight;
            if (given->quantized) decoder->packed_embedding = *given->quantized;
            break;
        case FINAL_NORM: norm_load(sizes, &decoder->final_norm, hidden, weight); break;
        case INPUT_NORM: norm_load(sizes, &to->input_norm, hidden, weight); break;
        case QUERY_NORM: norm_load(sizes, is_latent ? &to->latent.query_norm : &to->query_norm, query_width, weight); break;
        case KEY_NORM: norm_load(sizes, is_latent ? &to->latent.key_norm : &to->key_norm, key_width, weight); break;
        case INDEX_NORM:
            if (is_latent) vector_load(&to->latent.indexer.norm, sizes->element, 2 * sizes->index_dim, weight);
            else norm_load(sizes, &to->index_key_norm, sizes->index_dim, weight);
            break;
        case INDEX_QUERY_NORM: norm_load(sizes, &to->index_query_norm, sizes->index_dim, weight); break;
        case OUTPUT_NORM: norm_load(sizes, &to->output_norm, hidden, weight); break;
        case MLP_NORM: norm_load(sizes, &to->mlp_norm, hidden, weight); break;
        case DOWN_NORM: norm_load(sizes, &to->down_norm, hidden, weight); break;
        case SHARED_NORM: norm_load(sizes, &to->shared_norm, hidden, weight); break;
        case SINKS:
            floats_load(&to->sinks, sizes->num_heads, weight);
            to->view.sinks = to->sinks;
            break;
        case STILL: to->is_still = true; break;
        case NO_ATTENTION: to->does_not_attend = true; break;
        case COLUMNS: products_new(sizes, to, *(const int32_t *)weight); break;
        case OTHER_ANGLES: to->has_other_angles = true; break;
        case WINDOW: to->view.window = *(const int32_t *)weight; break;
        case LAYER_SCALE: to->scale = *(const float *)weight; break;
        case HEADS:
            to->has_own_heads = true;
            to->has_indexer = ((const int32_t *)weight)[2];
            set_heads(sizes, to, ((const int32_t *)weight)[0], ((const int32_t *)weight)[1]);
            decoder->wide = (attention_sizes){sizes->element, sizes->num_heads, to->num_kv_heads, to->head_dim, sizes->scale};
            break;
        case SHARED_KEYS:
            decoder->shares_keys = to->shares_keys = true;
            to->source = *(const int32_t *)weight;
            set_heads(sizes, to, to->num_kv_heads, to->head_dim);
            break;
        case POOLS: compressed_pools(sizes, &to->compressed, ((const int32_t *)weight)[0], ((const int32_t *)weight)[1]); break;
        case PLE_TABLE:
            decoder->ple_table = weight;
            if (given->quantized) decoder->packed_ple_table = *given->quantized;
            break;
        case PLE_NORM: norm_load(sizes, &to->ple.norm, sizes->ple_dim, weight); break;
        case PLE_OUTPUT_NORM: norm_load(sizes, &to->ple.output_norm, hidden, weight); break;
        case CURVE: to->curve = memcpy(realloc(to->curve, 4 * sizeof(float)), weight, 4 * sizeof(float)); break;
        default: break;
    }
}

void decoder_experts(decoder *decoder, int layer, const expert_sizes *sizes) {
    layer_weights *to = &decoder->layers[layer];
    experts_free(to->experts);
    to->experts = experts_new(sizes, &decoder->sizes);
    products_new(&decoder->sizes, to, sizes->shared_intermediate);
}

void decoder_load_expert(decoder *decoder, int layer, int role, int expert, const given_weight *given) {
    experts_load(decoder->layers[layer].experts, (expert_role)role, expert, given);
}

void decoder_mixer(decoder *decoder, int layer, const mixer_sizes *sizes) {
    layer_weights *to = &decoder->layers[layer];
    mixer_free(to->mixer);
    to->mixer = mixer_new(sizes, &decoder->sizes);
}

void decoder_load_mixer(decoder *decoder, int layer, int role, const given_weight *given) {
    mixer_load(decoder->layers[layer].mixer, (mixer_role)role, given);
}

int decoder_adapter(decoder *decoder) {
    int number = decoder->adapters.num_adapters++;
    for (int i = 0; i < decoder->sizes.num_layers; i++) {
        layer_weights *layer = &decoder->layers[i];
        layer->adapters = realloc(layer->adapters, sizeof(layer_adapter) * (size_t)decoder->adapters.num_adapters);
        memset(&layer->adapters[number], 0, sizeof(layer_adapter));
    }
    return decoder->adapters.num_adapters;
}

void decoder_load_adapter(decoder *decoder, int adapter, int layer, int role, int rank, const float *down, const float *up) {
    layer_weights *to = &decoder->layers[layer];
    columns_of_role columns = role_columns(decoder, layer, (weight_role)role);
    const matrix *matrices[NUM_ADAPTED] = {&to->qkv, &to->output, &to->gate_up, &to->down};
    adapted_weight place = {.first_block = columns.first_block, .num_columns = columns.num_columns, .kind = columns.kind};
    for (int which = 0; which < NUM_ADAPTED; which++)
        if (matrices[which] == columns.matrix)
            adapter_load(&decoder->adapters, &to->adapters[adapter - 1], (adapted_matrix)which, place, columns.matrix->depth,
                         rank, down, up);
}
