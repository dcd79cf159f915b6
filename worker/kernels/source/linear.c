// Products of rows and weights, in panels of columns that helpers may take.
#include "linear.h"

#include <stdlib.h>

#include "elementwise.h"
#include "integer_products.h"
#include "packing.h"
#include "weights_memory.h"

enum { ROWS_AT_ONCE = 128, DEPTH_AT_ONCE = 1024, LEAST_BLOCKS = 8, BLOCKS_AT_ONCE = 8, LINEAR_WORTH_HELP = 1 << 19 };

static long packed_depth(const matrix *matrix) {
    return matrix->element == BF16 ? round_up(matrix->depth, BF16_DEPTH) : matrix->depth;
}

static operand operand_of(const matrix *matrix, int block, int first_k) {
    long depth = packed_depth(matrix), start = block * depth * LANES + (long)first_k * LANES;
    if (matrix->element == BF16) return (operand){(bf16 *)matrix->packed + start, depth * LANES, 2 * LANES, PAIRS, NULL, 0};
    return (operand){(float *)matrix->packed + start, depth * LANES, LANES, ROWS_F32, NULL, 0};
}

matrix matrix_new(element element, int depth, int columns) {
    return (matrix){.depth = depth, .columns = (int)round_up(columns, LANES), .element = element};
}

void matrix_free(matrix *matrix) {
    weights_give_back(matrix->packed);
    free(matrix->quantized);
    quantized_free(matrix->parts);
    free(matrix->bias);
}

static void *packed_new(const matrix *matrix) {
    size_t count = (size_t)packed_depth(matrix) * (size_t)matrix->columns;
    return weights_take(count * (matrix->element == BF16 ? 2 : 4));
}

void matrix_pack(matrix *matrix, int block, const void *rows, int count) {
    if (!matrix->packed) matrix->packed = packed_new(matrix);
    if (matrix->quantized) matrix->quantized[block].part = NULL;
    int row_bytes = matrix->depth * (matrix->element == BF16 ? 2 : 4);
    const char *sources[LANES];
    char *nothing = count < LANES ? allocate_clear((size_t)row_bytes) : NULL;
    for (int i = 0; i < LANES; i++) sources[i] = i < count ? (const char *)rows + (long)i * row_bytes : nothing;
    transpose(sources, row_bytes / 4, (uint32_t *)operand_of(matrix, block, 0).data);
    free(nothing);
}

void matrix_bias(matrix *matrix, int first_column, int count, const void *bias) {
    if (!matrix->bias) matrix->bias = allocate_clear(sizeof(float) * (size_t)matrix->columns);
    for (int i = 0; i < count; i++) {
        uint32_t bits = matrix->element == BF16 ? (uint32_t)((const bf16 *)bias)[i] << 16 : ((const uint32_t *)bias)[i];
        memcpy(&matrix->bias[first_column + i], &bits, sizeof bits);
    }
}

int block_of(columns_kind kind, int row, int count) {
    int turn = row / TURN * TURN, left = (int)round_up(count - turn, LANES), wide = left < TURN ? left : TURN;
    if (kind == ALONE) return row / LANES;
    return (2 * turn + (kind == SECOND_IN_TURN ? wide : 0) + row - turn) / LANES;
}

static void load_bias(matrix *matrix, int first_block, columns_kind kind, int count, const void *bias) {
    int bytes = matrix->element == BF16 ? 2 : 4;
    for (int row = 0; bias && row < count; row += LANES) {
        int column = (first_block + block_of(kind, row, count)) * LANES, left = count - row < LANES ? count - row : LANES;
        matrix_bias(matrix, column, left, (const char *)bias + (long)row * bytes);
    }
}

static void load_numbers(matrix *matrix, int first_block, columns_kind kind, int count, const void *weight) {
    int bytes = matrix->element == BF16 ? 2 : 4;
    for (int row = 0; row < count; row += LANES) {
        int block = first_block + block_of(kind, row, count), left = count - row < LANES ? count - row : LANES;
        matrix_pack(matrix, block, (const char *)weight + (long)row * matrix->depth * bytes, left);
    }
}

static void load_quantized(matrix *matrix, int first_block, columns_kind kind, int count, const quantized_rows *weight) {
    int num_blocks = (count + LANES - 1) / LANES;
    if (!matrix->quantized)
        matrix->quantized = allocate_clear(sizeof(quantized_block) * (size_t)(matrix->columns / LANES));
    quantized_block *blocks = allocate_clear(sizeof(quantized_block) * (size_t)num_blocks);
    matrix->parts = quantized_new(weight, matrix->depth, count, matrix->element, blocks, matrix->parts);
    matrix->has_integers |= quantized_takes_integers(blocks);
    for (int i = 0; i < num_blocks; i++) matrix->quantized[first_block + block_of(kind, i * LANES, count)] = blocks[i];
    free(blocks);
}

void matrix_load(matrix *matrix, int first_block, columns_kind kind, int count, const given_weight *given) {
    if (given->quantized) load_quantized(matrix, first_block, kind, count, given->quantized);
    else load_numbers(matrix, first_block, kind, count, given->numbers);
    load_bias(matrix, first_block, kind, count, given->bias);
}

void vector_load(float **vector, int element, int count, const void *weight) {
    free(*vector);
    *vector = malloc(sizeof(float) * (size_t)count);
    load(element, weight, count, *vector);
}

void floats_load(float **vector, int count, const void *numbers) {
    free(*vector);
    *vector = malloc(sizeof(float) * (size_t)count);
    memcpy(*vector, numbers, sizeof(float) * (size_t)count);
}

// ---- products

static bool uses_bf16_products(const matrix *matrix) { return HAS_BF16_PRODUCTS && matrix->element == BF16; }

static size_t number_bytes(const matrix *matrix) {
    return uses_bf16_products(matrix) ? sizeof(bf16) * (size_t)packed_depth(matrix) : sizeof(float) * (size_t)matrix->depth;
}

// An odd multiple of APART is between rows: a slice of their pieces else falls on the same lines of a cache.
enum { APART = 512 };

size_t multiplied_bytes(const matrix *matrix) {
    if (!matrix->has_integers) return number_bytes(matrix);
    size_t bytes = number_bytes(matrix) + (size_t)matrix->depth / ROW_PIECE * sizeof(row_piece);
    return bytes / APART % 2 ? bytes / APART * APART + 2 * APART : bytes / APART * APART + APART;
}

// As bf16, padded with zeros to the packed depth, where products take it. Then in 8 bits if some blocks take these.
void multiplied_row(const matrix *matrix, const float *row, void *out) {
    bf16 *narrowed = out;
    if (matrix->has_integers) integer_row(row, matrix->depth, (row_piece *)((char *)out + number_bytes(matrix)));
    if (!uses_bf16_products(matrix)) {
        memcpy(out, row, number_bytes(matrix));
        return;
    }
    for (int k = 0; k < matrix->depth; k += LANES) vec_store_bf16(narrowed + k, vec_load(row + k));
    memset(narrowed + matrix->depth, 0, sizeof(bf16) * (size_t)(packed_depth(matrix) - matrix->depth));
}

// Multiplies a part of the depth of up to BLOCKS_AT_ONCE blocks, and prefetches the next part or blocks.
static void multiply_part(const matrix *matrix, int first, int blocks, int k, int count, int num_rows, const void *rows,
                          float *out, long stride) {
    long lda = (long)multiplied_bytes(matrix);
    bool is_bf16 = uses_bf16_products(matrix), is_last = k + count == (is_bf16 ? packed_depth(matrix) : matrix->depth);
    long bytes = matrix->element == BF16 ? 2 : 4;
    operand right = operand_of(matrix, first, k);
    operand next = operand_of(matrix, is_last ? first + blocks : first, is_last ? 0 : k + count);
    const void *ahead[BLOCKS_AT_ONCE];
    for (int n = 0; n < blocks; n++) ahead[n] = (const char *)next.data + n * next.block * bytes;
    right.ahead = ahead;
    right.ahead_bytes = count * LANES * bytes;
    if (is_bf16) gemm_bf16(num_rows, blocks, count, (const bf16 *)rows + k, lda / 2, right, out, stride, k > 0);
    else gemm_f32(num_rows, blocks, count, (const float *)rows + k, lda / 4, right, out, stride, k > 0);
}

static void multiply_packed(const matrix *matrix, int first, int blocks, int num_rows, const void *rows, float *out,
                            long stride) {
    int depth = (int)(uses_bf16_products(matrix) ? packed_depth(matrix) : matrix->depth);
    for (int n = 0; n < blocks; n += BLOCKS_AT_ONCE) {
        int wide = blocks - n < BLOCKS_AT_ONCE ? blocks - n : BLOCKS_AT_ONCE;
        for (int k = 0; k < depth; k += DEPTH_AT_ONCE) {
            int count = depth - k < DEPTH_AT_ONCE ? depth - k : DEPTH_AT_ONCE;
            multiply_part(matrix, first + n, wide, k, count, num_rows, rows, out + n * LANES, stride);
        }
    }
}

void multiply_panel(const matrix *matrix, int first, int blocks, int num_rows, const void *rows, float *out, long stride,
                    void *scratch) {
    const quantized_block *quantized = matrix->quantized;
    const char *integers = (const char *)rows + number_bytes(matrix);
    long row_bytes = (long)multiplied_bytes(matrix), lda = row_bytes / (uses_bf16_products(matrix) ? 2 : 4);
    for (int n = 0, count; n < blocks; n += count, first += count, out += count * LANES) {
        int left = matrix->columns / LANES - first;
        count = quantized ? quantized_alike(quantized + first, blocks - n) : blocks;
        if (quantized && quantized_takes_integers(quantized + first))
            integer_multiply(quantized + first, count, num_rows, integers, row_bytes, out, stride);
        else if (quantized && quantized[first].part)
            quantized_multiply(quantized + first, count, left - count, num_rows, rows, lda, out, stride, scratch);
        else multiply_packed(matrix, first, count, num_rows, rows, out, stride);
    }
}

void finish_panel(const matrix *matrix, int first, int blocks, int num_rows, float *out, long stride, bool rounds) {
    if (!matrix->bias && !rounds) return;
    for (int row = 0; row < num_rows; row++)
        for (int i = 0; i < blocks * LANES; i += LANES) {
            float *place = out + row * stride + i;
            vec sum = vec_load(place);
            if (matrix->bias) sum = vec_add(sum, vec_load(matrix->bias + first * LANES + i));
            vec_store(place, rounds ? vec_round_bf16(sum) : sum);
        }
}

// ---- all rows and columns

typedef struct {
    const matrix *matrix;
    const void *rows;
    float *out;
    long out_stride;
    int num_rows, blocks;
} panel_job;

static void run_panel(const void *job, int unit, void *slot, void *scratch) {
    const panel_job *all = job;
    int first = unit * all->blocks, left = all->matrix->columns / LANES - first;
    int blocks = left < all->blocks ? left : all->blocks;
    float *out = slot ? slot : all->out + (long)first * LANES;
    long stride = slot ? (long)all->blocks * LANES : all->out_stride;
    multiply_panel(all->matrix, first, blocks, all->num_rows, all->rows, out, stride, scratch);
}

// Returns rows as products take them, which read up to sixteen at once.
static const void *narrow(frame *frame, const matrix *matrix, int num_rows, const float *rows) {
    if (!uses_bf16_products(matrix) && !matrix->has_integers) return rows;
    size_t bytes = multiplied_bytes(matrix);
    char *narrowed = frame_take(frame, bytes * (size_t)round_up(num_rows, LANES));
    for (long row = 0; row < num_rows; row++)
        multiplied_row(matrix, rows + row * matrix->depth, narrowed + (size_t)row * bytes);
    return narrowed;
}

static void fetch_panel(const panel_job *job, int unit, const float *slot) {
    int first = unit * job->blocks, left = job->matrix->columns / LANES - first;
    size_t bytes = sizeof(float) * LANES * (size_t)(left < job->blocks ? left : job->blocks);
    for (int row = 0; row < job->num_rows; row++)
        memcpy(job->out + row * job->out_stride + first * LANES, slot + (long)row * job->blocks * LANES, bytes);
}

static void some_rows(frame *frame, const matrix *matrix, int num_rows, const float *rows, float *out, long stride) {
    int all_blocks = matrix->columns / LANES, least = (all_blocks + MOST_UNITS - 1) / MOST_UNITS;
    panel_job job = {.matrix = matrix,
                     .rows = narrow(frame, matrix, num_rows, rows),
                     .out = out,
                     .out_stride = stride,
                     .num_rows = num_rows,
                     .blocks = (int)round_up(least, LEAST_BLOCKS)};
    stage_plan plan = {.num_units = (all_blocks + job.blocks - 1) / job.blocks,
                       .run = run_panel,
                       .job = &job,
                       .job_bytes = sizeof job,
                       .scratch_bytes = matrix->quantized ? quantized_scratch_bytes() : 0,
                       .slot_bytes = sizeof(float) * (size_t)num_rows * (size_t)job.blocks * LANES,
                       .is_small = (num_rows + 4L) * matrix->depth * matrix->columns < LINEAR_WORTH_HELP};
    void *results[MOST_UNITS];
    run_stage(frame, &plan, results);
    for (int unit = 0; unit < plan.num_units; unit++)
        if (results[unit]) fetch_panel(&job, unit, results[unit]);
}

void linear_sums(frame *frame, const matrix *matrix, int num_rows, const float *rows, float *out, long stride) {
    for (int first = 0; first < num_rows; first += ROWS_AT_ONCE) {
        int count = num_rows - first < ROWS_AT_ONCE ? num_rows - first : ROWS_AT_ONCE;
        some_rows(frame, matrix, count, rows + (long)first * matrix->depth, out + first * stride, stride);
    }
}

void linear(frame *frame, const matrix *matrix, int num_rows, const float *rows, float *out, long stride, bool rounds) {
    linear_sums(frame, matrix, num_rows, rows, out, stride);
    finish_panel(matrix, 0, matrix->columns / LANES, num_rows, out, stride, rounds);
}
