// Causal attention of whole sequences with its gradients, as training needs it: heads of 64, in bf16.
//
// Work is split by the sizes alone and summed in one order, so the bits do not depend on the number of threads.
#pragma once
#include "api.h"
#include "gemm.h"

#if HAS_BF16_PRODUCTS && !defined(__AMX_BF16__)  // with AMX torch multiplies tiles
#define HAS_CAUSAL_ATTENTION 1
#else
#define HAS_CAUSAL_ATTENTION 0
#endif

// [batch, heads, length, 64] bf16, wherever batches, heads and positions lie; the 64 lie side by side.
typedef struct {
    void *first;
    int64_t batch_stride, head_stride, position_stride;  // in elements
} strided_heads;

typedef struct {
    int32_t batch_size, num_heads, num_kv_heads, length;
    int32_t num_before;  // keys in front of the first query's own, whole blocks of 64; they get no gradients
    float scaling;
    strided_heads query, key, value, output;  // keys and values [batch, heads, num_before + length, 64]
    float *softmax;  // [batch, heads, 2, length up to the next 64]: the largest score, to base 2; 1 / sum of weights
    strided_heads output_gradient, query_gradient, key_gradient, value_gradient;  // for `causal_backward`
} causal_call;

#if HAS_CAUSAL_ATTENTION
// Writes `output` and `softmax`.
EXPORT void causal_forward(team *team, const causal_call *call);
// Writes the gradients of query, key and value, from what `causal_forward` was given and wrote.
EXPORT void causal_backward(team *team, const causal_call *call);
#endif
