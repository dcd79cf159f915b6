// Codes of keys: two bits for every dimension, its side of the mean and whether it is far from it (the levels of a
// normal distribution's best four). Two dimensions make a nibble, four a byte; a block's keys lie side by side.
#include "elementwise.h"
#include "scan.h"

#define FAR_FROM_MEAN 1.22f  // in mean distances

static int level_of(float distance, float spread) {
    bool is_far = __builtin_fabsf(distance) > FAR_FROM_MEAN * spread;
    return distance > 0.0f ? 2 + is_far : !is_far;
}

static void code_head(const attention_sizes *sizes, const char *keys, const float *mean, const float *spread,
                      uint8_t *codes) {
    int head_dim = sizes->head_dim, bytes = head_dim * (sizes->element == BF16 ? 2 : 4);
    for (long key = 0; key < SCAN_CHUNK; key++) {
        float values[256];
        load((element)sizes->element, keys + key * bytes, head_dim, values);
        uint8_t *block = codes + key / CODE_BLOCK * CODE_BLOCK * (head_dim / 4) + key % CODE_BLOCK;
        for (int d = 0; d < head_dim; d += 4) {
            int code = 0;
            for (int i = 3; i >= 0; i--) code = code << 2 | level_of(values[d + i] - mean[d + i], spread[d + i]);
            block[d / 4 * CODE_BLOCK] = (uint8_t)code;
        }
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
