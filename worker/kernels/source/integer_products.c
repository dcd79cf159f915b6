// Products of eight bits: weights are unpacked once for several rows, which stay in registers.
#include "integer_products.h"

#include <math.h>

#include "integers.h"
#include "quantized_part.h"

enum { DEPTH_OF_SLICE = 1024 };  // of so much, all rows of a forward stay in the caches
#define LEAST_MAGNITUDE 1e-30f   // below it a piece counts as zeros

// Returns the largest magnitude; larger than all numbers are infinity and NaN.
static float largest_of(const float *numbers) {
    uint32_t largest = 0;
    for (int i = 0; i < ROW_PIECE; i++) {
        uint32_t bits;
        memcpy(&bits, numbers + i, sizeof bits);
        bits &= 0x7fffffff;
        if (bits > largest) largest = bits;
    }
    float magnitude;
    memcpy(&magnitude, &largest, sizeof magnitude);
    return magnitude;
}

// Rounds to nearest even.
static void round_piece(const float *numbers, float factor, int8_t *out) {
    for (int i = 0; i < ROW_PIECE; i++) {
        float whole = numbers[i] * factor + ROUNDER;
        int32_t bits;
        memcpy(&bits, &whole, sizeof bits);
        out[i] = (int8_t)bits;
    }
}

void integer_row(const float *row, int depth, row_piece *pieces) {
    for (int k = 0; k < depth; k += ROW_PIECE) {
        row_piece piece = {.scale = 0.0f};
        float largest = largest_of(row + k);
        if (!(largest <= LEAST_MAGNITUDE)) {
            piece.scale = largest < INFINITY ? largest / 127.0f : NAN;
            if (largest < INFINITY) round_piece(row + k, 127.0f / largest, piece.numbers);
        }
        for (int i = 0; i < ROW_PIECE; i++) piece.sums[i / HALF_OF_PIECE] += piece.numbers[i];
        for (int i = 0; i < 2; i++) piece.scaled[i] = piece.scale * (float)piece.sums[i];
        piece.scaled[2] = piece.scale * (float)(piece.sums[0] + piece.sums[1]);
        pieces[k / ROW_PIECE] = piece;
    }
}

// Forms of weights: numbers from 0 to 15; of 4 bits in a table; from -32 to 31; of 8 bits with and without sign.
typedef enum { FROM_0_TO_15, IN_TABLE, NARROW_SIGNED, SIGNED, UNSIGNED } weight_form;

static weight_form weight_form_of(const quantized_part *part) {
    if (part->code == CODE_INT8) return part->is_narrow ? NARROW_SIGNED : SIGNED;
    if (part->code == CODE_UINT8) return UNSIGNED;
    for (int i = 0; i < LANES; i++)
        if (part->whole_table[i] != i) return IN_TABLE;
    return FROM_0_TO_15;
}

// Adds a quad of weights, times the numbers of all rows at a place of their piece.
INLINE void add_quad(const int rows, const weight_form form, quads weights, const row_piece *const pieces[], int place,
                     sums_of_eight_bits sums[]) {
    if (form != FROM_0_TO_15) weights = signed_weights(weights);
    for (int r = 0; r < rows; r++) {
        const int8_t *numbers = pieces[r]->numbers + place;
        sums[r] = form == FROM_0_TO_15 ? add_small(sums[r], weights, numbers) : add_signed(sums[r], weights, numbers);
    }
}

// Adds `deep` k from `place` in a piece on.
INLINE void add_quads(const int rows, const weight_form form, const int deep, const int8_t *table, const uint8_t *codes,
                      const row_piece *const pieces[], int place, sums_of_eight_bits sums[]) {
    const bool is_half = form == FROM_0_TO_15 || form == IN_TABLE;
#pragma GCC unroll 4
    for (int k = 0; form == NARROW_SIGNED && k < deep; k += 2 * QUAD, codes += 2 * QUADS_BYTES) {
        quads first = quads_load(codes), second = quads_load(codes + QUADS_BYTES);
        for (int r = 0; r < rows; r++) sums[r] = add_narrow(sums[r], first, second, pieces[r]->numbers + place + k);
    }
#pragma GCC unroll 8
    for (int k = 0; form != NARROW_SIGNED && k < deep; k += is_half ? 2 * QUAD : QUAD, codes += QUADS_BYTES) {
        quads both = quads_load(codes), low = is_half ? quads_low(both) : both;
        add_quad(rows, form, form == IN_TABLE ? quads_lookup(low, table) : low, pieces, place + k, sums);
        if (!is_half) continue;
        quads high = quads_high(both);
        add_quad(rows, form, form == IN_TABLE ? quads_lookup(high, table) : high, pieces, place + k + QUAD, sums);
    }
}

// Scales and offsets of a group in all columns.
typedef struct {
    vec scale, offset;
} group_scales;

// Adds the product of `deep` k from `place` on: a piece, or half of it.
INLINE void add_piece(const int rows, const weight_form form, const int deep, const quantized_part *part,
                      const group_scales *scales, const uint8_t *codes, const row_piece *const pieces[], int place,
                      vec out[]) {
    const int which = deep == ROW_PIECE ? 2 : place / HALF_OF_PIECE;
    sums_of_eight_bits sums[MOST_INTEGER_ROWS];
    for (int r = 0; r < rows; r++) {
        const int32_t *halves = pieces[r]->sums;
        int32_t of_row = deep == ROW_PIECE ? halves[0] + halves[1] : halves[which];
        sums[r] = form == FROM_0_TO_15 || form == NARROW_SIGNED ? small_begin() : signed_begin(of_row);
        if (form == UNSIGNED) sums[r] = add_everywhere(sums[r], 128 * of_row);
        if (form == NARROW_SIGNED) sums[r] = add_everywhere(sums[r], -32 * of_row);
    }
    add_quads(rows, form, deep, part->whole_table, codes, pieces, place, sums);
    for (int r = 0; r < rows; r++) {
        vec sum = form == FROM_0_TO_15 ? small_end(sums[r]) : signed_end(sums[r]);
        out[r] = vec_fma(sum, vec_mul(scales->scale, vec_set(pieces[r]->scale)), out[r]);
        if (part->has_offsets) out[r] = vec_fma(scales->offset, vec_set(pieces[r]->scaled[which]), out[r]);
    }
}

INLINE group_scales scales_at(const weight_form form, const quantized_part *part, const uint8_t *header, int group) {
    group_scales scales = {.scale = numbers_at(part, header, group)};
    if (form == IN_TABLE) scales.scale = vec_mul(scales.scale, vec_set(part->unit));
    if (part->has_offsets) scales.offset = numbers_at(part, header + part->header_bytes / 2, group);
    return scales;
}

// Some rows of A, and where their sums go.
typedef struct {
    const char *rows;
    float *out;
    long row_bytes, out_stride;
} some_rows_of_8_bits;

// Adds to C, or begins it at k = 0, the product of rows and of a block from k to `end`, whole stretches.
INLINE void multiply_slice(const int rows, const weight_form form, const int deep, quantized_block block, int k, int end,
                           const some_rows_of_8_bits *job) {
    const quantized_part *part = block.part;
    const int bits = code_bits(part->code);
    const uint8_t *from = block.data + codes_at(part, k) - part->header_bytes;
    vec out[MOST_INTEGER_ROWS];
    for (int r = 0; r < rows; r++) out[r] = k ? vec_load(job->out + r * job->out_stride) : vec_set(0.0f);
    while (k < end) {
        const uint8_t *header = from;
        from += part->header_bytes;
        for (int group = 0; group < part->groups_together; group++) {
            group_scales scales = scales_at(form, part, header, group);
            for (int i = 0; i < part->group_size; i += deep, k += deep, from += deep * LANES * bits / 8) {
                const row_piece *pieces[MOST_INTEGER_ROWS];
                for (int r = 0; r < rows; r++)
                    pieces[r] = (const row_piece *)(job->rows + r * job->row_bytes) + k / ROW_PIECE;
                for (int ahead = 0; ahead < deep * LANES * bits / 8; ahead += CACHE_LINE)
                    __builtin_prefetch(from + READ_AHEAD + ahead, 0, 2);
                add_piece(rows, form, deep, part, &scales, from, pieces, deep == ROW_PIECE ? 0 : k % ROW_PIECE, out);
            }
        }
    }
    for (int r = 0; r < rows; r++) vec_store(job->out + r * job->out_stride, out[r]);
}

#define SLICE_OF_ROWS(NUM_ROWS)                                                                             \
    for (; NUM_ROWS <= MOST_INTEGER_ROWS && num_rows - r >= NUM_ROWS; r += NUM_ROWS)                        \
    multiply_slice(NUM_ROWS <= MOST_INTEGER_ROWS ? NUM_ROWS : 1, form, deep, block, k, end,                 \
                   &(some_rows_of_8_bits){job->rows + r * job->row_bytes, job->out + r * job->out_stride, \
                                          job->row_bytes, job->out_stride})

INLINE void multiply_rows(const weight_form form, const int deep, quantized_block block, int num_rows, int k, int end,
                          const some_rows_of_8_bits *job) {
    int r = 0;
    SLICE_OF_ROWS(8);
    SLICE_OF_ROWS(4);
    SLICE_OF_ROWS(2);
    SLICE_OF_ROWS(1);
}

#define MULTIPLY_FORM(FORM)                                                              \
    case FORM:                                                                           \
        if (block.part->group_size == HALF_OF_PIECE) multiply_rows(FORM, HALF_OF_PIECE, block, num_rows, k, end, job); \
        else multiply_rows(FORM, ROW_PIECE, block, num_rows, k, end, job);                        \
        break

static void multiply_block(weight_form form, quantized_block block, int num_rows, int k, int end,
                           const some_rows_of_8_bits *job) {
    switch (form) {
        MULTIPLY_FORM(FROM_0_TO_15);
        MULTIPLY_FORM(IN_TABLE);
        MULTIPLY_FORM(NARROW_SIGNED);
        MULTIPLY_FORM(SIGNED);
        MULTIPLY_FORM(UNSIGNED);
    }
}

void integer_multiply(const quantized_block *blocks, int count, int rows, const void *a, long row_bytes, float *c,
                      long ldc) {
    const quantized_part *part = blocks[0].part;
    weight_form form = weight_form_of(part);
    int stretch = part->group_size * part->groups_together;
    int step = rows <= MOST_INTEGER_ROWS ? part->depth : (int)round_up(DEPTH_OF_SLICE, stretch);
    for (int k = 0; k < part->depth; k += step) {
        int end = part->depth - k < step ? part->depth : k + step;
        for (int n = 0; n < count; n++)
            multiply_block(form, blocks[n], rows, k, end,
                           &(some_rows_of_8_bits){a, c + n * LANES, row_bytes, ldc});
    }
}
