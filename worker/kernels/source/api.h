// What Python sees. It checks every shape, and every number with `rows_fit`; nothing else here checks anything.
#pragma once
#include <stdbool.h>
#include <stdint.h>

#define EXPORT __attribute__((visibility("default")))
#define TAIL 64  // keys of a row's own, behind the prefix that it shares

typedef enum { BF16 = 0, F32 = 1 } element;
typedef enum { KV_PLAIN, KV_INT8, KV_E4M3 } kv_code;  // rows of a cache: elements, or codes of 8 bits: see kv_codes.h

// ---- this build

EXPORT const char *kernels_variant(void);  // the name of its instruction set
EXPORT int kernels_usable(void);           // whether the system lets this process use it

// ---- threads

typedef struct team team;
EXPORT team *team_new(int num_threads);  // the caller's own included; others start when there is work for them
EXPORT void team_free(team *team);       // waits for all of them
EXPORT int team_is_busy(team *team);     // whether a late helper may still read what past calls were given

// ---- the keys of a long text, as drafts see them: see scan.c

enum { SCAN_CHUNK = 1024, CLOUD_CHUNKS = 16 };  // keys that are coded at once; chunks whose moments are taken together

typedef struct {
    const void *cache;  // as that of a `row_group`, and so are its strides and codes
    int64_t layer_stride, value_stride, head_stride;
    const uint8_t *codes;   // [layers, num_kv_heads, most_chunks * SCAN_CHUNK / 64, head_dim / 4, 64]
    const float *means;     // [layers, num_kv_heads, most_chunks, head_dim] of the keys of a chunk
    const float *spreads;   // [layers, num_kv_heads, head_dim]: mean distance of keys from their mean
    const float *moments;   // [layers, num_kv_heads, most_clouds, 2 * head_dim * (head_dim + 1)]: means of keys and of
                            // values, then what keys and what values change with keys [head_dim, head_dim]
    int32_t first;          // slot of the first key that is coded
    int32_t num_chunks, most_chunks, most_clouds;
    int32_t num_best;       // keys that each query sees exactly
    float flat_deviation;   // of scores: a query below it sees no key exactly, since the best would weigh next to nothing
    int32_t kv_code;
} scanned_keys;

// ---- rows of one sequence that share a prefix

typedef struct {
    void *cache;  // key of head 0 at slot 0, in the first layer of the call; slots lie a row apart
    int64_t layer_stride, value_stride, head_stride;  // elements to the next layer, from key to value, to the next head;
                                                      // bytes where rows are codes
    const int32_t *tail_slots;                        // [num_rows, TAIL] in the order of positions
    const int32_t *tail_lengths;                      // [num_rows] from 1 to TAIL: how many of them are real
    const float *biases;                              // [boundary] added to the scores of the prefix's keys, or NULL
    const scanned_keys *scanned;                      // what the rows see beside prefix and tails, or NULL
    int32_t num_rows, first_slot;                     // the rows' own keys and values go to consecutive slots
    int32_t boundary;                                 // keys below it are the prefix; a multiple of 64
    int32_t capacity;                                 // slots of the cache
    int32_t is_partial;                               // slots are no positions, so that no window tells what is seen
    int32_t kv_code;                                  // of the cache's rows
} row_group;

// Whether all numbers of a call stay within their caches, the vocabulary and the positions.
EXPORT int rows_fit(const row_group *groups, int num_groups, const int32_t *token_ids, const int32_t *positions,
                    int vocab, int num_positions);

// ---- attention of one layer

typedef struct {
    int32_t element, num_heads, num_kv_heads, head_dim;
    float scale;
} attention_sizes;

// What the rows of a layer see of the keys up to their own, and what becomes of scores.
typedef struct {
    int32_t window;      // keys that a row sees, the last of them its own; 0 for all
    float softcap;       // scores become softcap * tanh(score / softcap); 0 for none
    const float *sinks;  // [num_heads] scores that take a share and give nothing, or NULL
} attention_view;

// Takes one chunk of keys and values in: means, spreads (with the first chunk), moments and codes.
EXPORT void scan_take_in(team *team, const attention_sizes *sizes, const scanned_keys *keys, int num_layers, int chunk);

// Stores the rows' keys and values and attends: queries, output [num_rows, num_heads, head_dim], keys, values
// [num_rows, num_kv_heads, head_dim].
EXPORT void attend(team *team, const attention_sizes *sizes, const attention_view *view, const row_group *groups,
                   int num_groups, const void *queries, const void *keys, const void *values, void *output);

// ---- layers with a state in place of keys and values: see recurrence.c

enum { MOST_STATE_ROWS = 128 };

typedef struct {
    int32_t num_rows, num_heads, num_key_heads, key_dim, value_dim;  // MOST_STATE_ROWS at most; whole vectors of values
    int32_t num_decays;          // of a head: 1, or key_dim where each of a state's rows has its own
    const int32_t *parents;      // [num_rows] the row that each one goes on from, in front of it; -1 - i for states[i]
    const float *const *states;  // each [num_heads, key_dim, value_dim]
    const float *queries, *keys;  // [num_rows, num_key_heads, key_dim]
    const float *values;          // [num_rows, num_heads, value_dim]
    const float *betas;           // [num_rows, num_heads] shares of what a state lacks of a value; NULL: all of a value
    const float *decays;          // [num_rows, num_heads, num_decays]
    float *updates, *found;       // [num_rows, num_heads, value_dim]
} recurrence;

// Takes the rows' steps; each finds what its query gives with the state behind it.
EXPORT void recurrence_rows(team *team, const recurrence *call);
// Each layer's state becomes its call's states[0] behind the steps of keys, updates and decays, in order; of any number.
// It may be that state.
EXPORT void recurrence_fold(team *team, const recurrence *calls, float *const *states, int num_layers);

typedef struct {
    void *rows;
    int64_t row_bytes;
} kept_rows;

// Moves rows first + chosen[0], first + chosen[1] and so on, in the order in which they lie, to first, first + 1...
EXPORT void rows_keep(const kept_rows *buffers, int num_buffers, int first, const int32_t *chosen, int count);

// ---- layers that mix a row with those in front of it by a state or a convolution: see mixers.c

typedef enum { DELTA_NET, STATE_SPACE, CONVOLUTION } mixer_form;  // STATE_SPACE: Mamba-2

typedef struct {
    int32_t form, num_heads, num_key_heads, key_dim, value_dim;  // no heads in a CONVOLUTION
    int32_t num_channels, conv_width;                           // of the convolution in front of the state
    int32_t norm_width;     // neighbours of what is found that are normed together; 0 for no norm
    float epsilon;          // of this norm
    float least_step, most_step;  // of STATE_SPACE
    float in_scale, out_scale;    // of what the mixer reads and of what it gives; mostly 1
} mixer_sizes;

typedef enum {
    MIX_INPUTS,   // of the convolution, behind it queries, keys, values; in STATE_SPACE values, keys, queries
    MIX_GATES,    // of what is found
    MIX_BETAS,    // DELTA_NET: [num_heads]; CONVOLUTION: [num_channels] gates of the inputs
    MIX_STEPS,    // [num_heads] what decays depend on
    MIX_OUTPUT,   // from what is found to the row; those from here on are floats, whatever the element
    MIX_TAPS,     // [conv_width, num_channels] of the convolution
    MIX_TAP_BIAS, MIX_RATES, MIX_STEP_BIAS, MIX_SKIP, MIX_NORM,
    MIX_SCALES     // of the columns of all roles up to MIX_STEPS, one role behind the other
} mixer_role;

// The last steps of one sequence in one layer, by their positions behind a boundary.
typedef struct {
    void *inputs;  // [conv_width - 1 + steps, num_channels] of the element, those in front of the boundary first
    float *keys, *updates, *decays;  // [steps, num_key_heads, key_dim], [steps, num_heads, value_dim], [steps, num_heads]
    const float *state;              // [num_heads, key_dim, value_dim] in front of the rows
} layer_steps;

// Consecutive rows of one sequence, MOST_STATE_ROWS at most.
typedef struct {
    const layer_steps *layers;  // of all layers with a mixer
    const int32_t *parents;     // [num_rows] as those of a `recurrence`; -1 for the state
    const int32_t *before;      // [num_rows, conv_width - 1] the steps in front of each row, from 1 - conv_width on
    int32_t num_rows, first_step;
} sequence_steps;

// ---- rows of weights in 8 or 4 bits

typedef enum { CODE_TABLE, CODE_INT8, CODE_UINT8, CODE_E4M3 } code_type;  // the first of 4 bits
typedef enum { SCALE_F16, SCALE_BF16, SCALE_F32 } scale_type;

// They stand for table[code] * scale + offset, rounded once to the element of who takes them in.
typedef struct {
    const uint8_t *codes;          // [rows, depth], of 4 bits [rows, depth / 2] with the first of two in the low half
    const void *scales, *offsets;  // [rows, depth / group_size]; offsets or NULL
    const float *table;            // of the numbers of all codes
    int32_t code, scale_type;
    int32_t group_size;  // neighbours along the depth that share a scale: even, of 4 bits a multiple of 8
} quantized_rows;

// ---- a dense decoder

typedef enum {
    ROUNDED_TWICE, ROUNDED_ONCE,  // before the weight and after it; after it alone
    ONE_MORE,                     // as the latter, with one added to the weight
    CENTRED,                      // as ROUNDED_ONCE, of the distances from the mean
    SHIFTED                       // as CENTRED, with biases, which lie behind the weights
} norm_form;
typedef enum { SILU, GELU_TANH, RELU2, XIELU } activation;

typedef struct {
    int32_t element, num_layers, hidden, num_heads, num_kv_heads, head_dim, intermediate, vocab;
    int32_t norm_form, activation, has_gates;
    int32_t joins_heads;   // norms of queries and keys go over all heads of a row together
    int32_t norms_turned;  // they stand behind the rotation of each head
    int32_t is_parallel;   // the products of a layer read what its attention reads
    int32_t head_norms_differ;  // each head of a layer has weights of its own in its norm
    int32_t gates_heads;  // what attention finds is multiplied by the sigmoids of gates
    // Latent attention: see latent.h. The first number is 0 where there is none; else a head of the cache has `head_dim`
    // numbers: the latent vector, and behind it what is turned of the keys.
    int32_t latent_rank, query_rank;  // numbers of a latent vector; of one of queries, 0 where these have none
    int32_t still_dim, value_dim;     // of a head's query, what is not turned; of its values
    float epsilon, scale;  // of the norms; of the scores
    float embedding_scale, residual_scale, logit_scale;  // of embeddings, of what layers add, of logits; mostly 1
    float score_cap, logit_cap;  // as `attention_view.softcap`: of all layers; of logits, behind their scale
    float attention_in_scale, key_scale, attention_out_scale;  // of what attention reads, of keys before they are turned,
                                                               // and of what attention gives; mostly 1
    float gate_scale, down_scale;  // of gates before their activation, and of what products give; mostly 1
} decoder_sizes;

typedef enum {
    SOFTMAX_OF_ALL, SIGMOID,  // of the logits of all experts
    SOFTMAX_OF_CHOSEN,        // experts are chosen by their logits
    SIGMOID_OF_CHOSEN,        // likewise
    SPARSE_MIXER  // likewise; each weight is a softmax over the experts that are left and near enough, by `jitter`
} router_score;

enum { MOST_EXPERTS = 1024 };  // of a layer

typedef struct {
    int32_t num_experts, num_chosen, intermediate;  // of a layer; of a row; columns of an expert
    int32_t shared_intermediate;                    // columns of the part that all rows meet; 0 for none
    int32_t latent;                                 // numbers of a row that experts read and give; 0 for all of the row's
    int32_t score, num_groups, num_chosen_groups;   // experts are chosen from the groups whose best are the best:
    int32_t num_best_of_group;                      // so many of each together
    int32_t is_normalised;                          // weights are divided by their sum
    int32_t rounds_logits, rounds_weights;          // to bf16, in models of it
    float least_sum, scale;                         // that weights are divided by; that multiplies them
    float jitter;                                   // of SPARSE_MIXER
    float gate_limit, gate_slope;  // gates and ups stay within the limit, and a gate's share is of the slope; 0 for neither
} expert_sizes;

typedef enum {
    EMBEDDING, FINAL_NORM, HEAD,  // of the model: their layer is 0
    INPUT_NORM, QUERY, KEY, VALUE, QUERY_NORM, KEY_NORM, OUTPUT, OUTPUT_NORM, MLP_NORM, GATE, UP, DOWN, DOWN_NORM,
    STILL,  // no weight: the layer turns no heads by their positions
    WINDOW,  // an int32: `attention_view.window` of the layer
    OTHER_ANGLES,  // no weight: the layer turns heads by `forward_call.other_angles`
    CURVE,  // four floats: what XIELU has of this layer
    SINKS,   // floats: `attention_view.sinks` of the layer
    HEAD_GATE,     // of what its attention finds
    NO_ATTENTION,  // no weight: the layer does not attend
    NO_PRODUCTS,   // no weight: it has none behind its attention or its mixer
    QUERY_DOWN, KEY_UP, VALUE_UP  // of latent attention: see latent.h
} weight_role;

typedef enum {
    ROUTER, CHOICE_BIAS, SHARED_GATE,    // floats, whatever the element
    EXPERT_GATE, EXPERT_UP, EXPERT_DOWN,  // of one expert
    LATENT_IN, LATENT_OUT                 // from a row to what experts read, and from their sum back to a row
} expert_role;

typedef struct decoder decoder;
EXPORT decoder *decoder_new(const decoder_sizes *sizes);
// Takes a weight in, row by row as torch has it, and a bias or NULL. All are copied but for the embedding, packed or not.
EXPORT void decoder_load(decoder *decoder, int layer, int role, const void *weight, const void *bias);
// The same for a matrix of 8 or 4 bits, which stays so.
EXPORT void decoder_load_quantized(decoder *decoder, int layer, int role, const quantized_rows *weight, const void *bias);
// Makes a layer one with experts. Its gates, ups and downs, if it has any, are then the part that all rows meet.
EXPORT void decoder_experts(decoder *decoder, int layer, const expert_sizes *sizes);
// As `decoder_load`; the number of the expert counts where the role is of one.
EXPORT void decoder_load_expert(decoder *decoder, int layer, int role, int expert, const void *weight, const void *bias);
EXPORT void decoder_load_quantized_expert(decoder *decoder, int layer, int role, int expert,
                                          const quantized_rows *weight, const void *bias);
// Gives a layer a mixer: in place of attention where it has NO_ATTENTION, else beside it, and both are added.
EXPORT void decoder_mixer(decoder *decoder, int layer, const mixer_sizes *sizes);
EXPORT void decoder_load_mixer(decoder *decoder, int layer, int role, const void *weight, const void *bias);
EXPORT void decoder_load_quantized_mixer(decoder *decoder, int layer, int role, const quantized_rows *weight,
                                         const void *bias);
EXPORT void decoder_free(decoder *decoder);

typedef struct {
    const int32_t *token_ids, *positions;  // [num_rows]; token_ids NULL where the call begins behind the embedding
    const float *angles;                   // [rows, head_dim] cosines of the first half, then sines; rows by `positions`
    const float *other_angles;             // as `angles`, of layers that turn otherwise, or NULL where none does
    const float *query_scales;             // [rows by `positions`] of turned queries, or NULL
    const row_group *groups;
    const sequence_steps *sequences;       // the rows once more, of layers with a mixer; NULL where none has one
    int32_t num_rows, num_groups, num_sequences, first_layer, end_layer;
    float *state;   // [num_rows, hidden] what goes from layer to layer, for calls over some of the layers
    void *hidden;   // [num_rows, hidden] behind the final norm, or NULL
    float *logits;  // [num_rows, vocab], or NULL; with `hidden` alone
    void *queries;  // [layers of the call, num_rows, num_heads, head_dim] as they meet the keys, or NULL
} forward_call;

EXPORT void decoder_forward(decoder *decoder, team *team, const forward_call *call);
// The experts that rows of all calls so far met, each once in a layer of a call.
EXPORT int64_t decoder_experts_met(const decoder *decoder);
// Logits of hidden states that an earlier call gave.
EXPORT void decoder_head(decoder *decoder, team *team, int num_rows, const void *hidden, float *logits);

// ---- GRIFFIN's draft model in front of its decoder layer and behind it

typedef enum { FEATURE, TOKEN, FUSED } fusion_source;

typedef struct {
    int32_t element, hidden;
    int32_t num_parts, parts[2];  // what is fused once more: each a `fusion_source`
    int32_t expansion;            // columns of the up-projector; 0 for none
} griffin_sizes;

typedef enum { FUSE, EXPAND, CONTRACT, PREDICT, REGRESS, FIRST_PART_NORM, SECOND_PART_NORM } griffin_role;

typedef struct griffin griffin;
EXPORT griffin *griffin_new(const griffin_sizes *sizes);
// Takes a weight and its bias in (NULL for none), as `decoder_load` does.
EXPORT void griffin_load(griffin *griffin, int role, const void *weight, const void *bias);
EXPORT void griffin_free(griffin *griffin);
// From features and embeddings [num_rows, hidden] to what goes into the decoder layer, `state` [num_rows, hidden].
EXPORT void griffin_fuse(griffin *griffin, team *team, int num_rows, const void *features, const void *embeddings,
                         float *state);
// From what comes out of the layer to predicted and regressed features [num_rows, hidden].
EXPORT void griffin_head(griffin *griffin, team *team, int num_rows, const float *state, void *predicted, void *regressed);
