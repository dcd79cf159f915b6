#include "embedding.h"

#include <stdlib.h>

#include "heads.h"

// Reads `count` numbers of a table, which is packed if `numbers` is NULL.
static void read_table(const void *numbers, element element, const quantized_rows *packed, long first, int count,
                       bool rounds, float *to) {
    if (numbers) load(element, (const char *)numbers + first * (element == BF16 ? 2 : 4), count, to);
    else quantized_read(packed, first, count, rounds, to);
}

void embed(const decoder *decoder, const forward_call *call, float *to) {
    const decoder_sizes *sizes = &decoder->sizes;
    bool rounds = sizes->element == BF16;
    for (long row = 0; row < call->num_rows; row++) {
        long first = (long)call->token_ids[row] * sizes->hidden;
        read_table(decoder->embedding, (element)sizes->element, &decoder->packed_embedding, first, sizes->hidden, rounds,
                   to + row * sizes->hidden);
    }
    if (sizes->embedding_scale != 1.0f) scale_numbers(to, (long)call->num_rows * sizes->hidden, sizes->embedding_scale, rounds);
}

ple_weights ple_new(const decoder_sizes *sizes) {
    element type = (element)sizes->element;
    int hidden = sizes->hidden, own = sizes->ple_dim;
    return (ple_weights){matrix_new(type, hidden, own), matrix_new(type, hidden, own), matrix_new(type, own, hidden), NULL, NULL};
}

void ple_free(ple_weights *ple) {
    matrix_free(&ple->projection);
    matrix_free(&ple->gate);
    matrix_free(&ple->output);
    free(ple->norm);
    free(ple->output_norm);
}

void ple_read(frame *frame, const decoder *decoder, const forward_call *call, int layer, const float *embedded,
              float *of_token, float *out) {
    const decoder_sizes *sizes = &decoder->sizes;
    const ple_weights *weights = &decoder->layers[layer].ple;
    bool rounds = sizes->element == BF16;
    long width = sizes->ple_dim, count = call->num_rows * width;
    linear(frame, &weights->projection, call->num_rows, embedded, out, width, rounds);
    scale_numbers(out, count, (float)(1.0 / __builtin_sqrt((double)sizes->hidden)), rounds);
    for (long row = 0; row < call->num_rows; row++) {
        long first = ((long)call->token_ids[row] * sizes->num_layers + layer) * width;
        float *of_row = out + row * width;
        norm(sizes, of_row, weights->norm, (int)width, of_row);
        read_table(decoder->ple_table, (element)sizes->ple_element, &decoder->packed_ple_table, first, (int)width,
                   rounds, of_token);
        scale_numbers(of_token, width, sizes->ple_scale, rounds);
        add(of_row, of_token, width, rounds);
    }
    scale_numbers(out, count, __builtin_sqrtf(0.5f), rounds);
}
