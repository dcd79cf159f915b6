// Causal attention of whole sequences and its gradients, for training: heads of 64, in bf16.
//
// Work is split by sizes alone and summed in a fixed order, so results do not depend on the number of threads.
#pragma once
#include "api.h"
#include "gemm.h"

#if HAS_BF16_PRODUCTS && !defined(__AMX_BF16__)  // with AMX, torch multiplies tiles
#define HAS_CAUSAL_ATTENTION 1
#else
#define HAS_CAUSAL_ATTENTION 0
#endif

// [batch, heads, length, 64] bf16 with any strides, the last dimension contiguous.
typedef struct {
    void *first;
    int64_t batch_stride, head_stride, position_stride;  // in elements
} strided_heads;

typedef struct {
    int32_t batch_size, num_heads, num_kv_heads, length;
    int32_t num_before;  // keys before the first query's own, in whole blocks of 64; they get no gradients
    float scaling;
    strided_heads query, key, value, output;  // keys and values [batch, heads, num_before + length, 64]
    float *softmax;  // [batch, heads, 2, length rounded up to 64]: the largest score, to base 2; 1 / sum of weights
    strided_heads output_gradient, query_gradient, key_gradient, value_gradient;  // for `causal_backward`
} causal_call;

#if HAS_CAUSAL_ATTENTION
// Writes `output` and `softmax`.
EXPORT void causal_forward(team *team, const causal_call *call);
// Writes the gradients of query, key and value, after `causal_forward` on the same call.
EXPORT void causal_backward(team *team, const causal_call *call);
#endif
