// The head of a decoder.
#include "decoder.h"
#include "elementary.h"
#include "elementwise.h"

// The last block's padded columns go through a buffer.
static void multiply_head(frame *frame, const decoder *decoder, int num_rows, const float *normed, float *logits) {
    int vocab = decoder->sizes.vocab, columns = decoder->head.columns;
    if (vocab == columns) {
        linear(frame, &decoder->head, num_rows, normed, logits, vocab, false);
        return;
    }
    float *wide = frame_take(frame, sizeof(float) * (size_t)num_rows * (size_t)columns);
    linear(frame, &decoder->head, num_rows, normed, wide, columns, false);
    for (long row = 0; row < num_rows; row++) memcpy(logits + row * vocab, wide + row * columns, sizeof(float) * (size_t)vocab);
}

// Caps numbers, also those after the last whole vector.
static void cap_numbers(float *numbers, long count, float cap) {
    vec share = vec_set(1.0f / cap), most = vec_set(cap);
    for (long i = 0; i < count; i += LANES) {
        float some[LANES] = {0};
        size_t num_bytes = sizeof(float) * (size_t)(count - i < LANES ? count - i : LANES);
        memcpy(some, numbers + i, num_bytes);
        vec_store(some, vec_mul(vec_tanh(vec_mul(vec_load(some), share)), most));
        memcpy(numbers + i, some, num_bytes);
    }
}

void head_apply(frame *frame, const decoder *decoder, int num_rows, const float *normed, float *logits) {
    float scale = decoder->sizes.logit_scale, cap = decoder->sizes.logit_cap;
    long count = (long)num_rows * decoder->sizes.vocab;
    multiply_head(frame, decoder, num_rows, normed, logits);
    if (scale != 1.0f)
        for (long i = 0; i < count; i++) logits[i] *= scale;
    if (cap != 0.0f) cap_numbers(logits, count, cap);
}

void decoder_head(decoder *decoder, team *team, int num_rows, const void *hidden, float *logits) {
    frame *frame = frame_open(team);
    long count = (long)num_rows * decoder->sizes.hidden;
    float *normed = frame_take(frame, sizeof(float) * (size_t)count);
    load((element)decoder->sizes.element, hidden, count, normed);
    head_apply(frame, decoder, num_rows, normed, logits);
    frame_close(frame);
}
