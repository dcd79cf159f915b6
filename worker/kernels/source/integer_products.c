// Products of eight bits: weights are unpacked once for several rows, which stay in registers.
#include "integer_products.h"

#include <math.h>

#include "integers.h"
#include "quantized_part.h"

enum { DEPTH_OF_SLICE = 256, ROWS_OF_SLICE = 32 };  // of so much, all rows of a forward stay in the L1 cache
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
        for (int i = 0; i < ROW_PIECE; i++) piece.below[i / HALF_OF_PIECE] -= 32 * piece.numbers[i];
        piece.below[2] = piece.below[0] + piece.below[1];
        for (int i = 0; i < 3; i++) piece.scaled[i] = piece.scale * (float)(piece.below[i] / -32);
        pieces[k / ROW_PIECE] = piece;
    }
}

// Forms of weights: numbers from 0 to 15; of 4 bits in a table; of 6 bits; of 8 bits with and without sign.
typedef enum { FROM_0_TO_15, IN_TABLE, NARROW, SIGNED, UNSIGNED } weight_form;

static weight_form weight_form_of(const quantized_part *part) {
    if (part->is_narrow) return NARROW;
    if (part->code == CODE_INT8) return SIGNED;
    if (part->code == CODE_UINT8) return UNSIGNED;
    for (int i = 0; i < LANES; i++)
        if (part->whole_table[i] != i) return IN_TABLE;
    return FROM_0_TO_15;
}

#define IN_MEMORY(data) __asm__ volatile("" ::"r"(data) : "memory")  // from here on, LOAD_AGAIN holds for the data too

INLINE bool is_half(const weight_form form) { return form == FROM_0_TO_15 || form == IN_TABLE; }

// Unpacks two quads of 4 bits from `both`.
INLINE void unpack_two(const weight_form form, quads both, const int8_t *table, quads out[2]) {
    out[0] = quads_low(both);
    out[1] = quads_high(both);
    for (int i = 0; form == IN_TABLE && i < 2; i++) out[i] = quads_lookup(out[i], table);
}

// Adds a quad of weights, or two of NARROW, times the numbers of some rows at a place of their piece.
INLINE void add_quads(const int rows, const weight_form form, const quads *weights, const row_piece *const pieces[],
                      int place, sums_of_eight_bits sums[]) {
    const quads given = form == FROM_0_TO_15 || form == NARROW ? weights[0] : signed_weights(weights[0]);
    for (int r = 0; r < rows; r++) {
        const int8_t *numbers = pieces[r]->numbers + place;
        if (form == NARROW) sums[r] = add_narrow(sums[r], given, weights[1], numbers);
        else if (form == FROM_0_TO_15) sums[r] = add_small(sums[r], given, numbers);
        else sums[r] = add_signed(sums[r], given, numbers);
    }
}

// Adds the weights of `deep` k, times the numbers of some rows from `place` in their piece on.
INLINE void add_weights(const int rows, const weight_form form, const int deep, const bool is_few, const int8_t *table,
                        const uint8_t *codes, const row_piece *const pieces[], int place, sums_of_eight_bits sums[]) {
    const bool is_packed = is_few && is_half(form);
    const int step = is_packed || form == NARROW ? 2 : 1;
#pragma GCC unroll 8
    for (int i = 0; i < deep / QUAD; i += step) {
        quads weights[2];
        if (!is_few) LOAD_AGAIN();  // else all weights would be loaded first, and pushed out of the registers
        if (is_packed) unpack_two(form, quads_load(codes + i / 2 * QUADS_BYTES), table, weights);
        for (int j = 0; !is_packed && j < step; j++) weights[j] = quads_load(codes + (i + j) * QUADS_BYTES);
        add_quads(rows, form, weights, pieces, place + i * QUAD, sums);
        if (is_packed) add_quads(rows, form, weights + 1, pieces, place + (i + 1) * QUAD, sums);
    }
}

INLINE void unpack_piece(const weight_form form, const int deep, const int8_t *table, const uint8_t *codes, uint8_t *out) {
    for (int k = 0; k < deep; k += 2 * QUAD, codes += QUADS_BYTES, out += 2 * QUADS_BYTES) {
        quads weights[2];
        unpack_two(form, quads_load(codes), table, weights);
        memcpy(out, weights, sizeof weights);
    }
}

// Scales and offsets of a group in all columns.
typedef struct {
    vec scale, offset;
} group_scales;

// Weights of a piece, or of half of it, in a block.
typedef struct {
    const quantized_part *part;
    const uint8_t *codes;
    group_scales scales;
    int place;  // within a row's piece
} weights_of_piece;

// Adds to C the product of a piece with some rows.
INLINE void add_piece(const int rows, const weight_form form, const int deep, const bool is_few,
                      const weights_of_piece *piece, const char *from, long row_bytes, vec out[]) {
    const int which = deep == ROW_PIECE ? 2 : piece->place / HALF_OF_PIECE, place = deep == ROW_PIECE ? 0 : piece->place;
    const int shift = form == FROM_0_TO_15 ? 0 : form == NARROW ? 1 : form == UNSIGNED ? SIGNED_SHIFT - 4 : SIGNED_SHIFT;
    const int below = form == NARROW && piece->part->code == CODE_UINT8 ? 3 : which;
    const row_piece *pieces[MOST_INTEGER_ROWS];
    sums_of_eight_bits sums[MOST_INTEGER_ROWS];
    for (int r = 0; r < rows; r++) {
        pieces[r] = (const row_piece *)(from + r * row_bytes);
        sums[r] = everywhere(shift * pieces[r]->below[below]);
    }
    add_weights(rows, form, deep, is_few, piece->part->whole_table, piece->codes, pieces, place, sums);
    for (int r = 0; r < rows; r++) {
        vec sum = form == FROM_0_TO_15 ? small_end(sums[r]) : signed_end(sums[r]);
        out[r] = vec_fma(sum, vec_mul(piece->scales.scale, vec_set(pieces[r]->scale)), out[r]);
    }
    for (int r = 0; piece->part->has_offsets && r < rows; r++)
        out[r] = vec_fma(piece->scales.offset, vec_set(pieces[r]->scaled[which]), out[r]);
}

INLINE group_scales scales_at(const weight_form form, const quantized_part *part, const uint8_t *header, int group) {
    group_scales scales = {.scale = numbers_at(part, header, group)};
    if (form == IN_TABLE) scales.scale = vec_mul(scales.scale, vec_set(part->unit));
    if (part->has_offsets) scales.offset = numbers_at(part, header + part->header_bytes / 2, group);
    return scales;
}

// Some rows of A, and where their sums with a block go.
typedef struct {
    const char *rows;
    float *out;
    long row_bytes, out_stride;
    int num_rows;
} rows_of_8_bits;

#define ADD_TO_ROWS(NUM_ROWS)                                                                             \
    for (; NUM_ROWS <= MOST_INTEGER_ROWS && job->num_rows - r >= NUM_ROWS; r += NUM_ROWS)                 \
    add_piece(NUM_ROWS <= MOST_INTEGER_ROWS ? NUM_ROWS : 1, form, deep, false, piece, from + r * job->row_bytes, \
              job->row_bytes, out + r)

// Adds to sums the product of a piece, whose weights are unpacked once, with many rows.
INLINE void add_to_many(const weight_form form, const int deep, weights_of_piece *piece, const char *from,
                        const rows_of_8_bits *job, vec out[]) {
    uint8_t unpacked[ROW_PIECE * LANES];
    if (is_half(form)) {
        unpack_piece(form, deep, piece->part->whole_table, piece->codes, unpacked);
        IN_MEMORY(unpacked);
        piece->codes = unpacked;
    }
    int r = 0;
    ADD_TO_ROWS(8);
    ADD_TO_ROWS(4);
    ADD_TO_ROWS(2);
    ADD_TO_ROWS(1);
}

// Adds to C the product of a block, from k to `end` (whole stretches), with `rows` of A; 0: with all of many rows.
INLINE void multiply_slice(const int rows, const weight_form form, const int deep, quantized_block block, int k, int end,
                           const rows_of_8_bits *job) {
    const quantized_part *part = block.part;
    const int bytes = deep * LANES * code_bits(part->code) / 8, num_rows = rows ? rows : job->num_rows;
    const uint8_t *from = block.data + codes_at(part, k) - part->header_bytes;
    vec out[ROWS_OF_SLICE];
    for (int r = 0; r < num_rows; r++) out[r] = k ? vec_load(job->out + r * job->out_stride) : vec_set(0.0f);
    while (k < end) {
        const uint8_t *header = from;
        from += part->header_bytes;
        for (int group = 0; group < part->groups_together; group++) {
            group_scales scales = scales_at(form, part, header, group);
            for (int i = 0; i < part->group_size; i += deep, k += deep, from += bytes) {
                weights_of_piece piece = {part, from, scales, k % ROW_PIECE};
                const char *numbers = job->rows + k / ROW_PIECE * (long)sizeof(row_piece);
                for (int ahead = 0; ahead < bytes; ahead += CACHE_LINE)
                    __builtin_prefetch(from + READ_AHEAD + ahead, 0, 2);
                if (rows) add_piece(rows, form, deep, true, &piece, numbers, job->row_bytes, out);
                else add_to_many(form, deep, &piece, numbers, job, out);
            }
        }
    }
    for (int r = 0; r < num_rows; r++) vec_store(job->out + r * job->out_stride, out[r]);
}

#define SLICE_OF_ROWS(NUM_ROWS)                                                                                      \
    for (; NUM_ROWS <= MOST_INTEGER_ROWS && job.num_rows >= NUM_ROWS;                                                \
         job.num_rows -= NUM_ROWS, job.rows += NUM_ROWS * job.row_bytes, job.out += NUM_ROWS * job.out_stride)       \
    multiply_slice(NUM_ROWS <= MOST_INTEGER_ROWS ? NUM_ROWS : 1, form, deep, block, k, end, &job)

INLINE void multiply_rows(const weight_form form, const int deep, quantized_block block, int k, int end,
                          rows_of_8_bits job) {
    if (job.num_rows > MOST_INTEGER_ROWS) {
        multiply_slice(0, form, deep, block, k, end, &job);
        return;
    }
    SLICE_OF_ROWS(8);
    SLICE_OF_ROWS(4);
    SLICE_OF_ROWS(2);
    SLICE_OF_ROWS(1);
}

#define MULTIPLY_FORM(FORM)                                                                                  \
    case FORM:                                                                                               \
        if (block.part->group_size == HALF_OF_PIECE) multiply_rows(FORM, HALF_OF_PIECE, block, k, end, job); \
        else multiply_rows(FORM, ROW_PIECE, block, k, end, job);                                             \
        break

static void multiply_block(weight_form form, quantized_block block, int k, int end, rows_of_8_bits job) {
    switch (form) {
        MULTIPLY_FORM(FROM_0_TO_15);
        MULTIPLY_FORM(IN_TABLE);
        MULTIPLY_FORM(NARROW);
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
    for (int r = 0; r < rows; r += ROWS_OF_SLICE) {
        rows_of_8_bits job = {(const char *)a + r * row_bytes, NULL, row_bytes, ldc, rows - r < ROWS_OF_SLICE ? rows - r : ROWS_OF_SLICE};
        for (int k = 0; k < part->depth; k += step) {
            int end = part->depth - k < step ? part->depth : k + step;
            for (int n = 0; n < count; n++) {
                job.out = c + r * ldc + n * LANES;
                multiply_block(form, blocks[n], k, end, job);
            }
        }
    }
}
