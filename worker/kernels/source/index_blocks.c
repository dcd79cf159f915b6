// Indexers of blocks: scores of blocks of keys for each head of keys, and the choice of the best.
#include "index_scores.h"

int blocks_of_unit(const decoder_sizes *sizes) { return sizes->index_block < INDEX_SPAN ? INDEX_SPAN / sizes->index_block : 1; }

// Returns the block of a row's own position, in which all of its tail lies, since blocks are multiples of 64.
static int own_block(const decoder_sizes *sizes, const row_group *group) { return group->boundary / sizes->index_block; }

// Raises each head's score to its largest product with 64 keys.
static void raise_scores(const decoder_sizes *sizes, const float *products, float *scores, long stride) {
    for (long head = 0; head < sizes->index_heads; head++) {
        const float *own = products + head * KEYS_AT_ONCE;
        vec most = vec_load(own);
        for (int i = LANES; i < KEYS_AT_ONCE; i += LANES) most = vec_max(most, vec_load(own + i));
        float score = vec_max_lane(most);
        if (score > scores[head * stride]) scores[head * stride] = score;
    }
}

static void score_block(const scoring *all, scoring_space space, const char *keys, long row_bytes, float *scores) {
    const decoder_sizes *sizes = all->sizes;
    int stride = blocks_of_unit(sizes);
    for (int head = 0; head < sizes->index_heads; head++) scores[head * stride] = -__builtin_inff();
    for (int first = 0; first < sizes->index_block; first += KEYS_AT_ONCE) {
        const char *rows[KEYS_AT_ONCE];
        for (int i = 0; i < KEYS_AT_ONCE; i++) rows[i] = keys + (first + i) * row_bytes;
        multiply_index_keys(sizes, space, rows, KEYS_AT_ONCE);
        raise_scores(sizes, space.products, scores, stride);
    }
}

void run_block_scoring(const void *job, int unit, void *slot, void *scratch) {
    const scoring *all = job;
    const decoder_sizes *sizes = all->sizes;
    int row = all->first_row + unit / all->units_per_row, number = unit % all->units_per_row;
    const row_group *group = &all->call->groups[row];
    float *scores = slot ? slot : all->room->scores + (row - all->first_row) * all->stride + number * all->span;
    scoring_space space = index_space_at(sizes, scratch);
    int first = number * blocks_of_unit(sizes), end = first + blocks_of_unit(sizes), own = own_block(sizes, group);
    long row_bytes = kv_row_bytes(form_of(all->all, row)), block_bytes = sizes->index_block * row_bytes;
    const char *keys = head_start(all->all, all->keys.place, row, sizes->index_heads, false);
    pack_index_queries(sizes, all->room->queries + row * index_query_stride(sizes), space.queries);
    for (int block = first; block < end && block < own; block++)
        score_block(all, space, keys + block * block_bytes, row_bytes, scores + block - first);
}

// Lists the slots of the chosen blocks, those of the prefix in the own block, and the tail.
static void list_blocks(const decoder_sizes *sizes, const row_group *group, const float *scores, chosen_keys *chosen) {
    int own = own_block(sizes, group), size = sizes->index_block, num_left = sizes->num_chosen_keys / size - 1, num_equal;
    uint32_t least = least_chosen(scores, own, num_left, &num_equal);
    int32_t *next = chosen->prefix;
    for (int block = 0; block < own && num_left; block++) {
        uint32_t order = score_order(scores[block]);
        if (order < least || (order == least && num_equal-- <= 0)) continue;
        num_left--;
        for (int i = 0; i < size; i++) *next++ = block * size + i;
    }
    for (int slot = own * size; slot < group->boundary; slot++) *next++ = slot;
    chosen->num_prefix = (int32_t)(next - chosen->prefix);
    chosen->num_padded = 0;
    chosen->num_tail = group->tail_lengths[0];
    memcpy(chosen->tail, group->tail_slots, sizeof chosen->tail);
    for (int i = chosen->num_tail; i < TAIL; i++) chosen->tail[i] = group->tail_slots[0];
}

void run_block_choice(const void *job, int unit, void *slot, void *scratch) {
    const scoring *all = job;
    const decoder_sizes *sizes = all->sizes;
    int row = all->first_row + unit, at_once = blocks_of_unit(sizes);
    const row_group *group = &all->call->groups[row];
    char *to = slot ? slot : (char *)all->room->chosen[(long)row * choices_of_row(sizes)];
    float *scores = scratch;
    bool sees_all = !index_sees_more(sizes, group);
    for (int head = 0; head < sizes->index_heads; head++, to += chosen_bytes(sizes)) {
        ((chosen_keys *)to)->num_prefix = ALL_KEYS;
        if (sees_all) continue;
        const float *from = all->room->scores + unit * all->stride + head * at_once;
        for (int block = 0; block < own_block(sizes, group); block++)
            scores[block] = from[block / at_once * all->span + block % at_once] + 0.0f;  // -0 becomes +0
        list_blocks(sizes, group, scores, (chosen_keys *)to);
    }
}
