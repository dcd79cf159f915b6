// The rows of a group see a long text in three steps: all keys by two bits per dimension, the few best of them for each
// query exactly, and the others as clouds of keys whose weights and values follow from their moments.
#pragma once
#include "attention_units.h"

enum { CODE_BLOCK = 64 };  // keys whose codes are looked up together

// The number of coded keys.
INLINE long num_coded(const scanned_keys *keys) { return (long)keys->num_chunks * SCAN_CHUNK; }

INLINE int num_clouds(const scanned_keys *keys) { return (keys->num_chunks + CLOUD_CHUNKS - 1) / CLOUD_CHUNKS; }

// Bytes of codes of one head of one layer.
INLINE long code_bytes(const scanned_keys *keys, int head_dim) {
    return (long)keys->most_chunks * SCAN_CHUNK * (head_dim / 4);
}

size_t scan_scratch_bytes(const attention *attention);
// Scans the keys of a group and a head for all of its queries.
void run_scan(const attention *attention, int layer, const head_rows *pair, void *slot, void *scratch);
