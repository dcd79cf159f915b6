// Blocks of 64 by 64 for causal attention: packing and products.
//
// Three layouts of bf16. Rows: [64][64]. Words: the transpose, as the right side of a product: [16 columns together][32
// pairs of the depth][16 columns][2]. Pairs: the same of rows that are themselves the depth.
#pragma once
#include "causal.h"
#include "packing.h"

#if HAS_CAUSAL_ATTENTION
enum { SIDE = 64, AREA = SIDE * SIDE, PAIRS_DEEP = SIDE / 2 };
enum { STRIPES = SIDE / LANES, STRIPE = 2 * LANES * PAIRS_DEEP };  // of sixteen columns: number, and elements of each
enum { TILE_HEIGHT = 4 };                                          // rows of sums in registers, four stripes each

typedef vec sums[TILE_HEIGHT][STRIPES];

// ---- packing

INLINE bf16 *row_at(const strided_heads *heads, int batch, int head, int position) {
    long element = batch * heads->batch_stride + head * heads->head_stride + position * heads->position_stride;
    return (bf16 *)heads->first + element;
}

// Query heads per key head.
INLINE int group_of(const causal_call *call) { return call->num_heads / call->num_kv_heads; }

// Whether one thread finishes the call before another would wake.
INLINE bool is_small_call(const causal_call *call) {
    long num_keys = call->num_before + call->length;
    long scores = num_keys * call->length * call->num_heads * call->batch_size;
    return scores < 1L << 17;
}

// Factor from products to scores to base 2.
INLINE float score_scale(const causal_call *call) { return call->scaling * 1.44269504088896341f; }

// Blocks of keys before the first query's own.
INLINE int blocks_before(const causal_call *call) { return call->num_before / SIDE; }

// Number of real rows in a block.
INLINE int rows_in_block(const causal_call *call, int block) {
    int left = call->length - block * SIDE;
    return left < SIDE ? left : SIDE;
}

// Copies `count` rows of a block, and zeros after them.
static void gather(const strided_heads *from, int batch, int head, int block, int count, bf16 *rows) {
    const bf16 *row = row_at(from, batch, head, block * SIDE);
    for (int i = 0; i < count; i++, row += from->position_stride)
        for (int d = 0; d < SIDE; d += 2 * LANES) _mm512_storeu_si512(rows + i * SIDE + d, _mm512_loadu_si512(row + d));
    memset(rows + count * SIDE, 0, sizeof(bf16) * SIDE * (size_t)(SIDE - count));
}

// Copies a block of queries, with zeros after the last position.
static void gather_rows(const causal_call *call, const strided_heads *from, int batch, int head, int block,
                        bf16 *rows) {
    gather(from, batch, head, block, rows_in_block(call, block), rows);
}

// Copies a block of keys or values, counted from the first key.
static void gather_keys(const causal_call *call, const strided_heads *from, int batch, int head, int block,
                        bf16 *rows) {
    int own = block - blocks_before(call);
    gather(from, batch, head, block, own < 0 ? SIDE : rows_in_block(call, own), rows);
}

static void scatter_rows(const causal_call *call, const bf16 *rows, const strided_heads *to, int batch, int head,
                         int block) {
    for (int i = 0; i < rows_in_block(call, block); i++)
        memcpy(row_at(to, batch, head, block * SIDE + i), rows + i * SIDE, sizeof(bf16) * SIDE);
}

INLINE void turn_words(const bf16 *from, long from_stride, bf16 *to, long to_stride) {
    __m512i words[LANES];
    for (int i = 0; i < LANES; i++) words[i] = _mm512_loadu_si512(from + i * from_stride);
    transpose_registers(words);
    for (int i = 0; i < LANES; i++) _mm512_storeu_si512(to + i * to_stride, words[i]);
}

static void words_of_rows(const bf16 *rows, bf16 *words) {
    for (int i = 0; i < 2 * STRIPES; i++)
        turn_words(rows + i / 2 * LANES * SIDE + i % 2 * 2 * LANES, SIDE, words + i * STRIPE / 2, 2 * LANES);
}

// Converts words back to rows.
static void rows_of_words(const bf16 *words, bf16 *rows) {
    for (int i = 0; i < 2 * STRIPES; i++)
        turn_words(words + i * STRIPE / 2, 2 * LANES, rows + i / 2 * LANES * SIDE + i % 2 * 2 * LANES, SIDE);
}

static void pairs_of_rows(const bf16 *rows, bf16 *pairs) {
    for (int i = 0; i < PAIRS_DEEP; i++)
        for (int n = 0; n < STRIPES; n++) {
            const bf16 *first = rows + 2 * i * SIDE + n * LANES;
            interleave(first, first + SIDE, LANES, pairs + n * STRIPE + i * 2 * LANES);
        }
}

// ---- rounding

// Rounds two vectors to thirty-two neighbours.
INLINE void store_rounded(bf16 *to, vec first, vec second) {
    _mm512_storeu_si512(to, (__m512i)_mm512_cvtne2ps_pbh(second, first));
}

// Rounds two vectors to sixteen pairs of one number each.
INLINE void store_pairs(bf16 *to, vec first, vec second) {
    const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6,
                                           21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    _mm512_storeu_si512(to, _mm512_permutexvar_epi16(order, (__m512i)_mm512_cvtne2ps_pbh(second, first)));
}

// Transposes sums [64][64], times factors[i] in column i, rounded to rows. `words` is scratch for a block.
static void turn_rounded(const float *from, const float *factors, bf16 *words, bf16 *rows) {
    for (int n = 0; n < STRIPES; n++) {
        vec factor = vec_load(factors + n * LANES);
        for (int i = 0; i < PAIRS_DEEP; i++) {
            const float *place = from + 2 * i * SIDE + n * LANES;
            store_pairs(words + n * STRIPE + i * 2 * LANES, vec_mul(vec_load(place), factor),
                        vec_mul(vec_load(place + SIDE), factor));
        }
    }
    rows_of_words(words, rows);
}

// ---- products

INLINE void clear(sums sum) {
    for (int r = 0; r < TILE_HEIGHT; r++)
        for (int n = 0; n < STRIPES; n++) sum[r][n] = vec_set(0.0f);
}

// Adds the product of four rows with a block in words or pairs.
INLINE void add_product(const bf16 *rows, const bf16 *right, sums sum) {
    for (int k = 0; k < PAIRS_DEEP; k++, rows += 2, right += 2 * LANES) {
        __m512i columns[STRIPES];
        for (int n = 0; n < STRIPES; n++) columns[n] = _mm512_loadu_si512(right + n * STRIPE);
        for (int r = 0; r < TILE_HEIGHT; r++) {
            int32_t pair;
            memcpy(&pair, rows + r * SIDE, sizeof pair);
            __m512bh left = (__m512bh)_mm512_set1_epi32(pair);
            for (int n = 0; n < STRIPES; n++) sum[r][n] = _mm512_dpbf16_ps(sum[r][n], left, (__m512bh)columns[n]);
        }
    }
}

// Adds the product of two blocks to `to` [64][64], after multiplying its columns by `shrink`.
INLINE void add_block(const bf16 *rows, const bf16 *right, const vec *shrink, float *to) {
    for (int first = 0; first < SIDE; first += TILE_HEIGHT) {
        sums sum;
        float *place = to + first * SIDE;
        for (int r = 0; r < TILE_HEIGHT; r++)
            for (int n = 0; n < STRIPES; n++) {
                sum[r][n] = vec_load(place + r * SIDE + n * LANES);
                if (shrink) sum[r][n] = vec_mul(sum[r][n], shrink[n]);
            }
        add_product(rows + first * SIDE, right, sum);
        for (int r = 0; r < TILE_HEIGHT; r++)
            for (int n = 0; n < STRIPES; n++) vec_store(place + r * SIDE + n * LANES, sum[r][n]);
    }
}

// Mask of the queries of a stripe that see a key, in a block on the diagonal.
INLINE __mmask16 seen_by(int key, int stripe) {
    int hidden = key - stripe * LANES;  // queries before the key
    return hidden <= 0 ? 0xffff : hidden >= LANES ? 0 : (__mmask16)(0xffff << hidden);
}
#endif
