// Codes of keys: two bits for every dimension, its side of the mean and whether it is far from it (the levels of a
// normal distribution's best four). Two dimensions make a nibble, four a byte; a block's keys lie side by side.
#include "elementwise.h"
#include "scan.h"

#define FAR_FROM_MEAN 1.22f  // in mean distances

// Levels 0 to 3 of a key: from far below the mean to far above it.
static void find_levels(const float *values, const float *mean, const float *spread, int head_dim, uint8_t *levels) {
    for (int d = 0; d < head_dim; d++) {
        float distance = values[d] - mean[d];
        int is_above = distance > 0.0f, is_far = __builtin_fabsf(distance) > FAR_FROM_MEAN * spread[d];
        levels[d] = (uint8_t)(2 * is_above + (is_above == is_far));
    }
}

static void code_head(const attention_sizes *sizes, const char *keys, const float *mean, const float *spread,
                      uint8_t *codes) {
    int head_dim = sizes->head_dim, bytes = head_dim * (sizes->element == BF16 ? 2 : 4);
    for (long key = 0; key < SCAN_CHUNK; key++) {
        float values[256];
        uint8_t levels[256];
        load((element)sizes->element, keys + key * bytes, head_dim, values);
        find_levels(values, mean, spread, head_dim, levels);
        uint8_t *block = codes + key / CODE_BLOCK * CODE_BLOCK * (head_dim / 4) + key % CODE_BLOCK;
        for (int d = 0; d < head_dim; d += 4)
            block[d / 4 * CODE_BLOCK] =
                (uint8_t)(levels[d] | levels[d + 1] << 2 | levels[d + 2] << 4 | levels[d + 3] << 6);
    }
}

void scan_code_chunk(const attention_sizes *sizes, const scanned_keys *keys, int num_layers, int chunk) {
    int head_dim = sizes->head_dim, element_bytes = sizes->element == BF16 ? 2 : 4;
    for (int layer = 0; layer < num_layers; layer++)
        for (int head = 0; head < sizes->num_kv_heads; head++) {
            long number = (long)layer * sizes->num_kv_heads + head;
            long first = keys->first + (long)chunk * SCAN_CHUNK;
            long element = layer * keys->layer_stride + head * keys->head_stride + first * head_dim;
            const float *mean = keys->means + (number * keys->most_chunks + chunk) * head_dim;
            uint8_t *codes = (uint8_t *)keys->codes + number * code_bytes(keys, head_dim);
            code_head(sizes, (const char *)keys->cache + element * element_bytes, mean, keys->spreads + number * head_dim,
                      codes + (long)chunk * SCAN_CHUNK * (head_dim / 4));
        }
}
