// For `python -m bench kernels` only: the machine's peak rates, and a single matrix product.
#include <stdlib.h>

#include "linear.h"

#if defined(__AVX512F__)
enum { SUMS = 12 };  // enough to keep every unit busy, and few enough for the registers
#elif defined(__AVX2__)
enum { SUMS = 6 };
#else
enum { SUMS = 3 };
#endif
enum { STREAMS = 4, TILES = 4, TILE_OPERATIONS = 2 * 16 * 16 * 32 };

static volatile float sink;  // keeps results from being optimised away

static void keep(const vec *sums, int count) {
    for (int i = 1; i < count; i++) sink = vec_sum(vec_add(sums[0], sums[i]));
}

// Reads `count` floats, a multiple of 64, `repeats` times.
EXPORT void roof_read(const float *memory, int64_t count, int64_t repeats) {
    vec sums[STREAMS];
    for (int i = 0; i < STREAMS; i++) sums[i] = vec_set(0.0f);
    for (int64_t repeat = 0; repeat < repeats; repeat++)
        for (int64_t start = 0; start < count; start += STREAMS * LANES)
            for (int i = 0; i < STREAMS; i++) sums[i] = vec_add(sums[i], vec_load(memory + start + i * LANES));
    keep(sums, STREAMS);
}

static double multiply_floats(int64_t rounds) {
    volatile float unknown = 0.5f;  // to the compiler
    vec sums[SUMS], factor = vec_set(unknown);
    for (int i = 0; i < SUMS; i++) sums[i] = vec_set((float)i);
    for (int64_t round = 0; round < rounds; round++)
        for (int i = 0; i < SUMS; i++) sums[i] = vec_fma(factor, sums[i], factor);
    keep(sums, SUMS);
    return (double)rounds * SUMS * LANES * 2;
}

#if defined(__AMX_BF16__)
static double multiply_bf16(int64_t rounds) {
    machine_begin();
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    _tile_zero(4);
    _tile_zero(5);
    for (int64_t round = 0; round < rounds; round++) {
        _tile_dpbf16ps(0, 4, 5);
        _tile_dpbf16ps(1, 4, 5);
        _tile_dpbf16ps(2, 4, 5);
        _tile_dpbf16ps(3, 4, 5);
    }
    machine_end();
    return (double)rounds * TILES * TILE_OPERATIONS;
}
#elif HAS_BF16_PRODUCTS
static double multiply_bf16(int64_t rounds) {
    volatile float unknown = 0.5f;
    vec sums[SUMS], factor = vec_set(unknown);
    for (int i = 0; i < SUMS; i++) sums[i] = vec_set((float)i);
    for (int64_t round = 0; round < rounds; round++)
        for (int i = 0; i < SUMS; i++) sums[i] = _mm512_dpbf16_ps(sums[i], (__m512bh)factor, (__m512bh)factor);
    keep(sums, SUMS);
    return (double)rounds * SUMS * LANES * 4;
}
#else
static double multiply_bf16(int64_t rounds) { return multiply_floats(rounds); }
#endif

// Multiplies and adds in registers only; returns the number of floating-point operations.
EXPORT double roof_multiply(element element, int64_t rounds) {
    return element == BF16 ? multiply_bf16(rounds) : multiply_floats(rounds);
}

// Makes a matrix of a weight [columns, depth], both multiples of 16.
EXPORT matrix *roof_matrix_new(element element, int depth, int columns, const void *weight) {
    matrix *fresh = malloc(sizeof *fresh);
    if (!fresh) abort();
    *fresh = matrix_new(element, depth, columns);
    long block_bytes = (long)LANES * depth * (element == BF16 ? 2 : 4);
    for (int block = 0; block < columns / LANES; block++)
        matrix_pack(fresh, block, (const char *)weight + block * block_bytes, LANES);
    return fresh;
}

// Makes a matrix of a quantized weight [columns, depth], with any number of columns.
EXPORT matrix *roof_matrix_quantized(element element, int depth, int columns, const quantized_rows *weight) {
    matrix *fresh = malloc(sizeof *fresh);
    if (!fresh) abort();
    *fresh = matrix_new(element, depth, columns);
    matrix_load(fresh, 0, ALONE, columns, &(given_weight){.quantized = weight});
    return fresh;
}

EXPORT void roof_matrix_free(matrix *matrix) {
    matrix_free(matrix);
    free(matrix);
}

// out [num_rows, columns] = rows [num_rows, depth] times the matrix.
EXPORT void roof_linear(team *team, const matrix *matrix, int num_rows, const float *rows, float *out) {
    frame *frame = frame_open(team);
    linear(frame, matrix, num_rows, rows, out, matrix->columns, false);
    frame_close(frame);
}
