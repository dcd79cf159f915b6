// Gradients of causal attention. A unit has a range of keys: it sums the gradients of these and their values over all
// queries, and each query's over its keys; the ranges' shares of a query's gradient are added in order.
#pragma once
#include "causal_blocks.h"
#include "threads.h"

#if HAS_CAUSAL_ATTENTION
// The units of a call over some pairs of a batch and a key head.
typedef struct {
    const causal_call *call;
    int first_pair, num_pairs, num_blocks, num_ranges;
    int most_blocks;          // blocks of the largest range
    int blocks_at_once;       // query blocks whose shares one unit adds
    const int *range_starts;  // [num_ranges + 1] in blocks
    void **parts;             // [num_ranges, num_pairs]: slots of the ranges' units
} backward_job;

// Slot of a range's unit: gradients of its keys and of their values in rows, [most_blocks] each, then those of the
// queries of all heads, [group, num_blocks] transposed, only for blocks that see some of its keys.
INLINE bf16 *key_gradients(void *slot) { return slot; }
INLINE bf16 *value_gradients(const backward_job *job, void *slot) {
    return (bf16 *)slot + (long)job->most_blocks * AREA;
}
INLINE float *query_gradient(const backward_job *job, void *slot, int member, int block) {
    return (float *)((bf16 *)slot + 2L * job->most_blocks * AREA) + ((long)member * job->num_blocks + block) * AREA;
}
INLINE size_t range_bytes(const backward_job *job) {
    size_t num_queries = (size_t)(group_of(job->call) * job->num_blocks);
    return (2 * sizeof(bf16) * (size_t)job->most_blocks + sizeof(float) * num_queries) * AREA;
}

size_t gradient_scratch_bytes(void);  // for both kinds of units
// Unit [num_ranges, num_pairs]: a range of keys.
void range_unit(const void *job, int unit, void *slot, void *scratch);
// Unit [num_blocks / blocks_at_once]: sums of shares; its slot has rows [blocks_at_once, num_pairs, group].
void query_unit(const void *job, int unit, void *slot, void *scratch);
#endif
