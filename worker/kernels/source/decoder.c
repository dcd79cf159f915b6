// Decoder: embedding, layers of attention or mixers and products or experts, norm, head.
//
// Rows are float between operations; with bf16 weights they hold bf16 numbers, rounded where transformers rounds.
#include "decoder.h"

#include <stdlib.h>

#include "decoder_shape.h"
#include "elementary.h"
#include "elementwise.h"
#include "embedding.h"
#include "heads.h"
#include "indexer.h"

typedef struct {
    frame *frame;
    const decoder *decoder;
    const forward_call *call;
    attention *attention, *wide_attention;  // the latter for layers with heads of their own, or NULL
    float *normed, *wide, *mixed;  // [num_rows, hidden], [num_rows, widest matrix], [num_rows, largest depth]
    float *beside;                 // [num_rows, hidden] output of a mixer added to attention; else NULL
    float *embedded, *ple;         // [num_rows, hidden], [num_rows, ple_dim] for per-layer embeddings; else NULL
    expert_room *experts_room;
    mixer_room mixers_room;
    latent_room latents_room;
    index_room *index;  // NULL without indexers
    compressed_room *compressed;  // NULL without compressed attention
    stream_room *streams;         // NULL if a state has one stream
    adapted_rows *adapted;  // NULL if no row has an adapter
    bool rounds;
} pass;

// Index of a layer among the call's attending layers (in strides of the caches), and among those with a mixer.
typedef struct {
    int attending, mixing;
} layer_place;

// ---- operations on rows

// Multiplies activated gates with ups, or activates ups without gates.
static void activate(const decoder_sizes *sizes, const float *curve, const float *gates, const float *ups, int count,
                     bool rounds, float *out) {
    gate_form form = {(activation)sizes->activation, curve, sizes->gate_limit, sizes->gate_slope, rounds};
    for (int i = 0; i < count; i += LANES) {
        vec a = vec_load(gates + i);
        if (sizes->gate_scale != 1.0f) a = rounded(rounds, vec_mul(a, vec_set(sizes->gate_scale)));
        a = ups ? gated(&form, a, vec_load(ups + i)) : activated(form.activation, curve, a);
        vec_store(out + i, rounded(rounds, a));
    }
}

static void activate_rows(const pass *pass, const layer_weights *weights) {
    const decoder_sizes *sizes = &pass->decoder->sizes;
    long width = weights->intermediate;
    for (long row = 0; row < pass->call->num_rows; row++) {
        const float *from = pass->wide + row * weights->gate_up.columns;
        float *out = pass->mixed + row * width;
        if (!sizes->has_gates) activate(sizes, weights->curve, from, NULL, (int)width, pass->rounds, out);
        for (long turn = 0; sizes->has_gates && turn < width; turn += TURN) {
            long wide = width - turn < TURN ? width - turn : TURN;
            const float *gates = from + 2 * turn;
            activate(sizes, weights->curve, gates, gates + wide, (int)wide, pass->rounds, out + turn);
        }
    }
}

// ---- a layer

static void norm_rows(const pass *pass, const float *rows, const float *weight, float *out) {
    const decoder_sizes *sizes = &pass->decoder->sizes;
    long hidden = sizes->hidden;
    for (long row = 0; row < pass->call->num_rows; row++)
        norm(sizes, rows + row * hidden, weight, sizes->hidden, out + row * hidden);
}

// Writes the input of a product: the normed state, or a copy without a norm, since late helpers may still read it. Of a
// state with streams it is their sum.
static void front_rows(const pass *pass, const float *weight, const stream_weights *streams) {
    const decoder_sizes *sizes = &pass->decoder->sizes;
    int num_rows = pass->call->num_rows;
    const float *rows = pass->call->state;
    if (pass->streams) rows = streams_front(pass->frame, streams, sizes, pass->streams, num_rows, rows);
    if (weight) norm_rows(pass, rows, weight, pass->normed);
    else memcpy(pass->normed, rows, sizeof(float) * (size_t)num_rows * (size_t)sizes->hidden);
}

// Norms all heads of a row together.
static void norm_heads(const decoder_sizes *sizes, const layer_weights *weights, float *qkv) {
    int query_columns = sizes->num_heads * weights->head_dim, key_columns = weights->num_kv_heads * weights->head_dim;
    norm(sizes, qkv, weights->query_norm, query_columns, qkv);
    norm(sizes, qkv + query_columns, weights->key_norm, key_columns, qkv + query_columns);
}

typedef struct {
    const float *angles;
    float query_scale;
} position_numbers;

// Returns a normed, rotated and scaled head of queries or keys: in place, or in one of two buffers.
static const float *ready_head(const pass *pass, const layer_weights *weights, const float *head, const float *head_norm,
                               position_numbers at, float (*places)[MOST_HEAD_DIM + LANES]) {
    const decoder_sizes *sizes = &pass->decoder->sizes;
    int head_dim = weights->head_dim;
    if (head_norm && !sizes->norms_turned) {
        norm(sizes, head, head_norm, head_dim, places[0]);
        head = places[0];
    }
    if (!weights->is_still) {
        rotate(head, at.angles, head_dim, pass->rounds, places[1]);
        head = places[1];
    }
    if (head_norm && sizes->norms_turned) {
        norm(sizes, head, head_norm, head_dim, places[0]);
        head = places[0];
    }
    if (at.query_scale == 1.0f) return head;
    if (head != places[0]) memcpy(places[0], head, sizeof(float) * (size_t)head_dim);
    scale_numbers(places[0], head_dim, at.query_scale, pass->rounds);
    return places[0];
}

// Returns the weights of a head's norm, or NULL.
static const float *norm_of_head(const decoder_sizes *sizes, const float *norms, int head, int head_dim) {
    if (!norms || sizes->joins_heads) return NULL;
    return norms + (sizes->head_norms_differ ? (long)head * head_dim : 0);
}

static attention *attention_of(const pass *pass, const layer_weights *weights) {
    return weights->has_own_heads ? pass->wide_attention : pass->attention;
}

// Stores a row's keys and values in the cache, and passes its queries to attention and to `call->queries`.
static void keep_row(const pass *pass, int layer, int place, int group, int row, const float *qkv, position_numbers at, char *queries) {
    const decoder_sizes *sizes = &pass->decoder->sizes;
    const layer_weights *weights = &pass->decoder->layers[layer];
    int num_heads = sizes->num_heads, num_kv_heads = weights->num_kv_heads, head_dim = weights->head_dim;
    attention *attention = attention_of(pass, weights);
    int element_bytes = sizes->element == BF16 ? 2 : 4, value_dim = width_of_values(sizes, head_dim);
    int end = num_heads + (weights->shares_keys ? 0 : 2 * num_kv_heads);
    for (int head = 0; head < end; head++, qkv += head_dim) {
        float places[2][MOST_HEAD_DIM + LANES];
        const float *from = qkv;
        int kv_head = (head - num_heads) % num_kv_heads;
        bool is_value = head >= num_heads + num_kv_heads;
        if (head < num_heads) {
            from = ready_head(pass, weights, qkv, norm_of_head(sizes, weights->query_norm, head, head_dim), at, places);
            attention_query(attention, group, row, head, from);
            if (queries) store((element)sizes->element, from, head_dim, queries + (long)head * head_dim * element_bytes);
            continue;
        }
        position_numbers of_key = {at.angles, 1.0f};
        if (!is_value) from = ready_head(pass, weights, qkv, norm_of_head(sizes, weights->key_norm, kv_head, head_dim), of_key, places);
        if (is_value && sizes->norms_values) {
            norm(sizes, qkv, NULL, head_dim, places[0]);
            from = places[0];
        }
        if (is_value && value_dim < head_dim) {
            memset(places[0], 0, sizeof(float) * (size_t)head_dim);
            from = memcpy(places[0], qkv, sizeof(float) * (size_t)value_dim);
            qkv -= head_dim - value_dim;
        }
        attention_keep(attention, place, group, row, kv_head, is_value, from);
    }
}

// Stores a row's index key as the key of a head behind the others, and the raw one as its value; keeps its index queries.
static void keep_index(const pass *pass, const layer_weights *weights, int place, int group, int row, const float *index,
                       position_numbers at, float *queries) {
    const decoder_sizes *sizes = &pass->decoder->sizes;
    float places[2][MOST_HEAD_DIM + LANES];
    attention *attention = attention_of(pass, weights);
    at.query_scale = 1.0f;
    for (int head = 0; head < sizes->index_heads; head++, index += sizes->index_dim) {
        const float *query = ready_head(pass, weights, index, weights->index_query_norm, at, places);
        memcpy(queries + (long)head * sizes->index_dim, query, sizeof(float) * (size_t)sizes->index_dim);
    }
    const float *key = ready_head(pass, weights, index, weights->index_key_norm, at, places);
    attention_keep(attention, place, group, row, weights->num_kv_heads, false, key);
    attention_keep(attention, place, group, row, weights->num_kv_heads, true, index);
}

static void keep_rows(const pass *pass, int layer, int place) {
    const forward_call *call = pass->call;
    const decoder_sizes *sizes = &pass->decoder->sizes;
    const layer_weights *weights = &pass->decoder->layers[layer];
    const matrix *qkv = &weights->qkv;
    int index_columns = (sizes->index_heads + 1) * sizes->index_dim;
    long number = 0, row_bytes = (long)sizes->num_heads * sizes->head_dim * (sizes->element == BF16 ? 2 : 4);
    const float *table = weights->has_other_angles ? call->other_angles : call->angles;
    char *queries = call->queries;
    if (queries) queries += place * call->num_rows * row_bytes;
    for (int group = 0; group < call->num_groups; group++)
        for (int row = 0; row < call->groups[group].num_rows; row++, number++) {
            int position = call->positions[number];
            position_numbers at = {table + (long)position * weights->head_dim,
                                   call->query_scales ? call->query_scales[position] : 1.0f};
            char *own = queries ? queries + number * row_bytes : NULL;
            float *heads = pass->wide + number * qkv->columns;
            if (sizes->joins_heads) norm_heads(sizes, weights, heads);
            keep_row(pass, layer, place, group, row, heads, at, own);
            if (weights->has_indexer)
                keep_index(pass, weights, place, group, row, heads + qkv->columns - index_columns, at,
                           pass->index->queries + number * (index_columns - sizes->index_dim));
        }
}

static void add_part(const pass *pass, const float *norm_behind, long count) {
    float scale = pass->decoder->sizes.residual_scale;
    if (norm_behind) norm_rows(pass, pass->wide, norm_behind, pass->wide);
    if (scale != 1.0f) scale_numbers(pass->wide, count, scale, pass->rounds);
    if (pass->streams) streams_behind(&pass->decoder->sizes, pass->streams, pass->call->num_rows, pass->wide, pass->call->state);
    else add(pass->call->state, pass->wide, count, pass->rounds);
}

// Writes rows [num_rows, depth] times a matrix, with what their adapters add, to the wide room.
static void adapted_linear(const pass *pass, const layer_weights *weights, adapted_matrix which, const float *rows) {
    const matrix *matrices[NUM_ADAPTED] = {&weights->qkv, &weights->output, &weights->gate_up, &weights->down};
    const matrix *matrix = matrices[which];
    int num_rows = pass->call->num_rows;
    if (!pass->adapted) {
        linear(pass->frame, matrix, num_rows, rows, pass->wide, matrix->columns, pass->rounds);
        return;
    }
    linear_sums(pass->frame, matrix, num_rows, rows, pass->wide, matrix->columns);
    adapters_add(pass->frame, pass->adapted, weights->adapters, which, rows, pass->wide, matrix->columns);
    finish_panel(matrix, 0, matrix->columns / LANES, num_rows, pass->wide, matrix->columns, pass->rounds);
}

// Runs products, experts, or both.
static void feed_forward(const pass *pass, const layer_weights *weights) {
    const decoder_sizes *sizes = &pass->decoder->sizes;
    int num_rows = pass->call->num_rows;
    if (weights->intermediate) {
        adapted_linear(pass, weights, ADAPTED_GATES, pass->normed);
        activate_rows(pass, weights);
        adapted_linear(pass, weights, ADAPTED_DOWN, pass->mixed);
        if (sizes->down_scale != 1.0f) scale_numbers(pass->wide, (long)num_rows * sizes->hidden, sizes->down_scale, pass->rounds);
    }
    if (weights->shared_norm) norm_rows(pass, pass->wide, weights->shared_norm, pass->wide);
    if (weights->experts) {
        const float *rows = weights->experts->front_norm ? pass->call->state : pass->normed;
        experts_run(pass->frame, weights->experts, pass->experts_room, num_rows, rows, pass->call->token_ids, pass->rounds, pass->wide);
    }
}

// Multiplies attention's output by the sigmoids of gates, which follow the values.
static void gate_heads(const pass *pass, const layer_weights *weights) {
    const decoder_sizes *sizes = &pass->decoder->sizes;
    int columns = sizes->num_heads * weights->head_dim, before = weights->qkv.columns - columns;
    for (long row = 0; row < pass->call->num_rows; row++) {
        const float *gates = pass->wide + row * weights->qkv.columns + before;
        float *found = pass->mixed + row * columns;
        for (int i = 0; i < columns; i += LANES) {
            vec gate = rounded(pass->rounds, sigmoid(vec_load(gates + i)));
            vec_store(found + i, rounded(pass->rounds, vec_mul(vec_load(found + i), gate)));
        }
    }
}

static void scale_keys(const pass *pass, const layer_weights *weights) {
    const decoder_sizes *sizes = &pass->decoder->sizes;
    float *keys = pass->wide + sizes->num_heads * weights->head_dim;
    for (long row = 0; row < pass->call->num_rows; row++)
        scale_numbers(keys + row * weights->qkv.columns, weights->num_kv_heads * weights->head_dim, sizes->key_scale, pass->rounds);
}

static void scale_values(const pass *pass, const layer_weights *weights) {
    const decoder_sizes *sizes = &pass->decoder->sizes;
    int count = weights->num_kv_heads * width_of_values(sizes, weights->head_dim);
    float *values = pass->wide + (sizes->num_heads + weights->num_kv_heads) * weights->head_dim;
    for (long row = 0; row < pass->call->num_rows; row++)
        scale_numbers(values + row * weights->qkv.columns, count, sizes->value_scale, pass->rounds);
}

// Takes the zeros out of attention's output that make narrow values as wide as keys.
static void narrow_rows(const pass *pass, const layer_weights *weights) {
    int head_dim = weights->head_dim, value_dim = width_of_values(&pass->decoder->sizes, head_dim);
    long num_heads = (long)pass->call->num_rows * pass->decoder->sizes.num_heads;
    for (long head = 1; head < num_heads; head++)
        memmove(pass->mixed + head * value_dim, pass->mixed + head * head_dim, sizeof(float) * (size_t)value_dim);
}

// Attends to the keys of a layer, or to those that its indexer chooses.
static void attend_to_keys(const pass *pass, const layer_weights *weights, int place) {
    attention *attention = attention_of(pass, weights);
    if (weights->has_indexer && pass->index->chosen) {
        index_choose(pass->frame, &pass->decoder->sizes, pass->index, pass->call, attention, place);
        attention = pass->index->attention;
    }
    attention_run(attention, pass->frame, place, &weights->view, pass->mixed);
}

static void attend_rows(const pass *pass, int layer, int place) {
    const decoder_sizes *sizes = &pass->decoder->sizes;
    const layer_weights *weights = &pass->decoder->layers[layer];
    int num_rows = pass->call->num_rows;
    const float *found = pass->mixed;
    long count = (long)num_rows * sizes->hidden;
    if (sizes->attention_in_scale != 1.0f) scale_numbers(pass->normed, count, sizes->attention_in_scale, pass->rounds);
    if (sizes->latent_rank)
        found = latent_run(pass->frame, &weights->latent, &pass->latents_room, pass->index, pass->attention, &weights->view,
                           pass->call, place, pass->normed, pass->mixed);
    else if (sizes->output_groups)
        found = compressed_run(pass->frame, &weights->compressed, sizes, pass->compressed, pass->attention, &weights->view, pass->call,
                               weights->has_other_angles ? pass->call->other_angles : pass->call->angles, place, pass->normed,
                               pass->wide, pass->mixed);
    else {
        adapted_linear(pass, weights, ADAPTED_HEADS, pass->normed);
        if (sizes->key_scale != 1.0f) scale_keys(pass, weights);
        if (sizes->value_scale != 1.0f) scale_values(pass, weights);
        keep_rows(pass, layer, place);
        attend_to_keys(pass, weights, place);
        if (sizes->value_dim) narrow_rows(pass, weights);
    }
    if (sizes->gates_heads) gate_heads(pass, weights);
    adapted_linear(pass, weights, ADAPTED_OUTPUT, found);
    if (sizes->attention_out_scale != 1.0f) scale_numbers(pass->wide, count, sizes->attention_out_scale, pass->rounds);
}

// Runs a mixer, attention, or both on the same input.
static void mix_rows(const pass *pass, int layer, layer_place place) {
    const layer_weights *weights = &pass->decoder->layers[layer];
    float *out = weights->does_not_attend ? pass->wide : pass->beside;
    if (weights->mixer) mixer_run(pass->frame, weights->mixer, &pass->mixers_room, pass->call, place.mixing, pass->normed, out);
    if (weights->does_not_attend) return;
    attend_rows(pass, layer, place.attending);
    if (weights->mixer) add(pass->wide, pass->beside, (long)pass->call->num_rows * pass->decoder->sizes.hidden, pass->rounds);
}

static void add_ple(const pass *pass, int layer) {
    const decoder_sizes *sizes = &pass->decoder->sizes;
    const layer_weights *weights = &pass->decoder->layers[layer];
    int width = sizes->ple_dim, num_rows = pass->call->num_rows;
    ple_read(pass->frame, pass->decoder, pass->call, layer, pass->embedded, pass->mixed, pass->ple);
    front_rows(pass, NULL, NULL);
    linear(pass->frame, &weights->ple.gate, num_rows, pass->normed, pass->mixed, width, pass->rounds);
    activate(sizes, weights->curve, pass->mixed, pass->ple, num_rows * width, pass->rounds, pass->mixed);
    linear(pass->frame, &weights->ple.output, num_rows, pass->mixed, pass->wide, sizes->hidden, pass->rounds);
    add_part(pass, weights->ple.output_norm, (long)num_rows * sizes->hidden);
}

static void run_layer(const pass *pass, int layer, layer_place place) {
    const decoder_sizes *sizes = &pass->decoder->sizes;
    const layer_weights *weights = &pass->decoder->layers[layer];
    long count = (long)pass->call->num_rows * sizes->hidden;
    if (weights->mixer || !weights->does_not_attend) {
        front_rows(pass, weights->input_norm, &weights->attention_streams);
        mix_rows(pass, layer, place);
        add_part(pass, weights->output_norm, count);
    }
    if (!weights->intermediate && !weights->experts) return;
    if (!sizes->is_parallel) front_rows(pass, weights->mlp_norm, &weights->mlp_streams);
    feed_forward(pass, weights);
    add_part(pass, weights->down_norm, count);
    if (sizes->ple_dim) add_ple(pass, layer);
    if (weights->scale != 1.0f) scale_numbers(pass->call->state, count, weights->scale, pass->rounds);
}

static void run_layers(const pass *pass) {
    const decoder *decoder = pass->decoder;
    layer_place place = {decoder->shares_keys ? strides_before(decoder, pass->call->first_layer) : 0, 0};
    for (int layer = pass->call->first_layer; layer < pass->call->end_layer; layer++) {
        const layer_weights *weights = &decoder->layers[layer];
        layer_place at = {weights->shares_keys ? strides_before(decoder, weights->source) : place.attending, place.mixing};
        run_layer(pass, layer, at);
        if (weights->mixer) place.mixing++;
        place.attending += own_strides(decoder, weights);
    }
}

// ---- a call

// Embeds tokens for the state, for per-layer embeddings, or for both.
static void begin(pass *pass) {
    const decoder_sizes *sizes = &pass->decoder->sizes;
    size_t rows = (size_t)pass->call->num_rows * sizeof(float), bytes = rows * (size_t)sizes->hidden;
    if (!sizes->ple_dim) {
        if (pass->call->embeds) embed(pass->decoder, pass->call, pass->call->state);
        if (pass->call->embeds && pass->streams) streams_begin(sizes, pass->call->num_rows, pass->call->state);
        return;
    }
    pass->embedded = frame_take(pass->frame, bytes);
    pass->ple = frame_take(pass->frame, rows * (size_t)sizes->ple_dim);
    embed(pass->decoder, pass->call, pass->embedded);
    if (pass->call->embeds) memcpy(pass->call->state, pass->embedded, bytes);
}

// Takes the choice of earlier layers in a call that begins after the first one.
static void begin_index(pass *pass) {
    const decoder *decoder = pass->decoder;
    size_t bytes = index_choice_bytes(&decoder->sizes, pass->call->num_rows);
    pass->index = index_room_new(pass->frame, &decoder->sizes, pass->call);
    bool may_share = decoder->sizes.latent_rank && pass->call->first_layer && pass->index->chosen;
    if (may_share && !decoder->layers[pass->call->first_layer].latent.indexer.norm)
        index_take_choice(pass->frame, pass->index, decoder->choice, bytes, pass->attention);
}

// Keeps the choice for a call over later layers.
static void end_index(const pass *pass, decoder *decoder) {
    size_t bytes = index_choice_bytes(&decoder->sizes, pass->call->num_rows);
    if (decoder->sizes.latent_rank && pass->call->end_layer < decoder->sizes.num_layers && pass->index->chosen)
        decoder->choice = memcpy(realloc(decoder->choice, bytes), pass->index->chosen[0], bytes);
}

void decoder_forward(decoder *decoder, team *team, const forward_call *call) {
    const decoder_sizes *sizes = &decoder->sizes;
    frame *frame = frame_open(team);
    if (sizes->output_groups) call = rows_alone(frame, call);
    else if (sizes->index_heads) call = index_rows_alone(frame, sizes, call);
    int rows_of_a_group = call->num_groups == call->num_rows ? 1 : call->num_rows;
    int shared_dim = sizes->output_groups ? sizes->head_dim : sizes->latent_rank;  // of values that all heads share
    int num_kv_heads = shared_dim ? latent_groups(sizes, rows_of_a_group) : sizes->num_kv_heads;
    attention_sizes heads = {sizes->element, sizes->num_heads, num_kv_heads, sizes->head_dim, sizes->scale};
    size_t rows = (size_t)call->num_rows * sizeof(float);
    int intermediate = most(most_intermediate(decoder), sizes->ple_dim);
    int widest = most(most(most_heads(decoder, true), 2 * intermediate), sizes->hidden);
    const mixer *mixer = mixer_of(decoder);
    int key_dim = sizes->latent_rank ? latent_key_dim(sizes) : sizes->head_dim;
    expert_room experts_room = {0};
    pass pass = {.frame = frame,
                 .decoder = decoder,
                 .call = call,
                 .attention = attention_new(frame, &heads, shared_dim, key_dim, 1, call->groups, call->num_groups),
                 .normed = frame_take(frame, rows * (size_t)sizes->hidden),
                 .wide = frame_take(frame, rows * (size_t)widest + 4 * LANES),
                 .mixed = frame_take(frame, rows * (size_t)most(most_heads(decoder, false), intermediate)),
                 .experts_room = &experts_room,
                 .rounds = sizes->element == BF16};
    if (decoder->wide.head_dim) {
        int num_stripes = decoder->wide.head_dim / sizes->head_dim;
        pass.wide_attention = attention_new(frame, &decoder->wide, 0, decoder->wide.head_dim, num_stripes, call->groups, call->num_groups);
    }
    if (sizes->latent_rank) pass.latents_room = latent_room_new(frame, sizes, call->num_rows);
    if (mixer) pass.mixers_room = mixer_room_new(frame, mixer, call->num_rows, call->num_sequences);
    if (mixes_beside_attention(decoder)) pass.beside = frame_take(frame, rows * (size_t)sizes->hidden);
    if (sizes->output_groups) pass.compressed = compressed_room_new(frame, decoder, call);
    else if (sizes->index_heads) begin_index(&pass);
    if (sizes->num_streams) pass.streams = stream_room_new(frame, sizes, call->num_rows);
    if (decoder->adapters.num_adapters) pass.adapted = adapted_rows_new(frame, call, &decoder->adapters);
    begin(&pass);
    run_layers(&pass);
    if (pass.index) end_index(&pass, decoder);
    if (call->hidden) {
        front_rows(&pass, decoder->final_norm, &decoder->head_streams);
        store((element)sizes->element, pass.normed, call->num_rows * sizes->hidden, call->hidden);
        if (call->logits) head_apply(frame, decoder, call->num_rows, pass.normed, call->logits);
    }
    decoder->num_experts_met += experts_room.num_met;
    frame_close(frame);
}

int64_t decoder_experts_met(const decoder *decoder) { return decoder->num_experts_met; }
