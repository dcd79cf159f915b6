// Sorts rows by expert, multiplies each expert with its rows in panels that helpers may take, and sums by row.
//
// Products sum along the depth, whatever other rows there are, and a row's experts are added in the order of its
// choices: its bits depend on no other row.
#include "experts.h"

#include <stdlib.h>

#include "elementwise.h"
#include "heads.h"

// Rows whose experts are multiplied together, choices of these, rows per unit, fewest blocks of a panel.
enum { ROWS_OF_EXPERTS = 256, MOST_PAIRS = 2048, ROWS_OF_UNIT = 32, LEAST_PANEL = 8, EXPERTS_WORTH_HELP = 1 << 19 };
enum { GATHERED, ACTIVATED, WIDE_SLOTS, DOWN_SLOTS, LATENT_ROWS, LATENT_SUMS, FROM_LATENT, NORMED };

typedef struct {
    int32_t expert, first, count;  // range of pairs (row, choice), sorted by expert
} unit_rows;

typedef struct {
    unit_rows *units;
    int32_t *rows;    // [pairs] row of each
    int32_t *places;  // [num_rows, num_chosen] index of each of a row's pairs
    int32_t *owners;  // [pairs] unit of each
    int num_units, num_pairs;
} grouping;

experts *experts_new(const expert_sizes *sizes, const decoder_sizes *decoder) {
    experts *fresh = allocate_clear(sizeof(experts));
    int width = sizes->latent ? sizes->latent : decoder->hidden, columns = (1 + decoder->has_gates) * sizes->intermediate;
    *fresh = (experts){.sizes = *sizes,
                       .router = router_new(sizes, decoder->hidden),
                       .shared_gate = matrix_new(F32, decoder->hidden, 1),
                       .gate_up = allocate_clear(sizeof(matrix) * (size_t)sizes->num_experts),
                       .down = allocate_clear(sizeof(matrix) * (size_t)sizes->num_experts),
                       .latent_in = matrix_new((element)decoder->element, decoder->hidden, sizes->latent),
                       .latent_out = matrix_new((element)decoder->element, sizes->latent, decoder->hidden),
                       .decoder = *decoder,
                       .width = width};
    for (int i = 0; i < sizes->num_experts; i++) {
        fresh->gate_up[i] = matrix_new((element)decoder->element, width, columns);
        fresh->down[i] = matrix_new((element)decoder->element, sizes->intermediate, width);
    }
    return fresh;
}

void experts_free(experts *experts) {
    if (!experts) return;
    for (int i = 0; i < experts->sizes.num_experts; i++) {
        matrix_free(&experts->gate_up[i]);
        matrix_free(&experts->down[i]);
    }
    router_free(&experts->router);
    matrix_free(&experts->shared_gate);
    matrix_free(&experts->latent_in);
    matrix_free(&experts->latent_out);
    free(experts->router_scale);
    free(experts->front_norm);
    free(experts->behind_norm);
    free(experts->gate_up);
    free(experts->down);
    free(experts);
}

typedef struct {
    matrix *matrix;
    columns_kind kind;
    int num_columns;
} expert_columns;

static expert_columns weight_columns(experts *experts, expert_role role, int expert) {
    int gates = experts->decoder.has_gates, intermediate = experts->sizes.intermediate;
    switch (role) {
        case EXPERT_GATE: return (expert_columns){&experts->gate_up[expert], FIRST_IN_TURN, intermediate};
        case EXPERT_UP: return (expert_columns){&experts->gate_up[expert], gates ? SECOND_IN_TURN : ALONE, intermediate};
        case EXPERT_DOWN: return (expert_columns){&experts->down[expert], ALONE, experts->width};
        case LATENT_IN: return (expert_columns){&experts->latent_in, ALONE, experts->width};
        default: return (expert_columns){&experts->latent_out, ALONE, experts->decoder.hidden};
    }
}

// All experts' matrices of a kind read rows of one form.
static void share_form_of_rows(experts *experts, expert_role role) {
    matrix *matrices = role == EXPERT_DOWN ? experts->down : experts->gate_up;
    for (int i = 0; i < experts->sizes.num_experts; i++) matrices[i].has_integers = true;
}

void experts_load(experts *experts, expert_role role, int expert, const given_weight *given) {
    int count = experts->sizes.num_experts;
    size_t num_choices = (size_t)experts->decoder.vocab * (size_t)experts->sizes.num_chosen;
    switch (role) {
        case CHOICES:
            experts->router.choices = memcpy(realloc(experts->router.choices, 4 * num_choices), given->numbers, 4 * num_choices);
            break;
        case ROUTER: matrix_load(&experts->router.weight, 0, ALONE, count, given); break;
        case CHOICE_BIAS: floats_load(&experts->router.choice_bias, count, given->numbers); break;
        case CHOICE_SCALES: floats_load(&experts->router.choice_scales, count, given->numbers); break;
        case ROUTER_SCALE: floats_load(&experts->router_scale, experts->decoder.hidden, given->numbers); break;
        case FRONT_NORM: norm_load(&experts->decoder, &experts->front_norm, experts->decoder.hidden, given->numbers); break;
        case BEHIND_NORM: norm_load(&experts->decoder, &experts->behind_norm, experts->decoder.hidden, given->numbers); break;
        case SHARED_GATE:
            experts->has_shared_gate = true;
            matrix_load(&experts->shared_gate, 0, ALONE, 1, given);
            break;
        default: {
            expert_columns to = weight_columns(experts, role, expert);
            matrix_load(to.matrix, 0, to.kind, to.num_columns, given);
            if (to.matrix->has_integers && role <= EXPERT_DOWN) share_form_of_rows(experts, role);
        }
    }
}

// ---- rows by expert

static void *room_for(frame *frame, expert_room *room, int place, size_t bytes) {
    if (room->bytes[place] < bytes) {
        room->bytes[place] = 2 * bytes;
        room->places[place] = frame_take(frame, 2 * bytes);
    }
    return room->places[place];
}

static int num_met(const int32_t *starts, int num_experts) {
    int found = 0;
    for (int expert = 0; expert < num_experts; expert++) found += starts[expert] < starts[expert + 1];
    return found;
}

// Returns where each expert's pairs begin; helpers read only what stays unchanged until the frame is closed.
static int32_t *starts_of(frame *frame, int num_experts, const int32_t *choices, int num_pairs) {
    int32_t *starts = frame_take(frame, sizeof(int32_t) * (size_t)(num_experts + 1));
    memset(starts, 0, sizeof(int32_t) * (size_t)(num_experts + 1));
    for (int i = 0; i < num_pairs; i++) starts[choices[i] + 1]++;
    for (int i = 0; i < num_experts; i++) starts[i + 1] += starts[i];
    return starts;
}

static void place_pairs(const int32_t *starts, const int32_t *choices, int num_experts, int num_chosen, grouping *to) {
    int32_t next[MOST_EXPERTS];
    memcpy(next, starts, sizeof(int32_t) * (size_t)num_experts);
    for (int i = 0; i < to->num_pairs; i++) {
        int32_t place = next[choices[i]]++;
        to->places[i] = place;
        to->rows[place] = i / num_chosen;
    }
}

static void add_expert_units(const int32_t *starts, int num_experts, grouping *to) {
    for (int expert = 0; expert < num_experts; expert++)
        for (int first = starts[expert]; first < starts[expert + 1]; first += ROWS_OF_UNIT) {
            int left = starts[expert + 1] - first, count = left < ROWS_OF_UNIT ? left : ROWS_OF_UNIT;
            for (int i = 0; i < count; i++) to->owners[first + i] = to->num_units;
            to->units[to->num_units++] = (unit_rows){expert, first, count};
        }
}

static grouping group_rows(frame *frame, const expert_sizes *sizes, int num_rows, const int32_t *choices,
                           expert_room *room) {
    size_t pairs = (size_t)num_rows * (size_t)sizes->num_chosen, bytes = sizeof(int32_t) * pairs;
    grouping fresh = {.units = frame_take(frame, sizeof(unit_rows) * pairs),
                      .rows = frame_take(frame, bytes),
                      .places = frame_take(frame, bytes),
                      .owners = frame_take(frame, bytes),
                      .num_pairs = (int)pairs};
    int32_t *starts = starts_of(frame, sizes->num_experts, choices, fresh.num_pairs);
    place_pairs(starts, choices, sizes->num_experts, sizes->num_chosen, &fresh);
    add_expert_units(starts, sizes->num_experts, &fresh);
    room->num_met += num_met(starts, sizes->num_experts);
    return fresh;
}

// ---- products

typedef struct {
    const matrix *matrices;  // of the experts
    const unit_rows *units;
    const char *rows;  // of all pairs, as products take them
    long row_bytes;
    int num_panels, blocks;  // per matrix; per panel
    gate_form gates;
    bool activates, has_gates, rounds;
} grouped_job;

static int blocks_of_panel(const grouped_job *job, const unit_rows *unit, int panel) {
    int left = job->matrices[unit->expert].columns / LANES - panel * job->blocks;
    return left < job->blocks ? left : job->blocks;
}

static void multiply_expert_unit(const grouped_job *job, const unit_rows *unit, int panel, float *out, void *scratch) {
    const matrix *matrix = &job->matrices[unit->expert];
    int first = panel * job->blocks, blocks = blocks_of_panel(job, unit, panel);
    long stride = (long)job->blocks * LANES;
    const char *rows = job->rows + unit->first * job->row_bytes;
    multiply_panel(matrix, first, blocks, unit->count, rows, out, stride, scratch);
    finish_panel(matrix, first, blocks, unit->count, out, stride, job->rounds);
}

// Activates a row of a panel: gates and ups alternate and give half as many numbers, or there are only ups.
static void activate_row(const grouped_job *job, const float *row, int count, float *out) {
    if (!job->has_gates) {
        for (int i = 0; i < count; i += LANES)
            vec_store(out + i, rounded(job->rounds, activated(job->gates.activation, NULL, vec_load(row + i))));
        return;
    }
    for (int turn = 0, wide; turn < count / 2; turn += wide) {
        wide = count / 2 - turn < TURN ? count / 2 - turn : TURN;
        const float *gates = row + 2 * turn;
        for (int i = 0; i < wide; i += LANES)
            vec_store(out + turn + i, rounded(job->rounds, gated(&job->gates, vec_load(gates + i), vec_load(gates + wide + i))));
    }
}

static void run_expert_unit(const void *job, int number, void *slot, void *scratch) {
    const grouped_job *all = job;
    const unit_rows *unit = &all->units[number / all->num_panels];
    int panel = number % all->num_panels;
    if (!all->activates) {
        multiply_expert_unit(all, unit, panel, slot, scratch);
        return;
    }
    float *wide = scratch, *to = slot;
    long stride = (long)all->blocks * LANES, parts = 1 + all->has_gates;
    multiply_expert_unit(all, unit, panel, wide, wide + ROWS_OF_UNIT * stride);
    for (int row = 0; row < unit->count; row++)
        activate_row(all, wide + row * stride, blocks_of_panel(all, unit, panel) * LANES, to + row * stride / parts);
}

static int panel_blocks(int all_blocks, int num_units) {
    int blocks = LEAST_PANEL;
    while ((long)num_units * ((all_blocks + blocks - 1) / blocks) > MOST_UNITS) blocks += LEAST_PANEL;
    return blocks;
}

// Multiplies all experts with their rows; `results` by unit, then by panel.
static grouped_job multiply_groups(frame *frame, const experts *experts, const grouping *groups, bool activates,
                                   const void *rows, expert_room *room, bool rounds, void **results) {
    const matrix *matrices = activates ? experts->gate_up : experts->down;
    grouped_job job = {.matrices = matrices,
                       .units = groups->units,
                       .rows = rows,
                       .row_bytes = (long)multiplied_bytes(matrices),
                       .blocks = panel_blocks(matrices->columns / LANES, groups->num_units),
                       .gates = {(activation)experts->decoder.activation, NULL, experts->sizes.gate_limit, experts->sizes.gate_slope, rounds},
                       .activates = activates,
                       .has_gates = experts->decoder.has_gates,
                       .rounds = rounds};
    job.num_panels = (matrices->columns / LANES + job.blocks - 1) / job.blocks;
    size_t panel_bytes = sizeof(float) * ROWS_OF_UNIT * (size_t)job.blocks * LANES;
    stage_plan plan = {.num_units = groups->num_units * job.num_panels,
                       .run = run_expert_unit,
                       .job = &job,
                       .job_bytes = sizeof job,
                       .scratch_bytes = (activates ? panel_bytes : 0) + quantized_scratch_bytes(),
                       .slot_bytes = panel_bytes / (activates && experts->decoder.has_gates ? 2 : 1)};
    plan.is_small = (groups->num_pairs + 4L * groups->num_units) * matrices->depth * matrices->columns < EXPERTS_WORTH_HELP;
    size_t bytes = (size_t)plan.num_units * plan.slot_bytes;
    plan.own_slots = room_for(frame, room, activates ? WIDE_SLOTS : DOWN_SLOTS, bytes);
    run_stage(frame, &plan, results);
    return job;
}

// ---- a layer

// Returns the rows of all pairs; products read up to sixteen rows at once.
static const void *rows_of_pairs(frame *frame, const experts *experts, const grouping *groups, const float *rows,
                               expert_room *room) {
    size_t bytes = multiplied_bytes(experts->gate_up);
    char *to = room_for(frame, room, GATHERED, bytes * (size_t)(groups->num_pairs + LANES));
    for (int i = 0; i < groups->num_pairs; i++)
        multiplied_row(experts->gate_up, rows + (long)groups->rows[i] * experts->width, to + (size_t)i * bytes);
    return to;
}

static const void *gather_activated(frame *frame, const experts *experts, const grouping *groups,
                                    const grouped_job *job, void **results, expert_room *room) {
    size_t bytes = multiplied_bytes(experts->down);
    long stride = job->blocks * LANES / (1 + experts->decoder.has_gates), width = experts->sizes.intermediate;
    char *to = room_for(frame, room, ACTIVATED, bytes * (size_t)(groups->num_pairs + LANES));
    float *whole = frame_take(frame, sizeof(float) * (size_t)(width + stride));
    for (int i = 0; i < groups->num_pairs; i++) {
        int owner = groups->owners[i], within = i - groups->units[owner].first;
        for (int panel = 0; panel < job->num_panels; panel++) {
            const float *from = results[owner * job->num_panels + panel];
            memcpy(whole + panel * stride, from + within * stride, sizeof(float) * (size_t)stride);
        }
        multiplied_row(experts->down, whole, to + (size_t)i * bytes);
    }
    return to;
}

static void sum_row(const experts *experts, const grouping *groups, const grouped_job *job, void **results,
                    const int32_t *places, const float *weights, bool rounds, float *out) {
    long stride = (long)job->blocks * LANES;
    for (int i = 0; i < experts->width; i += LANES) {
        vec sum = vec_set(0.0f);
        for (int choice = 0; choice < experts->sizes.num_chosen; choice++) {
            int owner = groups->owners[places[choice]], within = places[choice] - groups->units[owner].first;
            const float *from = results[owner * job->num_panels + (int)(i / stride)];
            sum = vec_add(sum, vec_mul(vec_load(from + within * stride + i % stride), vec_set(weights[choice])));
        }
        vec_store(out + i, rounded(rounds, sum));
    }
}

// Runs the expert that all rows use, times each row's share if there is a gate.
static void share_out(frame *frame, const experts *experts, int num_rows, const float *rows, bool rounds, float *out) {
    if (!experts->has_shared_gate) return;
    float *shares = frame_take(frame, sizeof(float) * (size_t)num_rows * LANES);
    linear(frame, &experts->shared_gate, num_rows, rows, shares, LANES, rounds);
    for (long row = 0; row < num_rows; row++) {
        vec share = rounded(rounds, vec_set(sigmoid_of(shares[row * LANES])));
        float *numbers = out + row * experts->decoder.hidden;
        for (int i = 0; i < experts->decoder.hidden; i += LANES)
            vec_store(numbers + i, rounded(rounds, vec_mul(vec_load(numbers + i), share)));
    }
}

// Returns what the router reads: the rows, or normed without weights, times a scale and the root of one by their width.
static const float *router_rows(frame *frame, const experts *experts, expert_room *room, int num_rows, const float *rows,
                                bool rounds) {
    int hidden = experts->decoder.hidden;
    if (!experts->router_scale) return rows;
    float *scaled = room_for(frame, room, NORMED, sizeof(float) * (size_t)num_rows * (size_t)hidden);
    for (long row = 0; row < num_rows; row++) {
        float *to = scaled + row * hidden;
        norm(&experts->decoder, rows + row * hidden, NULL, hidden, to);
        for (int i = 0; i < hidden; i += LANES)
            vec_store(to + i, rounded(rounds, vec_mul(vec_load(to + i), vec_load(experts->router_scale + i))));
        scale_numbers(to, hidden, (float)(1.0 / __builtin_sqrt((double)hidden)), rounds);
    }
    return scaled;
}

// Returns the rows in front of experts.
static const float *normed_rows(frame *frame, const experts *experts, expert_room *room, int num_rows, const float *rows) {
    size_t hidden = (size_t)experts->decoder.hidden;
    if (!experts->front_norm) return rows;
    float *normed = room_for(frame, room, NORMED, sizeof(float) * (size_t)num_rows * hidden);
    for (size_t row = 0; row < (size_t)num_rows; row++)
        norm(&experts->decoder, rows + row * hidden, experts->front_norm, (int)hidden, normed + row * hidden);
    return normed;
}

// Returns what experts read of rows.
static const float *latent_rows(frame *frame, const experts *experts, expert_room *room, int num_rows, const float *rows,
                                bool rounds) {
    if (!experts->sizes.latent) return rows;
    float *read = room_for(frame, room, LATENT_ROWS, sizeof(float) * (size_t)num_rows * (size_t)experts->width);
    linear(frame, &experts->latent_in, num_rows, rows, read, experts->width, rounds);
    return read;
}

// Returns where sums of a row's experts go: directly to `out` if nothing follows and nothing is added.
static float *sums_place(frame *frame, const experts *experts, expert_room *room, int num_rows, float *out) {
    if (!experts->sizes.latent && !experts->sizes.shared_intermediate) return out;
    return room_for(frame, room, LATENT_SUMS, sizeof(float) * (size_t)num_rows * (size_t)experts->width);
}

// Turns sums into rows, and adds them to the output of the expert that all rows use, if any.
static void add_sums(frame *frame, const experts *experts, expert_room *room, int num_rows, const float *rows,
                     float *sums, bool rounds, float *out) {
    size_t count = (size_t)num_rows * (size_t)experts->decoder.hidden;
    bool has_shared = experts->sizes.shared_intermediate;
    if (experts->sizes.latent) {
        float *found = has_shared ? room_for(frame, room, FROM_LATENT, sizeof(float) * count) : out;
        linear(frame, &experts->latent_out, num_rows, sums, found, experts->decoder.hidden, rounds);
        sums = found;
    }
    for (size_t row = 0; row < (size_t)num_rows && experts->behind_norm; row++) {
        float *sum = sums + row * (size_t)experts->decoder.hidden;
        norm(&experts->decoder, sum, experts->behind_norm, experts->decoder.hidden, sum);
    }
    if (!has_shared) return;
    share_out(frame, experts, num_rows, rows, rounds, out);
    add(out, sums, (long)count, rounds);
}

static void run_block(frame *frame, const experts *experts, expert_room *room, int num_rows, const float *rows,
                      const int32_t *token_ids, bool rounds, float *out) {
    int num_chosen = experts->sizes.num_chosen;
    size_t pairs = (size_t)num_rows * (size_t)num_chosen;
    int32_t *choices = frame_take(frame, sizeof(int32_t) * pairs);
    float *weights = frame_take(frame, sizeof(float) * pairs);
    void *results[MOST_UNITS];
    const float *read = router_rows(frame, experts, room, num_rows, rows, rounds);
    route(frame, &experts->router, num_rows, read, token_ids, rounds, choices, weights);
    rows = normed_rows(frame, experts, room, num_rows, rows);
    grouping groups = group_rows(frame, &experts->sizes, num_rows, choices, room);
    const void *gathered = rows_of_pairs(frame, experts, &groups, latent_rows(frame, experts, room, num_rows, rows, rounds), room);
    grouped_job job = multiply_groups(frame, experts, &groups, true, gathered, room, rounds, results);
    gathered = gather_activated(frame, experts, &groups, &job, results, room);
    job = multiply_groups(frame, experts, &groups, false, gathered, room, rounds, results);
    float *sums = sums_place(frame, experts, room, num_rows, out);
    for (long row = 0; row < num_rows; row++)
        sum_row(experts, &groups, &job, results, groups.places + row * num_chosen, weights + row * num_chosen, rounds,
                sums + row * experts->width);
    add_sums(frame, experts, room, num_rows, rows, sums, rounds, out);
}

void experts_run(frame *frame, const experts *experts, expert_room *room, int num_rows, const float *rows,
                 const int32_t *token_ids, bool rounds, float *out) {
    int most = MOST_PAIRS / experts->sizes.num_chosen;
    if (most > ROWS_OF_EXPERTS) most = ROWS_OF_EXPERTS;
    for (int first = 0; first < num_rows; first += most) {
        int count = num_rows - first < most ? num_rows - first : most;
        long offset = (long)first * experts->decoder.hidden;
        run_block(frame, experts, room, count, rows + offset, token_ids + first, rounds, out + offset);
    }
}
