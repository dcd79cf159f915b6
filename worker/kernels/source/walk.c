// Walks a draft tree along the draws (worker/sampling/draft_tree.py), and counts penalised tokens on the way.
#include "draw.h"

static void change_count(const penalty_window *penalties, int64_t token_id, int change) {
    if (token_id >= 0 && token_id < penalties->vocab) penalties->counts[token_id] += change;
}

void sampling_follow(penalty_window *penalties, const int64_t *token_ids, int64_t length) {
    if (!penalties->counts) return;
    for (int64_t i = penalties->num_counted; i < length; i++) {
        change_count(penalties, token_ids[i], 1);
        if (i >= penalties->window) change_count(penalties, token_ids[i - penalties->window], -1);
    }
    penalties->num_counted = length;
}

// Counts the i-th drawn token (change 1), or removes it again (-1).
static void count_drawn(const tree_walk *walk, int64_t i, int change) {
    const penalty_window *penalties = walk->penalties;
    if (walk->adjusted && walk->adjusted->output.counts) change_count(&walk->adjusted->output, walk->drawn[i], change);
    if (!penalties->counts) return;
    int64_t leaving = walk->length + i - penalties->window;
    change_count(penalties, walk->drawn[i], change);
    if (leaving >= walk->length) change_count(penalties, walk->drawn[leaving - walk->length], -change);
    else if (leaving >= 0) change_count(penalties, walk->token_ids[leaving], -change);
}

// Returns whether a sequence and its drawn tokens end with these, none of them in the prompt.
static bool ends_with(const tree_walk *walk, const int64_t *token_ids, int64_t count) {
    int64_t first = walk->length + walk->num_drawn - count;
    if (first < walk->adjusted->num_prompt) return false;
    for (int64_t i = 0; i < count; i++) {
        int64_t place = first + i;
        int64_t token_id = place < walk->length ? walk->token_ids[place] : walk->drawn[place - walk->length];
        if (token_id != token_ids[i]) return false;
    }
    return true;
}

// Finds the tokens that would end a bad word now.
static void ban(const tree_walk *walk) {
    adjustments *adjusted = walk->adjusted;
    adjusted->num_banned = 0;
    for (int64_t i = 0; i < adjusted->num_words; i++) {
        int64_t start = adjusted->word_starts[i], last = adjusted->word_starts[i + 1] - 1;
        if (ends_with(walk, adjusted->word_ids + start, last - start))
            adjusted->banned_ids[adjusted->num_banned++] = adjusted->word_ids[last];
    }
}

// Returns the child of a node, or of the root (-1), with a token, or -1.
static int64_t child_of(const tree_walk *walk, int64_t parent, int64_t token_id) {
    for (int64_t node = walk->num_nodes - 1; node > parent; node--)
        if (walk->parents[node] == parent && walk->node_ids[node] == token_id) return node;
    return -1;
}

static void follow(const tree_walk *walk) {
    sampling_follow(walk->penalties, walk->token_ids, walk->length);
    if (walk->adjusted) sampling_follow(&walk->adjusted->output, walk->token_ids, walk->length);
}

static void forget_drawn(const tree_walk *walk) {
    for (int64_t i = walk->num_drawn - 1; i >= 0; i--) count_drawn(walk, i, -1);
}

// Returns the mask of tokens allowed after a row; NULL: all.
static const uint32_t *mask_of_row(const tree_walk *walk, int64_t row, int64_t vocab) {
    return walk->masks ? walk->masks + row * ((vocab + 31) / 32) : NULL;
}

static void walk_tree(tree_walk *walk, int64_t vocab, void *scratch) {
    walk->num_drawn = walk->path_length = 0;
    walk->failed_row = -1;
    follow(walk);
    int64_t node = -1;
    bool goes_on = true;
    while (goes_on) {
        bool is_drawable;
        const float *row = walk->logits + (node + 1) * walk->row_stride;
        int64_t position = walk->length + walk->num_drawn;
        const uint32_t *mask = mask_of_row(walk, node + 1, vocab);
        if (walk->adjusted) ban(walk);
        int64_t token_id = draw_token(
            row, vocab, position, walk->params, walk->penalties->counts, walk->adjusted, mask, scratch, &is_drawable
        );
        if (!is_drawable) {
            walk->failed_row = node + 1;
            break;
        }
        walk->drawn[walk->num_drawn] = token_id;
        count_drawn(walk, walk->num_drawn++, 1);
        node = child_of(walk, node, token_id);
        if (node >= 0) walk->path[walk->path_length++] = node;
        goes_on = node >= 0;
    }
    forget_drawn(walk);
}

void sampling_walk(tree_walk *walks, int64_t num_walks, int64_t vocab, void *scratch) {
    for (int64_t i = 0; i < num_walks; i++) walk_tree(walks + i, vocab, scratch);
}

void sampling_logprobs(
    tree_walk *walk, int64_t vocab, bool is_processed, int64_t num_top, float *logprobs, int32_t *top_ids,
    float *top_logprobs, void *scratch
) {
    int64_t num_drawn = walk->num_drawn;
    follow(walk);
    for (walk->num_drawn = 0; walk->num_drawn < num_drawn;) {
        int64_t i = walk->num_drawn, node = i ? walk->path[i - 1] : -1;
        candidates kept;
        plain_row(walk->logits + (node + 1) * walk->row_stride, vocab, scratch, &kept);
        if (walk->adjusted) ban(walk);
        if (is_processed)
            process_row(
                &kept, walk->length + i, walk->params, walk->penalties->counts, walk->adjusted,
                mask_of_row(walk, node + 1, vocab), scratch
            );
        token_logprobs(&kept, walk->drawn[i], num_top, logprobs + i, top_ids + i * num_top, top_logprobs + i * num_top);
        count_drawn(walk, walk->num_drawn++, 1);
    }
    forget_drawn(walk);
}
