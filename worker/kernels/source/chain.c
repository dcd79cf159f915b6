// Chains that a target draws, round by round, without a return to Python in between.
#include "chain.h"

// The next row of a sequence begins a block: all rows before it are its prefix. Slots without room are never looked at,
// but a late helper may read them.
static void begin_block(const chain_call *call, int number) {
    row_group *group = call->groups + number;
    group->boundary += TAIL;
    for (int i = 0; i < TAIL; i++) {
        int slot = group->boundary + i;
        call->tail_slots[number * TAIL + i] = slot < group->capacity ? slot : group->capacity - 1;
    }
    call->tail_lengths[number] = 1;
}

// Append what a sequence has drawn: its next row. A late helper may still read these numbers, and nobody looks at what
// it makes of them. False where nothing was drawn.
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

// Whether the newest token of a sequence is one that ends it.
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
