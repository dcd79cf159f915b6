// Repacks weights of 8 or 4 bits once, when they are loaded.
#include "quantized_part.h"

#include <limits.h>
#include <math.h>
#include <stdlib.h>

#include "threads.h"
#include "weights_memory.h"

static fate fate_of(const quantized_rows *rows, element element) {
    if (rows->as_integers) return AS_INTEGERS;
    return element == F32 ? EXACT : HAS_BF16_PRODUCTS ? PAIRED : ROUNDED;
}

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

// Packs a span as quads: of 4 bits the first four in low halves, the others in high halves.
static void pack_quads(const quantized_part *part, const uint8_t *const columns[LANES], uint8_t *out) {
    for (int lane = 0; lane < LANES; lane++)
        for (int i = 0; i < QUAD; i++) {
            const uint8_t *from = columns[lane];
            int low = from[i / 2] >> 4 * (i % 2) & 15, high = from[2 + i / 2] >> 4 * (i % 2) & 15;
            // wide numbers without sign are stored 128 smaller
            int shift = part->code == CODE_INT8 ? 32 * part->is_narrow : part->is_narrow ? 0 : 128;
            uint8_t byte = (uint8_t)(from[i] + shift);
            out[QUAD * lane + i] = code_bits(part->code) == 4 ? (uint8_t)(low | high << 4) : byte;
        }
}

// Packs the codes of a span of sixteen columns: of 4 bits eight to a word of each lane.
static void pack_span(const quantized_part *part, const uint8_t *const columns[LANES], uint8_t *out) {
    if (part->fate == AS_INTEGERS) {
        pack_quads(part, columns, out);
        return;
    }
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
    return out + span_bytes(part->code, part->fate);
}

// Packs interleaved blocks of a weight of `num_columns`.
static void pack_abreast(const quantized_part *part, const uint8_t *codes, const levels both[2], int num_columns,
                         int first_block, int num_abreast, uint8_t *out) {
    for (int k = 0; k < part->depth; k += span_of(part->code, part->fate)) {
        bool begins = k % (part->group_size * part->groups_together) == 0;
        for (int block = first_block; begins && block < first_block + num_abreast; block++)
            for (int i = 0; i < (part->has_offsets ? 2 : 1); i++)
                out = pack_scales(part, &both[i], block_range(block, num_columns), k / part->group_size, out);
        for (int block = first_block; block < first_block + num_abreast; block++)
            out = pack_codes(part, codes, block_range(block, num_columns), k, out);
    }
}

static bool is_alike(const quantized_part *a, const quantized_part *b) {
    return a->code == b->code && a->fate == b->fate && a->is_narrow == b->is_narrow && a->group_size == b->group_size && a->scale_type == b->scale_type &&
           a->groups_together == b->groups_together && a->has_offsets == b->has_offsets &&
           memcmp(a->table, b->table, sizeof a->table) == 0;
}

// Parts are compared once, when loaded, since products group blocks with the same layout.
static const quantized_part *first_like(const quantized_part *part) {
    for (const quantized_part *other = part->next; other; other = other->next)
        if (is_alike(part, other)) return other->like;
    return part;
}

static bool are_narrow(int code, const uint8_t *codes, long count) {
    bool are = true;
    int shift = code == CODE_INT8 ? 32 : 0;
    if (code != CODE_INT8 && code != CODE_UINT8) return false;
    for (long i = 0; i < count; i++) are &= (uint8_t)(codes[i] + shift) < 64;
    return are;
}

static bool is_linear(const float table[LANES]) {
    bool is = true;
    for (int i = 0; i < LANES; i++) is &= table[i] == (float)i;
    return is;
}

static void find_wholes(quantized_part *part) {
    part->unit = 1.0f;
    for (int i = 0; i < LANES; i++)
        if (part->table[i] != floorf(part->table[i])) part->unit = 0.5f;
    for (int i = 0; i < LANES; i++) part->whole_table[i] = (int8_t)(part->table[i] / part->unit);
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
                             .fate = fate_of(rows, element),
                             .next = next};
    int stretch = part->group_size * part->groups_together;
    part->header_bytes = scales_bytes(part) * (part->has_offsets ? 2 : 1);
    part->stretch_bytes = part->header_bytes + (long)stretch * LANES * bits / 8;
    part->block_bytes = part->stretch_bytes * (depth / stretch);
    part->data = weights_take((size_t)(num_blocks * part->block_bytes));
    memcpy(part->table, rows->table, sizeof(float) << bits);
    if (bits == 4) find_wholes(part);
    if (bits == 4 && part->fate != AS_INTEGERS && HAS_LINEAR && is_linear(part->table)) part->code = CODE_LINEAR;
    part->is_narrow = part->fate == AS_INTEGERS && are_narrow(rows->code, rows->codes, (long)count * depth);
    part->like = first_like(part);
    int most_abreast = part->fate == AS_INTEGERS ? 1 : MOST_ABREAST;  // integers are read block by block
    for (int first = 0; first < num_blocks; first += most_abreast) {
        int abreast = num_blocks - first < most_abreast ? num_blocks - first : most_abreast;
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
