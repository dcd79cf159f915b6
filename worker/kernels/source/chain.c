// Draws chains of tokens with the target, round by round, without returning to Python.
#include "chain.h"

// Starts a block with a sequence's next row: all earlier rows become its prefix. Unused slots are never read for
// results, but a late helper may read them.
static void begin_block(const chain_call *call, int number) {
    row_group *group = call->groups + number;
    group->boundary += TAIL;
    for (int i = 0; i < TAIL; i++) {
        int slot = group->boundary + i;
        call->tail_slots[number * TAIL + i] = slot < group->capacity ? slot : group->capacity - 1;
    }
    call->tail_lengths[number] = 1;
}

// Appends what a sequence has drawn as its next row; false if nothing was drawn. A late helper may still read these
// numbers; its results are ignored.
static bool append_drawn(const chain_call *call, int number) {
    tree_walk *walk = call->walks + number;
    if (walk->failed_row >= 0) return false;
    int64_t token_id = walk->drawn[0];
    call->texts[number][walk->length++] = token_id;
    call->token_ids[number] = (int32_t)token_id;
    call->positions[number]++;
    if (call->tail_lengths[number] < TAIL) call->tail_lengths[number]++;
    else begin_block(call, number);
    call->groups[number].first_slot++;
    return true;
}

// Returns whether a sequence's newest token ends it.
static bool has_ended(const chain_call *call, int number) {
    if (!call->ends) return false;
    const token_set *ends = call->ends + number;
    for (int64_t i = 0; i < ends->num_tokens; i++)
        if (ends->token_ids[i] == call->token_ids[number]) return true;
    return false;
}

static void mask_undrawn(const chain_call *call) {
    for (int64_t row = 0; row < call->forward.num_rows; row++)
        for (int64_t i = 0; i < call->undrawn.num_tokens; i++)
            call->forward.logits[row * call->vocab + call->undrawn.token_ids[i]] = -INFINITY;
}

int32_t draw_chains(decoder *decoder, team *team, const chain_call *call, void *scratch) {
    int32_t num_rounds = 0, num_sequences = call->forward.num_groups;
    for (bool goes_on = true; goes_on && num_rounds < call->num_rounds; num_rounds++) {
        decoder_forward(decoder, team, &call->forward);
        mask_undrawn(call);
        sampling_walk(call->walks, num_sequences, call->vocab, scratch);
        for (int i = 0; i < num_sequences; i++) goes_on &= append_drawn(call, i) && !has_ended(call, i);
    }
    return num_rounds;
}
