// Weights of 8 or 4 bits: repacked once, unpacked in registers for few rows and into a panel for many.
#include "quantized.h"

#include <limits.h>
#include <math.h>
#include <stdlib.h>

#include "threads.h"
#include "unpack.h"
#include "weights_memory.h"

#if defined(__AVX512F__)
enum { MOST_FEW_ROWS = 8, MOST_FEW_BLOCKS = 4 };
#else
enum { MOST_FEW_ROWS = 1, MOST_FEW_BLOCKS = 1 };
#endif
enum { PANEL_BLOCKS = 4, PANEL_DEPTH = 256, MOST_ABREAST = MOST_FEW_BLOCKS };
enum { READ_AHEAD = 8192, CACHE_LINE = 64 };  // bytes
enum { TOGETHER = 8 };  // groups that may share a float unit, of which their scales are small multiples

// What becomes of two vectors of numbers. PAIRED: the first eight columns, then the others, two k of each side by side;
// else all columns at one k, then at the next.
typedef enum { PAIRED, ROUNDED, EXACT } fate;

// Along the depth there are stretches: each has headers, with scales and offsets of a block's groups, then codes.
struct quantized_part {
    uint8_t *data;
    long block_bytes, stretch_bytes, header_bytes;  // of one block
    int depth, group_size, code, scale_type;
    int groups_together;  // per stretch: 1, or TOGETHER if these share a float unit
    bool has_offsets;
    fate fate;
    float table[256];
    quantized_part *next;
    const quantized_part *like;  // the matrix's first part with the same layout, maybe itself
};

// ---- taking in

static fate fate_of(element element) { return element == F32 ? EXACT : HAS_BF16_PRODUCTS ? PAIRED : ROUNDED; }

static int scale_bytes(int type) { return type == SCALE_F32 ? 4 : 2; }

// Returns the bytes of a stretch's scales, or offsets, in all lanes: of several groups a float unit and multiples.
static long scales_bytes(const quantized_part *part) {
    int groups = part->groups_together;
    return LANES * (groups > 1 ? (long)sizeof(float) + groups : scale_bytes(part->scale_type));
}

// Returns which column (and which of two k) a lane of the first or second vector of a step holds.
static int column_of(bool is_paired, int lane, int vector) { return is_paired ? lane / 2 + vector * LANES / 2 : lane; }
static int k_of(bool is_paired, int lane, int vector) { return is_paired ? lane % 2 : vector; }

static uint32_t common_divisor(uint32_t a, uint32_t b) {
    while (b) {
        uint32_t rest = a % b;
        a = b;
        b = rest;
    }
    return a;
}

// Splits a float into an odd number and the returned power of two; 0 has odd number 0 and any power.
static int odd_part(float number, uint32_t *odd) {
    uint32_t bits;
    memcpy(&bits, &number, sizeof bits);
    int exponent = bits >> 23 & 255;
    uint32_t digits = (bits & 0x7fffff) | (exponent ? 1u << 23 : 0);
    int zeros = digits ? __builtin_ctz(digits) : 0;
    *odd = digits >> zeros;
    return (exponent ? exponent : 1) - 150 + zeros;
}

// Returns a unit of which TOGETHER floats are exactly small multiples, and writes these; 0 if there is none.
static float two_levels(const float floats[TOGETHER], int8_t wholes[TOGETHER]) {
    uint32_t odd[TOGETHER], divisor = 0;
    int power[TOGETHER], least = INT_MAX;
    bool has_minus_zero = false;
    for (int i = 0; i < TOGETHER; i++) {
        power[i] = odd_part(floats[i], &odd[i]);
        if (odd[i] && power[i] < least) least = power[i];
        has_minus_zero |= floats[i] == 0.0f && signbit(floats[i]);
    }
    for (int i = 0; i < TOGETHER; i++) {
        if (odd[i] && power[i] - least > 7) return 0.0f;
        if (odd[i]) divisor = common_divisor(odd[i] << (power[i] - least), divisor);
    }
    float unit = divisor ? ldexpf((float)divisor, least) : 1.0f;
    if (has_minus_zero) unit = -unit;
    for (int i = 0; i < TOGETHER; i++) {
        float whole = floats[i] / unit, again;
        if (!(whole >= -128.0f && whole <= 127.0f)) return 0.0f;
        wholes[i] = (int8_t)whole;
        again = (float)wholes[i] * unit;
        if (memcmp(&again, &floats[i], sizeof again) != 0) return 0.0f;
    }
    return unit;
}

// Scales or offsets of a matrix: one float per group, or a unit per TOGETHER groups and a multiple per group.
typedef struct {
    const void *numbers;
    void *units;
    int8_t *wholes;  // NULL without units
} levels;

static void levels_free(levels *levels) {
    free(levels->units);
    free(levels->wholes);
    levels->units = levels->wholes = NULL;
}

// Splits floats into units and multiples (as in Q4_K); false if that is impossible.
static bool split_levels(levels *levels, long count) {
    if (!levels->numbers) return true;
    levels->units = allocate_clear(sizeof(float) * (size_t)(count / TOGETHER));
    levels->wholes = allocate_clear((size_t)count);
    for (long i = 0; i < count; i += TOGETHER) {
        float unit = two_levels((const float *)levels->numbers + i, levels->wholes + i);
        if (unit == 0.0f) return false;
        ((float *)levels->units)[i / TOGETHER] = unit;
    }
    return true;
}

// Splits both or neither; returns the number of groups per stretch.
static int split_both(const quantized_rows *rows, int depth, int count, levels both[2]) {
    int groups = depth / rows->group_size;
    both[0] = (levels){.numbers = rows->scales};
    both[1] = (levels){.numbers = rows->offsets};
    if (rows->scale_type != SCALE_F32 || groups % TOGETHER) return 1;
    if (split_levels(&both[0], (long)count * groups) && split_levels(&both[1], (long)count * groups)) return TOGETHER;
    levels_free(&both[0]);
    levels_free(&both[1]);
    return 1;
}

// Packs the codes of a span of sixteen columns: of 4 bits eight to a word of each lane.
static void pack_span(const quantized_part *part, const uint8_t *const columns[LANES], uint8_t *out) {
    bool is_paired = part->fate == PAIRED, is_half = code_bits(part->code) == 4;
    for (int lane = 0; lane < LANES; lane++)
        for (int vector = 0; vector < 2; vector++) {
            const uint8_t *from = columns[column_of(is_paired, lane, vector)];
            int k = k_of(is_paired, lane, vector);
            if (!is_half) out[vector * LANES + lane] = from[k];
            for (int step = 0; is_half && step < 4; step++)
                out[4 * lane + step] |= (uint8_t)((from[step] >> 4 * k & 15) << 4 * vector);
        }
}

// A range of columns.
typedef struct {
    int first, count;
} column_range;

static column_range block_range(int block, int count) {
    int first = block * LANES;
    return (column_range){first, count - first < LANES ? count - first : LANES};
}

// Packs scales, or offsets, of a stretch in some columns; zeros fill the block.
static uint8_t *pack_scales(const quantized_part *part, const levels *scales, column_range range, int group, uint8_t *out) {
    int bytes = scale_bytes(part->scale_type), groups = part->depth / part->group_size;
    for (int i = 0; i < range.count; i++) {
        long place = (long)(range.first + i) * groups + group;
        if (!scales->wholes) {
            memcpy(out + i * bytes, (const char *)scales->numbers + place * bytes, (size_t)bytes);
            continue;
        }
        memcpy(out + 4 * i, (const float *)scales->units + place / TOGETHER, sizeof(float));
        for (int j = 0; j < TOGETHER; j++) out[(4 + j) * LANES + i] = (uint8_t)scales->wholes[place + j];
    }
    return out + scales_bytes(part);
}

// Packs the codes of a span that begins at k.
static uint8_t *pack_codes(const quantized_part *part, const uint8_t *codes, column_range range, int k, uint8_t *out) {
    const uint8_t *columns[LANES];
    long row_bytes = (long)part->depth * code_bits(part->code) / 8, before = (long)k * code_bits(part->code) / 8;
    for (int i = 0; i < LANES; i++)
        columns[i] = codes + (range.first + (i < range.count ? i : 0)) * row_bytes + before;
    pack_span(part, columns, out);
    return out + span_bytes(part->code);
}

// Packs interleaved blocks of a weight of `num_columns`.
static void pack_abreast(const quantized_part *part, const uint8_t *codes, const levels both[2], int num_columns,
                         int first_block, int num_abreast, uint8_t *out) {
    for (int k = 0; k < part->depth; k += span_of(part->code)) {
        bool begins = k % (part->group_size * part->groups_together) == 0;
        for (int block = first_block; begins && block < first_block + num_abreast; block++)
            for (int i = 0; i < (part->has_offsets ? 2 : 1); i++)
                out = pack_scales(part, &both[i], block_range(block, num_columns), k / part->group_size, out);
        for (int block = first_block; block < first_block + num_abreast; block++)
            out = pack_codes(part, codes, block_range(block, num_columns), k, out);
    }
}

static bool is_alike(const quantized_part *a, const quantized_part *b) {
    return a->code == b->code && a->group_size == b->group_size && a->scale_type == b->scale_type &&
           a->groups_together == b->groups_together && a->has_offsets == b->has_offsets &&
           memcmp(a->table, b->table, sizeof a->table) == 0;
}

// Parts are compared once, when loaded, since products group blocks with the same layout.
static const quantized_part *first_like(const quantized_part *part) {
    for (const quantized_part *other = part->next; other; other = other->next)
        if (is_alike(part, other)) return other->like;
    return part;
}

quantized_part *quantized_new(const quantized_rows *rows, int depth, int count, element element,
                              quantized_block *blocks, quantized_part *next) {
    int num_blocks = (count + LANES - 1) / LANES, bits = code_bits(rows->code);
    levels both[2];
    quantized_part *part = allocate_clear(sizeof *part);
    *part = (quantized_part){.depth = depth,
                             .group_size = rows->group_size,
                             .code = rows->code,
                             .scale_type = rows->scale_type,
                             .groups_together = split_both(rows, depth, count, both),
                             .has_offsets = rows->offsets != NULL,
                             .fate = fate_of(element),
                             .next = next};
    int stretch = part->group_size * part->groups_together;
    part->header_bytes = scales_bytes(part) * (part->has_offsets ? 2 : 1);
    part->stretch_bytes = part->header_bytes + (long)stretch * LANES * bits / 8;
    part->block_bytes = part->stretch_bytes * (depth / stretch);
    part->data = weights_take((size_t)(num_blocks * part->block_bytes));
    memcpy(part->table, rows->table, sizeof(float) << bits);
    part->like = first_like(part);
    for (int first = 0; first < num_blocks; first += MOST_ABREAST) {
        int abreast = num_blocks - first < MOST_ABREAST ? num_blocks - first : MOST_ABREAST;
        uint8_t *data = part->data + first * part->block_bytes;
        pack_abreast(part, rows->codes, both, count, first, abreast, data);
        for (int i = 0; i < abreast; i++) blocks[first + i] = (quantized_block){part, data, i, abreast};
    }
    levels_free(&both[0]);
    levels_free(&both[1]);
    return part;
}

void quantized_free(quantized_part *first) {
    while (first) {
        quantized_part *next = first->next;
        weights_give_back(first->data);
        free(first);
        first = next;
    }
}

static bool lie_alike(const quantized_part *a, const quantized_part *b) {
    return a == b || (a && b && a->like == b->like);
}

int quantized_alike(const quantized_block *blocks, int count) {
    int alike = 1;
    while (alike < count && lie_alike(blocks[0].part, blocks[alike].part)) alike++;
    return alike;
}

// ---- numbers

typedef struct {
    vec scale[2], offset[2];
} group_numbers;

INLINE codebook book_of(const quantized_part *part) { return (codebook){vec_load(part->table), part->table}; }

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

// Returns the scales, or offsets, of one group of a stretch, in all lanes.
INLINE vec numbers_at(const quantized_part *part, const uint8_t *scales, int group) {
    if (part->groups_together == 1) return load_scales(part->scale_type, scales);
    return vec_mul(vec_load_int8(scales + (4 + group) * LANES), vec_load((const float *)scales));
}

// Without offsets, -0 is added, which changes no bit, not even the sign of a zero.
INLINE group_numbers numbers_of_group(const int code, const int fate, const quantized_part *part,
                                      const uint8_t *header, int group) {
    group_numbers numbers;
    vec scale = numbers_at(part, header, group);
    if (code == CODE_E4M3) scale = vec_mul(scale, vec_set(E4M3_UNIT));
    spread_lanes(fate, scale, numbers.scale);
    const uint8_t *offsets = header + part->header_bytes / 2;
    spread_lanes(fate, part->has_offsets ? numbers_at(part, offsets, group) : vec_set(-0.0f), numbers.offset);
    return numbers;
}

INLINE void next_weights(const int code, const int fate, codebook book, const group_numbers *group, const uint8_t *from,
                         const int step, vec out[2]) {
    unpack(code, book, from, step, out);
    for (int i = 0; i < 2; i++) {
        out[i] = vec_fma(out[i], group->scale[i], group->offset[i]);
        if (fate == ROUNDED) out[i] = vec_round_bf16(out[i]);
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
    const int step_bytes = fate == PAIRED ? 4 : 8, span = span_of(code), bytes = span_bytes(code);
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
        ask_ahead(state, MOST_ABREAST * bytes);
#pragma GCC unroll 4
        for (int step = 0; step < span / 2; step++, state->offset += step_bytes) {
            LOAD_AGAIN();  // codes, else they push scales out of the registers
            for (int n = 0; n < count; n++) {
                vec weights[2];
                next_weights(code, fate, book, &groups[n], from + n * bytes, step, weights);
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

// Returns where the codes at a k begin in a block without interleaving.
static long codes_at(const quantized_part *part, int k) {
    int stretch = part->group_size * part->groups_together, bits = code_bits(part->code);
    return k / stretch * part->stretch_bytes + part->header_bytes + (long)(k % stretch) * LANES * bits / 8;
}

// Unpacks `count` k from `first` on, which may be within a group.
INLINE void fill_panel(const int code, const int fate, quantized_block block, int first, int count, void *out) {
    const quantized_part *part = block.part;
    const int span = span_of(code), bytes = span_bytes(code);
    const long abreast = block.num_abreast;
    codebook book = book_of(part);
    for (int k = first, end; k < first + count; k = end) {
        int group = k / part->group_size, together = part->groups_together;
        const uint8_t *from = block.data + abreast * codes_at(part, k) + block.place * bytes;
        const uint8_t *header = block.data + abreast * (group / together) * part->stretch_bytes + block.place * part->header_bytes;
        group_numbers numbers = numbers_of_group(code, fate, part, header, group % together);
        end = (group + 1) * part->group_size;
        if (end > first + count) end = first + count;
        for (int i = k; i < end; i += span, from += abreast * bytes)
#pragma GCC unroll 4
            for (int step = 0; step < span / 2; step++) {
                vec weights[2];
                next_weights(code, fate, book, &numbers, from, step, weights);
                out = store_step(fate, weights, out);
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
    }
}

// ---- numbers of a few codes

static float one_scale(int type, const void *scales, long number) {
    char sixteen[LANES * sizeof(float)] = {0};
    size_t bytes = type == SCALE_F32 ? sizeof(float) : sizeof(bf16);
    memcpy(sixteen, (const char *)scales + number * (long)bytes, bytes);
    float lanes[LANES];
    vec_store(lanes, load_scales(type, sixteen));
    return lanes[0];
}

void quantized_read(const quantized_rows *rows, long first, int count, bool rounds, float *to) {
    for (long i = 0; i < count; i += rows->group_size) {
        long place = first + i, group = place / rows->group_size;
        float scale = one_scale(rows->scale_type, rows->scales, group);
        float offset = rows->offsets ? one_scale(rows->scale_type, rows->offsets, group) : 0.0f;
        for (int j = 0; j < rows->group_size; j++) {
            long code = place + j;
            int number = code_bits(rows->code) == 8 ? rows->codes[code] : rows->codes[code / 2] >> 4 * (code % 2) & 15;
            float product = rows->table[number] * scale;
            to[i + j] = rows->offsets ? product + offset : product;
        }
    }
    for (int i = 0; rounds && i < count; i += LANES) vec_store(to + i, vec_round_bf16(vec_load(to + i)));
}
