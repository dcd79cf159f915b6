// What a token alone decides: its embedding, and those of its own that each layer adds (per-layer embeddings, PLE).
#pragma once
#include "decoder.h"

// Writes the tokens' scaled embeddings, [num_rows, hidden].
void embed(const decoder *decoder, const forward_call *call, float *to);

ple_weights ple_new(const decoder_sizes *sizes);
void ple_free(ple_weights *ple);
// Writes a layer's embedding of each row's token, [num_rows, ple_dim]. `embedded` are the tokens' own, `of_token` has
// room for one row.
void ple_read(frame *frame, const decoder *decoder, const forward_call *call, int layer, const float *embedded,
              float *of_token, float *out);
