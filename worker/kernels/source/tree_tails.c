// The tails of rows of draft trees: what a row sees after its sequence's boundary.
#include <string.h>

#include "row_table.h"

// The root of a tree sees the committed entries after the boundary, and itself.
static void root_tail(int64_t start, int64_t length, int64_t *tail) {
    for (int64_t place = 0; place < TAIL; place++) tail[place] = start + (place < length ? place : 0);
}

static int one_tree(
    int64_t start, int64_t root, int64_t size, const int64_t *parents, int64_t *tails, int64_t *lengths
) {
    if (root < start || root - start >= TAIL) return 0;
    lengths[0] = root - start + 1;
    root_tail(start, lengths[0], tails);
    for (int64_t node = 0; node < size; node++) {
        int64_t parent = parents[node] + 1;  // its row
        if (parent < 0 || parent > node || lengths[parent] >= TAIL) return 0;
        int64_t *tail = tails + (node + 1) * TAIL;
        memcpy(tail, tails + parent * TAIL, TAIL * sizeof *tail);
        tail[lengths[parent]] = root + 1 + node;
        lengths[node + 1] = lengths[parent] + 1;
    }
    return 1;
}

int tree_tails(
    const int64_t *starts, const int64_t *roots, const int64_t *sizes, const int64_t *parents, int64_t num_trees,
    int64_t *entries, int64_t *lengths
) {
    for (int64_t tree = 0; tree < num_trees; tree++) {
        if (!one_tree(starts[tree], roots[tree], sizes[tree], parents, entries, lengths)) return 0;
        parents += sizes[tree];
        entries += (sizes[tree] + 1) * TAIL;
        lengths += sizes[tree] + 1;
    }
    return 1;
}
