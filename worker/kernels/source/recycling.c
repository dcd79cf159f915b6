// Best-first trees over rows of candidates, ranked with the noise of the next positions. Defined by
// worker/drafters/choice/tree_sizes.py and worker/drafters/ranking.py.
#include "recycling.h"

#include <math.h>

#include "noise.h"
#include "recycling_rows.h"

// The candidates after the root or a node, best first: those before `place` are nodes, the one at `place` waits.
typedef struct {
    candidate list[MOST_CANDIDATES];
    int count, place;
    int64_t order;  // when the waiting one was added
    int64_t token, depth;
    double path;  // log-confidence
} branch;

// Computes the noise of candidates at a position, [MOST_CANDIDATES].
static void shifts_of(
    const candidate_ranking *ranking, int64_t position, const candidate *found, int count, double *shifts
) {
    noise_source noise = noise_at(ranking->noise_key, position);
    int32_t ids[MOST_CANDIDATES] = {0};
    uint32_t words[MOST_CANDIDATES];
    for (int i = 0; i < count; i++) ids[i] = found[i].id;
    list_words(noise, ids, words);
    for (int i = 0; i < MOST_CANDIDATES; i++) shifts[i] = ranking->noise_scale * (double)gumbel(words[i]);
}

// Turns log-probabilities into confidences in descending order, ties by the higher token. Returns how many are left.
static int rank(
    const candidate_ranking *ranking, int64_t position, const candidate *found, int num_found, candidate *ranked
) {
    double score[MOST_CANDIDATES] = {0}, powers[MOST_CANDIDATES], shifts[MOST_CANDIDATES] = {0};
    double best = -INFINITY, total = 0.0;
    int num_kept = 0, count = 0;
    for (int i = 0; i < num_found; i++) num_kept += found[i].value >= found[0].value + ranking->floor;
    if (ranking->noise_scale) shifts_of(ranking, position, found, num_kept, shifts);
    for (int i = 0; i < num_kept; i++) {
        score[i] = (found[i].value + shifts[i]) / ranking->spread;
        if (score[i] > best) best = score[i];
    }
    for (int i = 0; i < MOST_CANDIDATES; i++) powers[i] = score[i] - best;
    exp_of_all(powers);
    for (int i = 0; i < num_kept; i++) total += powers[i];
    double log_total = best + log_of(total);
    for (int i = 0; i < num_kept; i++) {
        candidate new = {score[i] - log_total, found[i].id};
        int place = count++;
        for (; place; place--) {
            const candidate *above = ranked + place - 1;
            if (!(new.value > above->value || (new.value == above->value && new.id > above->id))) break;
            ranked[place] = *above;
        }
        ranked[place] = new;
    }
    return count;
}

static branch *likeliest(branch *branches, int64_t count) {
    branch *best = NULL;
    double highest = -INFINITY;
    for (branch *each = branches; each < branches + count; each++) {
        if (each->place >= each->count) continue;
        double path = each->path + each->list[each->place].value;
        if (best && !(path > highest || (path == highest && each->order < best->order))) continue;
        best = each, highest = path;
    }
    return best;
}

// Returns the number of nodes.
static int64_t grow_tree(
    const recycling_tables *tables, const tree_growth *growth, int64_t *node_ids, int64_t *parents
) {
    int64_t previous = growth->previous, token = growth->token;
    branch branches[MOST_NODES + 1];  // the root's, then the nodes'
    candidate found[MOST_CANDIDATES];
    int64_t num_nodes = 0, order = 0, depth = 0;
    double path = 0.0;
    while (num_nodes < growth->max_nodes) {
        branch *new = branches + num_nodes;
        new->token = token, new->depth = depth, new->path = path, new->place = new->count = 0;
        if (depth < growth->max_depth) {
            int num_found = candidates_behind(tables, previous, token, found);
            new->count = rank(&growth->ranking, growth->length + depth, found, num_found, new->list);
        }
        new->order = order++;
        branch *best = likeliest(branches, num_nodes + 1);
        if (!best) break;
        node_ids[num_nodes] = best->list[best->place].id;
        parents[num_nodes] = best - branches - 1;
        path = best->path + best->list[best->place].value;
        previous = best->token, token = node_ids[num_nodes], depth = best->depth + 1;
        best->place++, best->order = order++;
        num_nodes++;
    }
    return num_nodes;
}

void recycling_grow(
    const recycling_tables *tables, const tree_growth *growths, int64_t num_trees, int64_t *node_ids, int64_t *parents,
    int64_t *num_nodes
) {
    for (int64_t tree = 0; tree < num_trees; tree++) {
        const tree_growth *growth = &growths[tree];
        num_nodes[tree] = grow_tree(tables, growth, node_ids, parents);
        node_ids += growth->max_nodes;
        parents += growth->max_nodes;
    }
}

int64_t recycling_write(
    const recycling_tables *tables, const int64_t *token_ids, const int64_t *ids, const float *logprobs,
    const int64_t *text_rows, const int64_t *previous_ids, const int64_t *sizes, int64_t num_texts, int64_t *places
) {
    for (int64_t text = 0; text < num_texts; text++) {
        const int64_t num_rows = sizes[2 * text], num_text_rows = sizes[2 * text + 1];
        if (!write_text(
                tables, token_ids, ids, logprobs, num_rows, text_rows, previous_ids, num_text_rows, places
            )) {
            return text;
        }
        token_ids += num_rows;
        ids += num_rows * NUM_BEST;
        logprobs += num_rows * NUM_BEST;
        text_rows += num_text_rows;
        previous_ids += num_text_rows;
    }
    return num_texts;
}
