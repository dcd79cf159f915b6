// How packed weights of 8 or 4 bits lie in memory: known to their loading and their products.
#pragma once
#include "integers.h"
#include "quantized.h"
#include "unpack.h"

#if defined(__AVX512F__)
enum { MOST_FEW_ROWS = 8, MOST_FEW_BLOCKS = 4 };
#elif defined(__AVX2__)
enum { MOST_FEW_ROWS = 4, MOST_FEW_BLOCKS = 1 };
#else
enum { MOST_FEW_ROWS = 1, MOST_FEW_BLOCKS = 1 };
#endif
enum { PANEL_BLOCKS = 4, PANEL_DEPTH = 256, MOST_ABREAST = MOST_FEW_BLOCKS };
enum { READ_AHEAD = 8192, CACHE_LINE = 64 };  // bytes
enum { TOGETHER = 8 };  // groups that may share a float unit, of which their scales are small multiples

// What becomes of the numbers. Two vectors of them are PAIRED: the first eight columns, then the others, two k of each
// side by side; ROUNDED or EXACT: all columns at one k, then at the next. Or the codes meet rows of 8 bits AS_INTEGERS,
// four k of a column side by side.
typedef enum { PAIRED, ROUNDED, EXACT, AS_INTEGERS } fate;

// Along the depth there are stretches: each has headers, with scales and offsets of a block's groups, then codes.
struct quantized_part {
    uint8_t *data;
    long block_bytes, stretch_bytes, header_bytes;  // of one block
    int depth, group_size, code, scale_type;
    int groups_together;  // per stretch: 1, or TOGETHER if these share a float unit
    bool has_offsets;
    bool is_narrow;  // AS_INTEGERS: codes from -32 to 31 (Q5_0, Q6_K), stored 32 larger, or from 0 to 63 (Q5_K)
    fate fate;
    float table[256];
    int8_t whole_table[LANES];  // `table` of 4 bits in multiples of `unit`
    float unit;
    quantized_part *next;
    const quantized_part *like;  // the matrix's first part with the same layout, maybe itself
};

// Number of a lane's codes that are side by side, and the bytes of as many in all lanes.
INLINE int span_of(int code, int fate) { return code_bits(code) == 4 ? 8 : fate == AS_INTEGERS ? QUAD : 2; }
INLINE int span_bytes(int code, int fate) { return span_of(code, fate) * code_bits(code) / 8 * LANES; }

// Returns where the codes at a k begin in a block without interleaving.
INLINE long codes_at(const quantized_part *part, int k) {
    int stretch = part->group_size * part->groups_together, bits = code_bits(part->code);
    return k / stretch * part->stretch_bytes + part->header_bytes + (long)(k % stretch) * LANES * bits / 8;
}

// Returns the scales, or offsets, of one group of a stretch, in all lanes.
INLINE vec numbers_at(const quantized_part *part, const uint8_t *scales, int group) {
    if (part->groups_together == 1) return load_scales(part->scale_type, scales);
    return vec_mul(vec_load_int8(scales + (4 + group) * LANES), vec_load((const float *)scales));
}
