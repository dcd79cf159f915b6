// What Python calls. Python checks every shape, and `rows_fit` the numbers; no other function checks its arguments.
#pragma once
#include <stdbool.h>
#include <stdint.h>

#define EXPORT __attribute__((visibility("default")))
#define TAIL 64  // most keys of a row's own, after the shared prefix

enum { MOST_HEAD_DIM = 512, MOST_STREAMS = 16 };

typedef enum { BF16 = 0, F32 = 1 } element;
typedef enum { KV_PLAIN, KV_INT8, KV_E4M3 } kv_code;  // form of a cache's rows: elements, or codes of 8 bits (kv_codes.h)

// ---- this build

EXPORT const char *kernels_variant(void);  // name of its instruction set
EXPORT int kernels_usable(void);           // whether processor and system support it

// ---- threads

typedef struct team team;
EXPORT team *team_new(int num_threads);  // including the caller's; helpers start with the first work
EXPORT void team_free(team *team);       // waits for all threads
EXPORT int team_is_busy(team *team);     // whether a late helper may still read arguments of past calls

// ---- scanned keys of a long text, for drafts: see scan.c

enum { SCAN_CHUNK = 1024, CLOUD_CHUNKS = 16 };  // keys coded at once; chunks that share moments

typedef struct {
    const void *cache;  // like that of a `row_group`, as are strides and codes
    int64_t layer_stride, value_stride, head_stride;
    const uint8_t *codes;   // [layers, num_kv_heads, most_chunks * SCAN_CHUNK / 64, head_dim / 4, 64]
    const float *means;     // [layers, num_kv_heads, most_chunks, head_dim]: mean key of each chunk
    const float *spreads;   // [layers, num_kv_heads, head_dim]: mean distance of keys from their mean
    const float *moments;   // [layers, num_kv_heads, most_clouds, 2 * head_dim * (head_dim + 1)]: mean key and mean
                            // value, then covariances of keys and of values with keys, [head_dim, head_dim] each
    int32_t first;          // slot of the first coded key
    int32_t num_chunks, most_chunks, most_clouds;
    int32_t num_best;       // keys that each query sees exactly
    float flat_deviation;   // queries whose scores deviate less see no key exactly: it would have next to no weight
    int32_t kv_code;
} scanned_keys;

// ---- rows of one sequence that share a prefix

typedef struct {
    void *cache;  // key of head 0 at slot 0, in the call's first layer; slots are a row apart
    int64_t layer_stride, value_stride, head_stride;  // elements between layers, from key to value, between heads;
                                                      // bytes if rows are codes
    const int32_t *tail_slots;                        // [num_rows, TAIL], ordered by position
    const int32_t *tail_lengths;                      // [num_rows] from 1 to TAIL: how many slots of each tail are used
    const float *biases;                              // [boundary] added to the scores of the prefix's keys, or NULL
    const scanned_keys *scanned;                      // keys that the rows see besides prefix and tails, or NULL
    int32_t num_rows, first_slot;                     // the rows' keys and values are stored in consecutive slots
    int32_t boundary;                                 // keys below it are the prefix; a multiple of 64
    int32_t capacity;
    int32_t is_partial;                               // slots are not positions, so windows do not apply
    int32_t kv_code;
    int32_t adapter;                                  // `decoder_adapter`'s number; 0: none
} row_group;

// Returns whether all numbers of a call are within their caches, the vocabulary and the positions.
EXPORT int rows_fit(const row_group *groups, int num_groups, const int32_t *token_ids, const int32_t *positions,
                    int vocab, int num_positions);

// ---- attention of one layer

typedef struct {
    int32_t element, num_heads, num_kv_heads, head_dim;
    float scale;
} attention_sizes;

// Which keys the rows of a layer see, and how scores are changed.
typedef struct {
    int32_t window;      // keys that a row sees, including its own; 0: all
    float softcap;       // scores become softcap * tanh(score / softcap); 0: no cap
    const float *sinks;  // [num_heads] scores in the denominator that have no value, or NULL
} attention_view;

// Adds one chunk of keys and values: means, spreads (with the first chunk), moments and codes.
EXPORT void scan_take_in(team *team, const attention_sizes *sizes, const scanned_keys *keys, int num_layers, int chunk);

// Stores the rows' keys and values and attends: queries, output [num_rows, num_heads, head_dim], keys, values
// [num_rows, num_kv_heads, head_dim].
EXPORT void attend(team *team, const attention_sizes *sizes, const attention_view *view, const row_group *groups,
                   int num_groups, const void *queries, const void *keys, const void *values, void *output);

// ---- layers with a state instead of keys and values: see recurrence.c

enum { MOST_STATE_ROWS = 128 };

typedef struct {
    int32_t num_rows, num_heads, num_key_heads, key_dim, value_dim;  // up to MOST_STATE_ROWS rows; value_dim in whole vectors
    int32_t num_decays;          // per head: 1, or key_dim if each row of a state has its own
    const int32_t *parents;      // [num_rows] earlier row that each one continues, or -1 - i for states[i]
    const float *const *states;  // [num_heads, key_dim, value_dim] each
    const float *queries, *keys;  // [num_rows, num_key_heads, key_dim]
    const float *values;          // [num_rows, num_heads, value_dim]
    const float *betas;           // [num_rows, num_heads] factors of value - state's value; NULL: the value itself is added
    const float *decays;          // [num_rows, num_heads, num_decays]
    float *updates, *found;       // [num_rows, num_heads, value_dim]
} recurrence;

// Computes the rows' updates; `found` is each query times the state after its row.
EXPORT void recurrence_rows(team *team, const recurrence *call);
// Replaces each layer's state by its call's states[0] after the call's rows of keys, updates and decays, any number in
// order. It may be that state.
EXPORT void recurrence_fold(team *team, const recurrence *calls, float *const *states, int num_layers);

typedef struct {
    void *rows;
    int64_t row_bytes;
} kept_rows;

// Moves rows first + chosen[0], first + chosen[1]... (ascending) to first, first + 1...
EXPORT void rows_keep(const kept_rows *buffers, int num_buffers, int first, const int32_t *chosen, int count);

// ---- layers that mix a row with earlier ones through a state or a convolution: see mixers.c

typedef enum { DELTA_NET, STATE_SPACE, CONVOLUTION } mixer_form;  // STATE_SPACE is Mamba-2

typedef struct {
    int32_t form, num_heads, num_key_heads, key_dim, value_dim;  // a CONVOLUTION has no heads
    int32_t num_channels, conv_width;                           // of the convolution before the state
    int32_t norm_width;     // neighbouring outputs that are normed together; 0: no norm
    float epsilon;          // of this norm
    float least_step, most_step;  // limits of time steps in STATE_SPACE
    float in_scale, out_scale;    // of the mixer's input and output; mostly 1
} mixer_sizes;

typedef enum {
    MIX_INPUTS,   // of the convolution: queries, keys, values; in STATE_SPACE values, keys, queries
    MIX_GATES,    // of the outputs
    MIX_BETAS,    // DELTA_NET: [num_heads]; CONVOLUTION: [num_channels] gates of the inputs
    MIX_STEPS,    // [num_heads] inputs of the decays
    MIX_OUTPUT,   // projection of the output; roles after it are always floats
    MIX_TAPS,     // [conv_width, num_channels] of the convolution
    MIX_TAP_BIAS, MIX_RATES, MIX_STEP_BIAS, MIX_SKIP, MIX_NORM,
    MIX_SCALES     // of the columns of all roles up to MIX_STEPS, in their order
} mixer_role;

// Last steps of one sequence in one layer, by positions after a boundary.
typedef struct {
    void *inputs;  // [conv_width - 1 + steps, num_channels] elements, those before the boundary first
    float *keys, *updates, *decays;  // [steps, num_key_heads, key_dim], [steps, num_heads, value_dim], [steps, num_heads]
    const float *state;              // [num_heads, key_dim, value_dim] before the rows
} layer_steps;

// Consecutive rows of one sequence, at most MOST_STATE_ROWS.
typedef struct {
    const layer_steps *layers;  // of all layers with a mixer
    const int32_t *parents;     // [num_rows] as in a `recurrence`; -1 for the state
    const int32_t *before;      // [num_rows, conv_width - 1] the steps before each row, from 1 - conv_width on
    int32_t num_rows, first_step;
} sequence_steps;

// ---- rows of weights in 8 or 4 bits

typedef enum { CODE_TABLE, CODE_INT8, CODE_UINT8, CODE_E4M3 } code_type;  // the first has 4 bits
typedef enum { SCALE_F16, SCALE_BF16, SCALE_F32 } scale_type;

// They represent table[code] * scale + offset, rounded once to the reader's element.
typedef struct {
    const uint8_t *codes;          // [rows, depth]; of 4 bits [rows, depth / 2], the first of two in the low half
    const void *scales, *offsets;  // [rows, depth / group_size]; offsets or NULL
    const float *table;            // number of each code
    int32_t code, scale_type;
    int32_t group_size;  // neighbours along the depth that share a scale: even, for 4 bits a multiple of 8
    // Products round their rows to 8 bits (integer_products.h). Depths are multiples of 32, groups have 16 or a multiple
    // of 32, codes are no e4m3, and a table holds multiples of 1 or 1/2 that fit in 8 bits.
    int32_t as_integers;
} quantized_rows;

// A weight and its bias.
typedef struct {
    const void *numbers;              // in torch's layout, or
    const quantized_rows *quantized;  // the same in 8 or 4 bits, which stay so
    const void *bias;                 // or NULL
} given_weight;

// ---- a dense decoder

typedef enum {
    ROUNDED_TWICE, ROUNDED_ONCE,  // before and after the weight; after it only
    ONE_MORE,                     // as ROUNDED_ONCE, with 1 added to the weight
    CENTRED,                      // as ROUNDED_ONCE, with the mean subtracted
    SHIFTED                       // as CENTRED, with biases, which are stored after the weights
} norm_form;
typedef enum { SILU, GELU_TANH, RELU2, XIELU } activation;

typedef struct {
    int32_t element, num_layers, hidden, num_heads, num_kv_heads, head_dim, intermediate, vocab;
    int32_t norm_form, activation, has_gates;
    int32_t joins_heads;   // query and key norms cover all heads of a row together
    int32_t norms_turned;  // these norms come after the rotation
    int32_t is_parallel;   // a layer's products read the same input as its attention
    int32_t head_norms_differ;  // each head of a layer has its own norm weights
    int32_t gates_heads;  // attention's output is multiplied by the sigmoids of gates
    int32_t norms_values;  // values are normed, without weights
    // Latent attention: see latent.h. `latent_rank` is 0 without it; else a cache's head holds `head_dim` numbers: the
    // latent vector, then the rotated part of the key.
    int32_t latent_rank, query_rank;  // size of latent vectors; of the queries' (0: none)
    int32_t still_dim, value_dim;     // of a head: the unrotated part of its query; its value, also without latent
                                      // vectors if it is narrower than the key (0: as wide)
    // Indexers: see indexer.h. `index_heads` is 0 without them; else a cache's row ends with an indexer's key, or, with
    // an `index_block`, a layer's cache ends with a head for it.
    int32_t index_heads, index_dim;  // heads of an indexer's query; their width, and the key's
    int32_t num_chosen_keys;         // that a row attends to
    int32_t index_block;             // keys that are chosen together, a multiple of 64; 0: each alone
    // Compressed attention: see compressed.h. `output_groups` is 0 without it; else values are keys, and the first
    // `still_dim` numbers of a head are not rotated.
    int32_t output_groups, output_rank;  // of heads that are projected together in front of the output; to so many numbers
    int32_t num_streams, num_sinkhorn;   // of a row's state: see streams.h (0: it has one); steps that balance them
    // Per-layer embeddings: see PLE_TABLE. `ple_dim` is 0 without them.
    int32_t ple_dim, ple_element;  // width; element of the table, unless that is packed
    float epsilon, scale;  // of the norms; of the scores
    float embedding_scale, residual_scale, logit_scale;  // of embeddings, of what layers add, of logits; mostly 1
    float score_cap, logit_cap;  // as `attention_view.softcap`, for all layers; of scaled logits
    float attention_in_scale, key_scale, attention_out_scale;  // of attention's input, of keys before rotation,
                                                               // and of attention's output; mostly 1
    float gate_scale, down_scale;  // of gates before their activation, and of the products' output; mostly 1
    float gate_limit, gate_slope;  // of all products with gates, as in `expert_sizes`; 0: neither
    float value_scale;             // of values; mostly 1
    float ple_scale;               // of the rows of PLE_TABLE
    float stream_epsilon;          // added in streams' weights
} decoder_sizes;

typedef enum {
    SOFTMAX_OF_ALL, SIGMOID,  // of the logits of all experts
    SOFTMAX_OF_CHOSEN,        // experts are chosen by logits
    SIGMOID_OF_CHOSEN,        // likewise
    SPARSE_MIXER,  // likewise; each weight is a softmax over the remaining experts within `jitter`
    ROOT_SOFTPLUS  // of the logits of all experts: sqrt(log(1 + e^x))
} router_score;

enum { MOST_EXPERTS = 1024 };

typedef struct {
    int32_t num_experts, num_chosen, intermediate;  // per layer; per row; columns of an expert
    int32_t shared_intermediate;                    // columns of the expert that all rows use; 0: none
    int32_t latent;                                 // numbers of a row that experts read and write; 0: the whole row
    int32_t score, num_groups, num_chosen_groups;   // experts are chosen from the best groups, scored by
    int32_t num_best_of_group;                      // the sum of so many of their best
    int32_t is_normalised;                          // weights are divided by their sum
    int32_t rounds_logits, rounds_weights;          // to bf16, in bf16 models
    float least_sum, scale;                         // smallest divisor of weights; factor of weights
    float jitter;                                   // of SPARSE_MIXER
    float gate_limit;  // gates and ups are clamped to it; 0: they are not
    float gate_slope;  // sigmoids are of slope * gate, and ups get 1 added; 0: neither
} expert_sizes;

typedef enum {
    EMBEDDING, FINAL_NORM, HEAD,  // of the model: layer 0
    INPUT_NORM, QUERY, KEY, VALUE, QUERY_NORM, KEY_NORM, OUTPUT, OUTPUT_NORM, MLP_NORM, GATE, UP, DOWN, DOWN_NORM,
    STILL,  // no weight: the layer rotates no heads
    WINDOW,  // an int32: the layer's `attention_view.window`
    OTHER_ANGLES,  // no weight: the layer rotates heads by `forward_call.other_angles`
    CURVE,  // four floats: parameters of XIELU
    SINKS,   // floats: the layer's `attention_view.sinks`
    HEAD_GATE,     // of its attention's output
    NO_ATTENTION,  // no weight: the layer has no attention
    COLUMNS,       // an int32: columns of the layer's own gates and ups; 0: it has no products after attention
    QUERY_DOWN, KEY_UP, VALUE_UP,  // of latent attention: see latent.h
    INDEX_QUERY, INDEX_KEY, INDEX_WEIGHT,  // of an indexer: see indexer.h
    INDEX_NORM,        // of keys: weights, then biases; with an `index_block` weights alone
    INDEX_QUERY_NORM,  // with an `index_block`
    HEADS,  // three int32, before all others: the layer's own heads of keys, their size, a multiple of `head_dim`, and
            // whether it has an indexer. A cache then has as many neighbouring heads of `head_dim` for each, and a
            // `layer_stride` is one of them.
    SHARED_NORM,  // of the products' output, before that of experts is added
    LAYER_SCALE,  // a float: of the layer's output
    SHARED_KEYS,  // an int32, before all others: an earlier layer whose keys and values the layer reads. It has none.
    // Per-layer embeddings. A layer's embedding of a token is (norm(scaled embedding times PLE_PROJECTION / sqrt(hidden))
    // + the token's scaled row of the table) / sqrt(2). The layer adds norm((activated(state times PLE_GATE) * embedding)
    // times PLE_OUTPUT) to its state.
    PLE_TABLE,  // of the model: [vocab, num_layers, ple_dim]
    PLE_PROJECTION, PLE_NORM, PLE_GATE, PLE_OUTPUT, PLE_OUTPUT_NORM,
    // Compressed attention; biases are floats.
    POOLS,  // two int32, before all others of the layer: positions of a pooled key, and the number of series
    POOL_KEY, POOL_GATE, POOL_BIAS, POOL_NORM,
    INDEX_POOL_KEY, INDEX_POOL_GATE, INDEX_POOL_BIAS, INDEX_POOL_NORM,
    OUTPUT_DOWN,  // of groups of heads
    // Streams, all floats: in front of attention, of the products, of the head.
    ATTENTION_MIX, ATTENTION_MIX_BIAS, ATTENTION_MIX_SCALE, MLP_MIX, MLP_MIX_BIAS, MLP_MIX_SCALE,
    HEAD_MIX, HEAD_MIX_BIAS, HEAD_MIX_SCALE
} weight_role;

typedef enum {
    ROUTER, CHOICE_BIAS, SHARED_GATE,    // floats, whatever the element
    EXPERT_GATE, EXPERT_UP, EXPERT_DOWN,  // of one expert
    LATENT_IN, LATENT_OUT,                // from a row to what experts read, and from their sum back to a row
    ROUTER_SCALE, CHOICE_SCALES,  // floats: of the router's input, then normed without weights; of experts' weights
    FRONT_NORM, BEHIND_NORM,      // of experts' input, which is then the layer's state; of their sum
    CHOICES                       // [vocab, num_chosen] int32: each token's experts, whatever their scores
} expert_role;

typedef struct decoder decoder;
EXPORT decoder *decoder_new(const decoder_sizes *sizes);
// Loads a weight (NULL for roles without one). All are copied except the embedding and PLE_TABLE, packed or not.
EXPORT void decoder_load(decoder *decoder, int layer, int role, const given_weight *given);
// Gives a layer experts. Its gates, ups and downs, if any, are then the expert that all rows use.
EXPORT void decoder_experts(decoder *decoder, int layer, const expert_sizes *sizes);
// As `decoder_load`; `expert` is used in roles of one expert.
EXPORT void decoder_load_expert(decoder *decoder, int layer, int role, int expert, const given_weight *given);
// Gives a layer a mixer: instead of attention with NO_ATTENTION, else added to it.
EXPORT void decoder_mixer(decoder *decoder, int layer, const mixer_sizes *sizes);
EXPORT void decoder_load_mixer(decoder *decoder, int layer, int role, const given_weight *given);
// Adds a LoRA adapter, which may have weights in some layers; returns its number, from 1 on. See lora.h.
EXPORT int decoder_adapter(decoder *decoder);
// Copies what it adds to a weight: `down` [rank, depth], `up` [columns, rank]; ranks are multiples of 16.
EXPORT void decoder_load_adapter(decoder *decoder, int adapter, int layer, int role, int rank, const float *down,
                                 const float *up);
EXPORT void decoder_free(decoder *decoder);

typedef struct {
    const int32_t *token_ids, *positions;  // [num_rows]
    const float *angles;                   // [positions, head_dim] cosines of the first half, then sines
    const float *other_angles;             // as `angles`, for layers with OTHER_ANGLES, or NULL
    const float *query_scales;             // [positions] factors of rotated queries, or NULL
    const row_group *groups;
    const sequence_steps *sequences;       // the same rows for layers with a mixer; NULL without any
    int32_t num_rows, num_groups, num_sequences, first_layer, end_layer;
    int32_t embeds;  // `state` starts as the tokens' embeddings
    float *state;   // [num_rows, hidden], or [num_rows, num_streams, hidden], passed between layers, for calls over some
                    // of the layers
    void *hidden;   // [num_rows, hidden] after the final norm, or NULL
    float *logits;  // [num_rows, vocab], or NULL; only with `hidden`
    void *queries;  // [layers of the call, num_rows, num_heads, head_dim] as they are multiplied with keys, or NULL
} forward_call;

EXPORT void decoder_forward(decoder *decoder, team *team, const forward_call *call);
// Number of experts used by all calls so far, each once per layer and call.
EXPORT int64_t decoder_experts_met(const decoder *decoder);
// Computes logits of hidden states from an earlier call.
EXPORT void decoder_head(decoder *decoder, team *team, int num_rows, const void *hidden, float *logits);

// ---- GRIFFIN's draft model before and after its decoder layer

typedef enum { FEATURE, TOKEN, FUSED } fusion_source;

typedef struct {
    int32_t element, hidden;
    int32_t num_parts, parts[2];  // inputs of the second fusion: each a `fusion_source`
    int32_t expansion;            // columns of the up-projector; 0: none
} griffin_sizes;

typedef enum { FUSE, EXPAND, CONTRACT, PREDICT, REGRESS, FIRST_PART_NORM, SECOND_PART_NORM } griffin_role;

typedef struct griffin griffin;
EXPORT griffin *griffin_new(const griffin_sizes *sizes);
EXPORT void griffin_load(griffin *griffin, int role, const given_weight *given);
EXPORT void griffin_free(griffin *griffin);
// From features and embeddings [num_rows, hidden] to the decoder layer's input, `state` [num_rows, hidden].
EXPORT void griffin_fuse(griffin *griffin, team *team, int num_rows, const void *features, const void *embeddings,
                         float *state);
// From the layer's output to predicted and regressed features [num_rows, hidden].
EXPORT void griffin_head(griffin *griffin, team *team, int num_rows, const float *state, void *predicted, void *regressed);
