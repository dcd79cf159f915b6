// The table of rows that a GPU's forward reads: checked against its layout, then filled.
#include "row_table.h"

#include <string.h>

enum { GROUP_WORDS = 4, ROW_WORDS = 5, SLOT = 0, BOUNDARY, LENGTH, POSITION, ENTRY };

// The parts of a table in its buffer.
typedef struct {
    int32_t *groups, *rows, *tails, *token_ids, *prefixes, *packed;
} table_parts;

static table_parts parts_of(const table_layout *layout, int32_t *buffer) {
    int64_t groups = layout->num_groups, rows = layout->num_rows;
    table_parts parts = {.groups = buffer};
    parts.rows = parts.groups + groups * GROUP_WORDS;
    parts.tails = parts.rows + rows * ROW_WORDS;
    parts.token_ids = parts.tails + rows * TAIL;
    parts.prefixes = parts.token_ids + rows;
    parts.packed = parts.prefixes + 2 * groups;
    return parts;
}

static int all_within(const int64_t *numbers, int64_t count, int64_t lowest, int64_t end) {
    int outside = 0;
    for (int64_t i = 0; i < count; i++) outside |= (uint64_t)numbers[i] - (uint64_t)lowest >= (uint64_t)(end - lowest);
    return !outside;
}

static int64_t groups_of(const table_layout *layout, const given_rows *rows) {
    return (rows->size + layout->rows_per_group - 1) / layout->rows_per_group;
}

static int sequence_fits(const table_layout *layout, const given_rows *rows) {
    if (rows->size < 1 || rows->size > layout->num_rows || rows->slot < 0 || rows->slot >= layout->num_slots) return 0;
    if (rows->boundary < 0 || rows->boundary > layout->capacity || rows->boundary % layout->boundary_step) return 0;
    return rows->first_entry >= 0 && rows->first_entry <= layout->capacity - rows->size;
}

// Returns whether no two sequences write an entry of the same slot. A slot has few: known tokens in two blocks.
static int are_apart(const table_layout *layout, const given_rows *sequences, int64_t count) {
    int16_t newest[MOST_TABLE_SLOTS], before[MOST_TABLE_SLOTS];  // last sequence of a slot, and the one before it; -1: none
    memset(newest, -1, (size_t)layout->num_slots * sizeof *newest);
    for (int64_t i = 0; i < count; i++) {
        const given_rows *rows = sequences + i;
        for (int each = newest[rows->slot]; each >= 0; each = before[each]) {
            int64_t behind = rows->first_entry - sequences[each].first_entry;
            if (behind > -rows->size && behind < sequences[each].size) return 0;
        }
        before[i] = newest[rows->slot], newest[rows->slot] = (int16_t)i;
    }
    return 1;
}

// Returns the number of rows, or -1 if some do not fit.
static int64_t rows_that_fit(const table_layout *layout, const given_rows *sequences, int64_t count) {
    int64_t num_rows = 0, num_groups = 0;
    if (count > layout->num_rows || layout->num_slots > MOST_TABLE_SLOTS || count > MOST_TABLE_SLOTS) return -1;
    for (int64_t i = 0; i < count; i++) {
        if (!sequence_fits(layout, sequences + i)) return -1;
        num_rows += sequences[i].size, num_groups += groups_of(layout, sequences + i);
    }
    if (num_rows > layout->num_rows || num_groups > layout->num_groups) return -1;
    return are_apart(layout, sequences, count) ? num_rows : -1;
}

// Returns whether there is a page for each entry of all rows, and tails stay within these pages.
static int pages_fit(
    const table_layout *layout, const given_rows *sequences, int64_t count, const int64_t *tails,
    const given_pages *pages
) {
    int64_t num_pages = 0;
    if (!pages->numbers && count) return 0;
    for (int64_t i = 0; i < count; i++) {
        const given_rows *rows = sequences + i;
        int64_t first = rows->boundary / layout->page, last = (rows->first_entry + rows->size - 1) / layout->page;
        if (rows->first_entry < first * layout->page) return 0;
        if (!all_within(tails, rows->size * TAIL, first * layout->page, (last + 1) * layout->page)) return 0;
        num_pages += last - first + 1, tails += rows->size * TAIL;
    }
    return num_pages == pages->count;
}

// Returns the distance from an entry to its place in a pool, for entries of one page.
static int64_t shift_of(const table_layout *layout, const int64_t *pages, int64_t first, int64_t entry) {
    int64_t number = entry / layout->page;
    return (pages[number - first] - number) * layout->page;
}

// Writes entries and tails of one sequence, in a pool's pages or in place; returns the pages after its own.
static const int64_t *put_places(
    const table_layout *layout, const given_rows *given, const int64_t *tails, const int64_t *pages, int32_t *rows,
    int32_t *places
) {
    int64_t end = given->first_entry + given->size, first = 0, last = 0, shift = 0;
    if (pages) {
        first = given->boundary / layout->page, last = (end - 1) / layout->page;
        shift = (pages[0] - first) * layout->page;
    }
    for (int64_t row = 0; row < given->size; row++) {
        int64_t entry = given->first_entry + row;
        if (first != last) shift = shift_of(layout, pages, first, entry);
        rows[row * ROW_WORDS + ENTRY] = (int32_t)(entry + shift);
    }
    for (int64_t i = 0; i < given->size * TAIL; i++)  // most rows have one page: a loop without branches is fast
        places[i] = (int32_t)(tails[i] + (first == last ? shift : shift_of(layout, pages, first, tails[i])));
    return pages ? pages + last - first + 1 : NULL;
}

static void put_all_places(
    const table_layout *layout, const given_rows *sequences, int64_t count, const int64_t *tails,
    const given_pages *pages, int32_t *rows, int32_t *places
) {
    const int64_t *own = layout->page ? pages->numbers : NULL;
    for (int64_t i = 0; i < count; i++) {
        own = put_places(layout, sequences + i, tails, own, rows, places);
        rows += sequences[i].size * ROW_WORDS;
        tails += sequences[i].size * TAIL, places += sequences[i].size * TAIL;
    }
}

// Writes the groups of one sequence from group `first` and row `first_row` on, and its rows' places in full groups;
// returns the next group.
static int64_t put_groups(
    const table_layout *layout, const given_rows *given, int64_t first, int64_t first_row, table_parts parts
) {
    int64_t most = layout->rows_per_group, end = first + groups_of(layout, given);
    for (int64_t group = first, row = 0; group < end; group++, row += most) {
        int64_t size = given->size - row < most ? given->size - row : most;
        int32_t *words = parts.groups + group * GROUP_WORDS;
        words[0] = parts.prefixes[group] = (int32_t)given->slot;
        words[1] = (int32_t)(first_row + row), words[2] = (int32_t)size;
        words[3] = parts.prefixes[layout->num_groups + group] = (int32_t)given->boundary;
    }
    for (int64_t row = 0; row < given->size; row++) parts.packed[first_row + row] = (int32_t)(first * most + row);
    return end;
}

static void put_rows(
    const table_layout *layout, const given_rows *sequences, int64_t count, const int64_t *token_ids,
    const int64_t *positions, const int64_t *lengths, table_parts parts
) {
    for (int64_t i = 0, row = 0, group = 0; i < count; i++) {
        group = put_groups(layout, sequences + i, group, row, parts);
        for (int64_t end = row + sequences[i].size; row < end; row++) {
            int32_t *words = parts.rows + row * ROW_WORDS;
            words[SLOT] = (int32_t)sequences[i].slot, words[BOUNDARY] = (int32_t)sequences[i].boundary;
            words[LENGTH] = (int32_t)lengths[row], words[POSITION] = (int32_t)positions[row];
            parts.token_ids[row] = (int32_t)token_ids[row];
        }
    }
}

int table_fill(
    const table_layout *layout, const given_rows *sequences, int64_t num_sequences, const int64_t *token_ids,
    const int64_t *positions, const int64_t *lengths, const int64_t *tails, const given_pages *pages,
    const given_pages *window_pages, int32_t *buffer
) {
    int64_t num_rows = rows_that_fit(layout, sequences, num_sequences), windows = layout->start_of_windows;
    if (num_rows < 0 || !all_within(tails, num_rows * TAIL, 0, layout->capacity)) return 0;
    if (!all_within(lengths, num_rows, 1, TAIL + 1) || !all_within(token_ids, num_rows, 0, layout->vocab)) return 0;
    if (!all_within(positions, num_rows, 0, layout->num_positions)) return 0;
    if (layout->page && !pages_fit(layout, sequences, num_sequences, tails, pages)) return 0;
    if (windows && !pages_fit(layout, sequences, num_sequences, tails, window_pages)) return 0;
    table_parts parts = parts_of(layout, buffer);
    int64_t end = windows ? windows + layout->num_rows * (ROW_WORDS + TAIL) : parts.packed + layout->num_rows - buffer;
    memset(buffer, 0, (size_t)end * sizeof *buffer);
    put_rows(layout, sequences, num_sequences, token_ids, positions, lengths, parts);
    if (windows) memcpy(buffer + windows, parts.rows, (size_t)(layout->num_rows * ROW_WORDS) * sizeof *buffer);
    put_all_places(layout, sequences, num_sequences, tails, pages, parts.rows, parts.tails);
    if (windows) {
        int32_t *rows = buffer + windows;
        put_all_places(
            layout, sequences, num_sequences, tails, window_pages, rows, rows + layout->num_rows * ROW_WORDS
        );
    }
    return 1;
}
