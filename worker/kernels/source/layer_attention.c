// Attention of one layer, for models whose other layers run elsewhere.
#include "attention.h"
#include "elementwise.h"

// Stores one key or value; elements keep their bits.
static void keep_given(const attention *attention, const attention_sizes *sizes, int kv_code, int group, int row, int head,
                       bool is_value, const char *from) {
    float numbers[256];
    size_t bytes = (size_t)sizes->head_dim * (sizes->element == BF16 ? 2 : 4);
    if (kv_code == KV_PLAIN) {
        memcpy(attention_slot(attention, 0, group, row, head, is_value), from, bytes);
        return;
    }
    load(sizes->element, from, sizes->head_dim, numbers);
    attention_keep(attention, 0, group, row, head, is_value, numbers);
}

void attend(team *team, const attention_sizes *sizes, const attention_view *view, const row_group *groups, int num_groups,
            const void *queries, const void *keys, const void *values, void *output) {
    frame *frame = frame_open(team);
    attention *attention = attention_new(frame, sizes, 0, sizes->head_dim, 1, groups, num_groups);
    int head_dim = sizes->head_dim, bytes = head_dim * (sizes->element == BF16 ? 2 : 4);
    long num_rows = 0;
    for (int group = 0; group < num_groups; group++)
        for (int row = 0; row < groups[group].num_rows; row++, num_rows++) {
            for (int head = 0; head < sizes->num_kv_heads; head++) {
                long from = (num_rows * sizes->num_kv_heads + head) * bytes;
                keep_given(attention, sizes, groups[group].kv_code, group, row, head, false, (const char *)keys + from);
                keep_given(attention, sizes, groups[group].kv_code, group, row, head, true, (const char *)values + from);
            }
            for (int head = 0; head < sizes->num_heads; head++) {
                float query[256];
                load(sizes->element, (const char *)queries + (num_rows * sizes->num_heads + head) * bytes, head_dim, query);
                attention_query(attention, group, row, head, query);
            }
        }
    size_t count = (size_t)num_rows * (size_t)(sizes->num_heads * head_dim);
    float *mixed = sizes->element == BF16 ? frame_take(frame, sizeof(float) * count) : output;
    attention_run(attention, frame, 0, view, mixed);
    if (mixed != output) store(BF16, mixed, (long)count, output);
    frame_close(frame);
}
