// Products with weights of 8 or 4 bits, unpacked in registers for few rows and into a panel for many.
#include "quantized_part.h"

typedef struct {
    vec scale[2], offset[2];
} group_numbers;

INLINE codebook book_of(const quantized_part *part) { return (codebook){vec_load(part->table), part->table, part->whole_table}; }

// Spreads numbers to the lanes of both vectors of a step.
INLINE void spread_lanes(const int fate, vec numbers, vec out[2]) {
#if HAS_BF16_PRODUCTS
    if (fate == PAIRED) {
        __m512i first = _mm512_srli_epi32(_mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0), 1);
        out[0] = _mm512_permutexvar_ps(first, numbers);
        out[1] = _mm512_permutexvar_ps(_mm512_add_epi32(first, _mm512_set1_epi32(LANES / 2)), numbers);
        return;
    }
#endif
    (void)fate;
    out[0] = out[1] = numbers;
}

// Rounds a number to bf16, to nearest even: 8 of its 24 digits stay. Holds for zeros and from 2^-126 up to 2^110
// (Veltkamp's splitting; in sums of this width ties come out even).
INLINE vec round_weight(vec a) {
    vec spread = vec_mul(a, vec_set(0x1p16f + 1));
    return vec_sub(spread, vec_sub(spread, a));
}

// Without offsets, -0 is added, which changes no bit, not even the sign of a zero.
INLINE group_numbers numbers_of_group(const int code, const int fate, const quantized_part *part,
                                      const uint8_t *header, int group) {
    group_numbers numbers;
    vec scale = numbers_at(part, header, group);
    if (code == CODE_E4M3) scale = vec_mul(scale, vec_set(E4M3_UNIT));
    if (code == CODE_TABLE && HAS_WHOLES) scale = vec_mul(scale, vec_set(part->unit));
    spread_lanes(fate, scale, numbers.scale);
    const uint8_t *offsets = header + part->header_bytes / 2;
    spread_lanes(fate, part->has_offsets ? numbers_at(part, offsets, group) : vec_set(-0.0f), numbers.offset);
    return numbers;
}

INLINE void next_weights(const int code, const int fate, codebook book, const group_numbers *group, const uint8_t *from,
                         const int step, words held[2], vec out[2]) {
    unpack(code, book, from, step, held, out);
    for (int i = 0; i < 2; i++) {
        out[i] = vec_fma(out[i], group->scale[i], group->offset[i]);
        if (fate == ROUNDED) out[i] = round_weight(out[i]);
    }
}

// ---- few rows

// Multiplies two k of `weights` with all rows of A, whose numbers are `offset` bytes after `a`.
INLINE void add_step(const int fate, const int rows, const vec weights[2], const char *const a[MOST_FEW_ROWS],
                     long offset, vec sums[MOST_FEW_ROWS]) {
#if HAS_BF16_PRODUCTS
    if (fate == PAIRED) {
        __m512bh pairs = _mm512_cvtne2ps_pbh(weights[1], weights[0]);
        for (int r = 0; r < rows; r++) {
            int32_t left;
            memcpy(&left, a[r] + offset, sizeof left);
            sums[r] = _mm512_dpbf16_ps(sums[r], (__m512bh)_mm512_set1_epi32(left), pairs);
        }
        return;
    }
#endif
    (void)fate;
    for (int i = 0; i < 2; i++)
        for (int r = 0; r < rows; r++)
            sums[r] = vec_fma(vec_set(((const float *)(a[r] + offset))[i]), weights[i], sums[r]);
}

typedef struct {
    const quantized_block *blocks;
    const char *rows;  // A
    float *out;        // C
    long row_bytes, out_stride;
    int num_blocks, num_rows;
} few_job;

// What stays in registers or changes with every step.
typedef struct {
    vec sums[MOST_FEW_BLOCKS][MOST_FEW_ROWS];
    const uint8_t *headers, *from;  // of all interleaved blocks
    const char *a[MOST_FEW_ROWS];
    long offset;  // from `a`
    long ahead;   // prefetch distance from `from`, in bytes
} few_state;

// `num_rows` may be less than `rows`: missing rows repeat the last one.
INLINE void begin_few(const int rows, const int count, const few_job *job, int block, few_state *state) {
    int last = job->num_rows - 1;
    for (int r = 0; r < rows; r++) state->a[r] = job->rows + (r < last ? r : last) * job->row_bytes;
    for (int n = 0; n < count; n++)
        for (int r = 0; r < rows; r++) state->sums[n][r] = vec_set(0.0f);
    state->from = job->blocks[block].data;
    state->offset = 0;
    state->ahead = job->blocks[block].place ? 0 : READ_AHEAD;  // the first block prefetches for all interleaved ones
}

INLINE void ask_ahead(const few_state *state, const long bytes) {
    for (long i = 0; i < bytes; i += CACHE_LINE) __builtin_prefetch(state->from + state->ahead + i, 0, 2);
}

// `group` is its index in the stretch; `first` is the first interleaved block.
INLINE void add_group(const int rows, const int count, const int code, const int fate, codebook book,
                      const quantized_block *first, int group, few_state *state) {
    const int step_bytes = fate == PAIRED ? 4 : 8, span = span_of(code, fate), bytes = span_bytes(code, fate);
    // place and number of interleaved blocks, constants for MOST_ABREAST
    const int place = count == MOST_ABREAST ? 0 : first->place, abreast = count == MOST_ABREAST ? count : first->num_abreast;
    const quantized_part *part = first->part;
    group_numbers groups[MOST_FEW_BLOCKS];
    if (group == 0) {
        state->headers = state->from + place * part->header_bytes;
        ask_ahead(state, MOST_ABREAST * part->header_bytes);
        state->from += abreast * part->header_bytes;
    }
    for (int n = 0; n < count; n++)
        groups[n] = numbers_of_group(code, fate, part, state->headers + n * part->header_bytes, group);
    for (int i = 0; i < part->group_size; i += span) {
        const uint8_t *from = state->from + place * bytes;
        words held[MOST_FEW_BLOCKS][2];
        ask_ahead(state, MOST_ABREAST * bytes);
#pragma GCC unroll 4
        for (int step = 0; step < span / 2; step++, state->offset += step_bytes) {
#if defined(__AVX512F__)
            LOAD_AGAIN();
#endif
            for (int n = 0; n < count; n++) {
                vec weights[2];
                next_weights(code, fate, book, &groups[n], from + n * bytes, step, held[n], weights);
                add_step(fate, rows, weights, state->a, state->offset, state->sums[n]);
            }
        }
        state->from += abreast * bytes;
    }
}

// Interleaved blocks, side by side.
INLINE void few_rows(const int rows, const int count, const int code, const int fate, const few_job *job, int block) {
    const quantized_part *part = job->blocks[block].part;
    codebook book = book_of(part);
    few_state state;
    begin_few(rows, count, job, block, &state);
    for (int k = 0; k < part->depth;)
        for (int group = 0; group < part->groups_together; group++, k += part->group_size)
            add_group(rows, count, code, fate, book, &job->blocks[block], group, &state);
    const vec nothing[2] = {vec_set(0.0f), vec_set(0.0f)};  // matrices of floats have these after their depth
    for (int k = part->depth; fate == PAIRED && k % BF16_DEPTH; k += 2, state.offset += 4)
        for (int n = 0; n < count; n++) add_step(fate, rows, nothing, state.a, state.offset, state.sums[n]);
    for (int r = 0; r < rows && r < job->num_rows; r++)
        for (int n = 0; n < count; n++)
            vec_store(job->out + r * job->out_stride + (block + n) * LANES, state.sums[n][r]);
}

#define FEW_ROWS_TIMES(NUM_ROWS, NUM_BLOCKS)            \
    for (; end - block >= NUM_BLOCKS; block += NUM_BLOCKS) \
    few_rows(NUM_ROWS, NUM_BLOCKS, code, fate, job, block)

// Multiplies interleaved blocks up to `end`.
INLINE void multiply_abreast(const int code, const int fate, const few_job *job, int block, int end) {
#if defined(__AVX512F__)
    if (job->num_rows > 4) {
        FEW_ROWS_TIMES(8, 2);
        FEW_ROWS_TIMES(8, 1);
    } else if (job->num_rows > 2) {
        FEW_ROWS_TIMES(4, 2);
        FEW_ROWS_TIMES(4, 1);
    } else if (job->num_rows == 2) {
        FEW_ROWS_TIMES(2, 4);
        FEW_ROWS_TIMES(2, 1);
    } else {
        FEW_ROWS_TIMES(1, 4);
    }
#elif defined(__AVX2__)
    if (job->num_rows > 2) {
        FEW_ROWS_TIMES(4, 1);
    } else if (job->num_rows == 2) {
        FEW_ROWS_TIMES(2, 1);
    }
#endif
    FEW_ROWS_TIMES(1, 1);
}

INLINE void multiply_few(const int code, const int fate, const few_job *job) {
    for (int block = 0, end; block < job->num_blocks; block = end) {
        end = block + job->blocks[block].num_abreast - job->blocks[block].place;
        if (end > job->num_blocks) end = job->num_blocks;
        multiply_abreast(code, fate, job, block, end);
    }
}

// ---- many rows

INLINE void *store_step(const int fate, const vec weights[2], void *out) {
#if HAS_BF16_PRODUCTS
    if (fate == PAIRED) {
        _mm512_storeu_si512(out, (__m512i)_mm512_cvtne2ps_pbh(weights[1], weights[0]));
        return (bf16 *)out + 2 * LANES;
    }
#endif
    (void)fate;
    vec_store(out, weights[0]);
    vec_store((float *)out + LANES, weights[1]);
    return (float *)out + 2 * LANES;
}
// Unpacks `count` k from `first` on, which may be within a group.
INLINE void fill_panel(const int code, const int fate, quantized_block block, int first, int count, void *out) {
    const quantized_part *part = block.part;
    const int span = span_of(code, fate), bytes = span_bytes(code, fate);
    const long abreast = block.num_abreast;
    codebook book = book_of(part);
    for (int k = first, end; k < first + count; k = end) {
        int group = k / part->group_size, together = part->groups_together;
        const uint8_t *from = block.data + abreast * codes_at(part, k) + block.place * bytes;
        const uint8_t *header = block.data + abreast * (group / together) * part->stretch_bytes + block.place * part->header_bytes;
        group_numbers numbers = numbers_of_group(code, fate, part, header, group % together);
        end = (group + 1) * part->group_size;
        if (end > first + count) end = first + count;
        for (int i = k; i < end; i += span, from += abreast * bytes) {
            words held[2];
#pragma GCC unroll 4
            for (int step = 0; step < span / 2; step++) {
                vec weights[2];
                next_weights(code, fate, book, &numbers, from, step, held, weights);
                out = store_step(fate, weights, out);
            }
        }
    }
    const vec nothing[2] = {vec_set(0.0f), vec_set(0.0f)};
    for (int k = first + count; fate == PAIRED && k % BF16_DEPTH; k += 2) out = store_step(fate, nothing, out);
}

// Finds what to prefetch: the next part of the depth in these blocks, or the start of the next ones. Each interleaved
// block prefetches its share.
static void find_ahead(const quantized_block *blocks, int count, int behind, int k, long bytes,
                       const void *ahead[PANEL_BLOCKS]) {
    for (int n = 0; n < count; n++) {
        const quantized_block *block = &blocks[n], *next = &blocks[count + n];
        long start = k < block->part->depth ? block->num_abreast * codes_at(block->part, k) : 0;
        if (k >= block->part->depth && n < behind && next->part) block = next;
        ahead[n] = block->data + start + block->place * bytes;
    }
}

INLINE void multiply_many(const int code, const int fate, const quantized_block *blocks, int count, int behind,
                          int rows, const char *a, long lda, float *c, long ldc, char *panel) {
    const quantized_part *part = blocks[0].part;
    const int k_bytes = fate == PAIRED ? 2 : 4, depth = part->depth;
    const void *ahead[PANEL_BLOCKS];
    operand right = {panel, PANEL_DEPTH * LANES, LANES, ROWS_F32, ahead, 0};
    if (fate == PAIRED) right.step = 2 * LANES, right.layout = PAIRS;
    for (int k = 0; k < depth; k += PANEL_DEPTH) {
        int deep = depth - k < PANEL_DEPTH ? depth - k : PANEL_DEPTH;
        for (int n = 0; n < count; n++) fill_panel(code, fate, blocks[n], k, deep, panel + n * right.block * k_bytes);
        right.ahead_bytes = codes_at(part, PANEL_DEPTH) - codes_at(part, 0);
        find_ahead(blocks, count, behind, k + deep, right.ahead_bytes, ahead);
        const void *left = a + (long)k * k_bytes;
        if (fate == PAIRED) gemm_bf16(rows, count, (int)round_up(deep, BF16_DEPTH), left, lda, right, c, ldc, k > 0);
        else gemm_f32(rows, count, deep, left, lda, right, c, ldc, k > 0);
    }
}

// ---- all

size_t quantized_scratch_bytes(void) { return sizeof(float) * PANEL_BLOCKS * PANEL_DEPTH * LANES; }

INLINE void multiply(const int code, const int fate, const quantized_block *blocks, int count, int behind, int rows,
                     const char *a, long lda, float *c, long ldc, void *scratch) {
#if defined(__AMX_BF16__)
    const bool has_few = fate != PAIRED;  // tiles sum in an order of their own
#else
    const bool has_few = true;
#endif
    if (has_few && rows <= MOST_FEW_ROWS) {
        few_job job = {.blocks = blocks,
                       .rows = a,
                       .out = c,
                       .row_bytes = lda * (fate == PAIRED ? 2 : 4),
                       .out_stride = ldc,
                       .num_blocks = count,
                       .num_rows = rows};
        multiply_few(code, fate, &job);
        return;
    }
    for (int n = 0; n < count; n += PANEL_BLOCKS) {
        int wide = count - n < PANEL_BLOCKS ? count - n : PANEL_BLOCKS;
        int follow = count - n - wide + behind;
        multiply_many(code, fate, blocks + n, wide, follow, rows, a, lda, c + n * LANES, ldc, scratch);
    }
}

#define MULTIPLY(CODE, FATE)                                                        \
    case CODE * 3 + FATE:                                                           \
        multiply(CODE, FATE, blocks, count, behind, rows, a, lda, c, ldc, scratch);         \
        break

bool quantized_takes_integers(const quantized_block *block) { return block->part && block->part->fate == AS_INTEGERS; }

void quantized_multiply(const quantized_block *blocks, int count, int behind, int rows, const void *a, long lda,
                        float *c, long ldc, void *scratch) {
    enum { NARROW = HAS_BF16_PRODUCTS ? PAIRED : ROUNDED };
    switch (blocks[0].part->code * 3 + blocks[0].part->fate) {
        MULTIPLY(CODE_TABLE, NARROW);
        MULTIPLY(CODE_TABLE, EXACT);
        MULTIPLY(CODE_INT8, NARROW);
        MULTIPLY(CODE_INT8, EXACT);
        MULTIPLY(CODE_UINT8, NARROW);
        MULTIPLY(CODE_UINT8, EXACT);
        MULTIPLY(CODE_E4M3, NARROW);
        MULTIPLY(CODE_E4M3, EXACT);
#if !defined(__AVX512F__)
        MULTIPLY(CODE_LINEAR, NARROW);
        MULTIPLY(CODE_LINEAR, EXACT);
#endif
    }
}
