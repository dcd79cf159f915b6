// Scanned keys: scores of all codes, the best few keys exactly, the rest by their moments.
#include "scan_best.h"
#include "scan_clouds.h"

size_t scan_scratch_bytes(const attention *attention) {
    scan_space space = scan_space_at(attention, NULL);
    return (size_t)((char *)(space.moments + 2 * attention->most_queries * space.most_clouds) - (char *)NULL);
}

static void score_keys(const scan_place *place, scan_space space) {
    for (int chunk = 0; chunk < place->keys->num_chunks; chunk++) {
        bool expects = true;
        for (int i = 0; i < place->pair->num_queries; i++) {
            if (space.queries[i].is_flat) continue;
            int8_t *scores = space.scores + i * space.most_keys + (long)chunk * SCAN_CHUNK;
            score_chunk(place, chunk, &space.queries[i], expects, scores);
            expects = false;
        }
    }
}

void run_scan(const attention *attention, int layer, const head_rows *pair, void *slot, void *scratch) {
    const scanned_keys *keys = attention->groups[pair->group].scanned;
    scan_space space = scan_space_at(attention, scratch);
    scan_place place = {attention, keys, pair, (long)layer * attention->sizes.num_kv_heads + pair->head, layer};
    part part = part_at(slot, pair->num_queries);
    int head_dim = attention->sizes.head_dim;
    for (int i = 0; i < pair->num_queries; i++) {
        begin_query(&place, i, &space.queries[i]);
        look_at_clouds(&place, &space.queries[i], space.moments + 2 * i * space.most_clouds);
    }
    score_keys(&place, space);
    for (int i = 0; i < pair->num_queries; i++) {
        scan_query *query = &space.queries[i];
        float *output = part.output + (long)i * head_dim;
        memset(output, 0, sizeof(float) * (size_t)head_dim);
        query->num_best = 0;
        if (!query->is_flat) find_best(&place, space.scores + i * space.most_keys, query, space);
        add_best(&place, query, space, i, part);
        for (int cloud = 0; cloud < num_clouds(keys); cloud++)
            add_cloud(&place, cloud, query, space.moments + 2 * i * space.most_clouds, &part.sum[i], output);
        part.maximum[i] = query->maximum;
    }
}
