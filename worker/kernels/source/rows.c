// Checks the numbers of a row table against what they index.
#include "api.h"
#include "vectors.h"

static bool tail_fits(const int32_t *slots, int length, int capacity) {
    if (length < 1 || length > TAIL) return false;
    for (int i = 0; i < length; i++)
        if (slots[i] < 0 || slots[i] >= capacity) return false;
    return true;
}

static bool group_fits(const row_group *group) {
    if (group->boundary % TAIL || group->boundary < 0 || group->boundary > group->capacity) return false;
    if (group->first_slot < 0 || group->first_slot > group->capacity - group->num_rows) return false;
    for (int row = 0; row < group->num_rows; row++)
        if (!tail_fits(group->tail_slots + row * TAIL, group->tail_lengths[row], group->capacity)) return false;
    return true;
}

int rows_fit(const row_group *groups, int num_groups, const int32_t *token_ids, const int32_t *positions, int vocab,
             int num_positions) {
    for (long group = 0, first = 0; group < num_groups; first += groups[group].num_rows, group++) {
        if (!group_fits(&groups[group])) return 0;
        for (long row = first; row < first + groups[group].num_rows; row++)
            if (token_ids[row] < 0 || token_ids[row] >= vocab || positions[row] < 0 || positions[row] >= num_positions)
                return 0;
    }
    return 1;
}
