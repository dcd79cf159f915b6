// Latent attention with absorbed products: queries are multiplied into the latent vectors' dimensions, attend to the
// cache, and the results are multiplied to the heads' values.
#include "latent.h"

#include <stdlib.h>

#include "heads.h"

enum { ROWS_OF_HEADS = 128, MOST_TOGETHER = 32, MOST_QUERIES = 2048, HEADS_WORTH_HELP = 1 << 19 };

#define LATENT_EPSILON 1e-6f  // of the norms of latent vectors, whatever the model's

int latent_key_dim(const decoder_sizes *sizes) { return sizes->head_dim - sizes->index_dim; }
static int turned_dim(const decoder_sizes *sizes) { return latent_key_dim(sizes) - sizes->latent_rank; }
static int query_dim(const decoder_sizes *sizes) { return sizes->still_dim + turned_dim(sizes); }

latent_weights latent_new(const decoder_sizes *sizes) {
    element kind = (element)sizes->element;
    int depth = sizes->query_rank ? sizes->query_rank : sizes->hidden;
    return (latent_weights){
        .sizes = *sizes,
        .query_down = matrix_new(kind, sizes->hidden, sizes->query_rank),
        .query = matrix_new(kind, depth, sizes->num_heads * query_dim(sizes)),
        .key = matrix_new(kind, sizes->hidden, latent_key_dim(sizes)),
        .key_up = matrix_new(kind, sizes->still_dim, sizes->num_heads * sizes->latent_rank),
        .value_up = matrix_new(kind, sizes->latent_rank, sizes->num_heads * sizes->value_dim),
        .indexer = indexer_new(sizes),
    };
}

void latent_free(latent_weights *latent) {
    matrix_free(&latent->query_down);
    matrix_free(&latent->query);
    matrix_free(&latent->key);
    matrix_free(&latent->key_up);
    matrix_free(&latent->value_up);
    indexer_free(&latent->indexer);
    free(latent->query_norm);
    free(latent->key_norm);
}

matrix *latent_matrix(latent_weights *latent, weight_role role, int *num_columns) {
    matrix *found = role == QUERY        ? &latent->query
                    : role == QUERY_DOWN ? &latent->query_down
                    : role == KEY        ? &latent->key
                    : role == KEY_UP     ? &latent->key_up
                    : role == VALUE_UP   ? &latent->value_up
                                         : NULL;
    if (!found) return indexer_matrix(&latent->indexer, &latent->sizes, role, num_columns);
    *num_columns = found->columns;
    return found;
}

int latent_groups(const decoder_sizes *sizes, int num_rows) {
    int groups = 1, most = MOST_QUERIES / num_rows;
    most = most < 1 ? 1 : most < MOST_TOGETHER ? most : MOST_TOGETHER;
    while (sizes->num_heads % groups || sizes->num_heads / groups > most) groups++;
    return groups;
}

latent_room latent_room_new(frame *frame, const decoder_sizes *sizes, int num_rows) {
    size_t rows = (size_t)num_rows * sizeof(float), heads = (size_t)sizes->num_heads;
    int widest = sizes->head_dim > sizes->query_rank ? sizes->head_dim : sizes->query_rank;
    int found = query_dim(sizes) > sizes->value_dim ? query_dim(sizes) : sizes->value_dim;
    int deepest = sizes->still_dim > sizes->latent_rank ? sizes->still_dim : sizes->latent_rank;
    size_t at_once = (size_t)(num_rows < ROWS_OF_HEADS ? num_rows : ROWS_OF_HEADS);
    size_t row_bytes = sizeof(float) * (size_t)(deepest + BF16_DEPTH);
    return (latent_room){.down = frame_take(frame, rows * (size_t)widest + 4 * LANES),
                         .queries = frame_take(frame, rows * heads * (size_t)found + 4 * LANES),
                         .absorbed = frame_take(frame, rows * heads * (size_t)sizes->head_dim + 4 * LANES),
                         .gathered = frame_take(frame, row_bytes * (heads * at_once + LANES))};
}

// ---- products of each head

// Rows of all heads, each with its own columns.
typedef struct {
    const matrix *matrix;
    const char *rows;  // [num_heads, num_rows] as products take them
    float *out;
    long row_bytes, out_stride, out_width;  // of a row of all heads; of a head
    int num_rows, blocks;
    bool rounds;
} head_products;

static void run_head_product(const void *job, int head, void *slot, void *scratch) {
    const head_products *all = job;
    const char *rows = all->rows + (long)head * all->num_rows * all->row_bytes;
    float *out = slot ? slot : all->out + head * all->out_width;
    long stride = slot ? (long)all->blocks * LANES : all->out_stride;
    multiply_panel(all->matrix, head * all->blocks, all->blocks, all->num_rows, rows, out, stride, scratch);
    finish_panel(all->matrix, head * all->blocks, all->blocks, all->num_rows, out, stride, all->rounds);
}

static void multiply_heads(frame *frame, const matrix *matrix, int num_heads, bool rounds, int num_rows,
                           const float *rows, int row_width, float *out, int out_width, char *gathered) {
    size_t bytes = multiplied_bytes(matrix);
    for (long head = 0; head < num_heads; head++)
        for (long row = 0; row < num_rows; row++) {
            const float *from = rows + (row * num_heads + head) * row_width;
            multiplied_row(matrix, from, gathered + (size_t)(head * num_rows + row) * bytes);
        }
    head_products job = {.matrix = matrix,
                         .rows = gathered,
                         .out = out,
                         .row_bytes = (long)bytes,
                         .out_stride = (long)num_heads * out_width,
                         .out_width = out_width,
                         .num_rows = num_rows,
                         .blocks = matrix->columns / num_heads / LANES,
                         .rounds = rounds};
    size_t width = (size_t)job.blocks * LANES;
    stage_plan plan = {.num_units = num_heads,
                       .run = run_head_product,
                       .job = &job,
                       .job_bytes = sizeof job,
                       .scratch_bytes = matrix->quantized ? quantized_scratch_bytes() : 0,
                       .slot_bytes = sizeof(float) * (size_t)num_rows * width,
                       .is_small = (num_rows + 4L) * matrix->depth * matrix->columns < HEADS_WORTH_HELP};
    void *results[MOST_UNITS];
    run_stage(frame, &plan, results);
    for (int head = 0; head < num_heads; head++)
        for (long row = 0; results[head] && row < num_rows; row++)
            memcpy(out + row * job.out_stride + head * job.out_width, (float *)results[head] + row * (long)width,
                   sizeof(float) * width);
}

size_t grouped_bytes(const matrix *matrix, int num_groups, int num_rows) {
    size_t at_once = (size_t)(num_rows < ROWS_OF_HEADS ? num_rows : ROWS_OF_HEADS);
    return multiplied_bytes(matrix) * ((size_t)num_groups * at_once + LANES);
}

void multiply_groups_of_heads(frame *frame, const matrix *matrix, int num_groups, bool rounds, int num_rows, const float *rows,
                              int row_width, float *out, int out_width, char *gathered) {
    for (int first = 0; first < num_rows; first += ROWS_OF_HEADS) {
        int count = num_rows - first < ROWS_OF_HEADS ? num_rows - first : ROWS_OF_HEADS;
        long heads = (long)first * num_groups;
        multiply_heads(frame, matrix, num_groups, rounds, count, rows + heads * row_width, row_width, out + heads * out_width,
                       out_width, gathered);
    }
}

// ---- rows

// Computes queries [num_rows, num_heads, query_dim] from rows, through latent vectors if queries have some.
static void queries_of(frame *frame, const latent_weights *latent, const latent_room *room, int num_rows,
                       const float *normed) {
    const decoder_sizes *sizes = &latent->sizes;
    bool rounds = sizes->element == BF16;
    const float *from = normed;
    if (sizes->query_rank) {
        linear(frame, &latent->query_down, num_rows, normed, room->down, sizes->query_rank, rounds);
        for (long row = 0; row < num_rows; row++) {
            float *vector = room->down + row * sizes->query_rank;
            norm_with(sizes, LATENT_EPSILON, vector, latent->query_norm, sizes->query_rank, vector);
        }
        from = room->down;
    }
    linear(frame, &latent->query, num_rows, from, room->queries, latent->query.columns, rounds);
}

// Stores a position's normed latent vector, the rotated part of its key, and an indexer's key if there is one.
static void keep_latent(const latent_weights *latent, const attention *attention, int place, int group, int row,
                        const float *angles, const float *key, const float *index_key) {
    const decoder_sizes *sizes = &latent->sizes;
    float *kept = __builtin_alloca(sizeof(float) * (size_t)(sizes->head_dim + 2 * LANES));
    norm_with(sizes, LATENT_EPSILON, key, latent->key_norm, sizes->latent_rank, kept);
    rotate(key + sizes->latent_rank, angles, turned_dim(sizes), sizes->element == BF16, kept + sizes->latent_rank);
    for (int i = 0; i < sizes->index_dim; i++) kept[latent_key_dim(sizes) + i] = index_key ? index_key[i] : 0.0f;
    attention_keep(attention, place, group, row, 0, false, kept);
}

// Rotates a row's queries, which follow their absorbed part, and passes both to attention and to `call->queries`.
static void take_queries(const latent_weights *latent, attention *attention, int group, int row, const float *angles,
                         const float *queries, float *absorbed, char *asked) {
    const decoder_sizes *sizes = &latent->sizes;
    long asked_bytes = (long)sizes->head_dim * (sizes->element == BF16 ? 2 : 4);
    float *turned = __builtin_alloca(sizeof(float) * (size_t)(turned_dim(sizes) + 2 * LANES));
    for (long head = 0; head < sizes->num_heads; head++) {
        float *query = absorbed + head * sizes->head_dim;
        rotate(queries + head * query_dim(sizes) + sizes->still_dim, angles, turned_dim(sizes), sizes->element == BF16, turned);
        memcpy(query + sizes->latent_rank, turned, sizeof(float) * (size_t)turned_dim(sizes));
        memset(query + latent_key_dim(sizes), 0, sizeof(float) * (size_t)sizes->index_dim);
        attention_query(attention, group, row, (int)head, query);
        if (asked) store((element)sizes->element, query, sizes->head_dim, asked + head * asked_bytes);
    }
}

static void keep_latents(const latent_weights *latent, const latent_room *room, const float *index_keys,
                         attention *attention, const forward_call *call, int place) {
    const decoder_sizes *sizes = &latent->sizes;
    long number = 0, heads = sizes->num_heads, row_bytes = heads * sizes->head_dim * (sizes->element == BF16 ? 2 : 4);
    for (int group = 0; group < call->num_groups; group++)
        for (int row = 0; row < call->groups[group].num_rows; row++, number++) {
            const float *angles = call->angles + (long)call->positions[number] * turned_dim(sizes);
            char *asked = call->queries;
            if (asked) asked += (place * call->num_rows + number) * row_bytes;
            const float *index_key = index_keys ? index_keys + number * sizes->index_dim : NULL;
            keep_latent(latent, attention, place, group, row, angles, room->down + number * latent_key_dim(sizes), index_key);
            take_queries(latent, attention, group, row, angles, room->queries + number * heads * query_dim(sizes),
                         room->absorbed + number * heads * sizes->head_dim, asked);
        }
}

const float *latent_run(frame *frame, const latent_weights *latent, const latent_room *room, index_room *index,
                        attention *attention, const attention_view *view, const forward_call *call, int place,
                        const float *normed, float *mixed) {
    const decoder_sizes *sizes = &latent->sizes;
    int num_rows = call->num_rows;
    bool has_indexer = index && latent->indexer.norm, rounds = sizes->element == BF16;
    queries_of(frame, latent, room, num_rows, normed);
    if (has_indexer) index_rows(frame, &latent->indexer, sizes, index, call, room->down, normed);
    multiply_groups_of_heads(frame, &latent->key_up, sizes->num_heads, rounds, num_rows, room->queries, query_dim(sizes),
                             room->absorbed, sizes->head_dim, room->gathered);
    linear(frame, &latent->key, num_rows, normed, room->down, latent_key_dim(sizes), rounds);
    keep_latents(latent, room, has_indexer ? index->keys : NULL, attention, call, place);
    if (has_indexer && index->chosen) index_choose(frame, sizes, index, call, attention, place);
    attention_run(index && index->chosen ? index->attention : attention, frame, place, view, mixed);
    multiply_groups_of_heads(frame, &latent->value_up, sizes->num_heads, rounds, num_rows, mixed, sizes->latent_rank,
                             room->queries, sizes->value_dim, room->gathered);
    return room->queries;
}
