// Gradients of causal attention: splits keys into ranges, and writes the ranges' results.
#include "causal_gradients.h"

#if HAS_CAUSAL_ATTENTION
// Most ranges of one head's keys; units that make more ranges unnecessary; fewest blocks of a range.
enum { MOST_RANGES = 8, ENOUGH_UNITS = 32, LEAST_RANGE = 2 };
enum { MOST_QUERY_UNITS = 512, MOST_PART_BYTES = 256 << 20 };  // bytes of ranges of pairs that run together

static void write_key_gradients(const backward_job *job) {
    const causal_call *call = job->call;
    int before = blocks_before(call);
    for (int unit = 0; unit < job->num_ranges * job->num_pairs; unit++) {
        int range = unit / job->num_pairs, pair = job->first_pair + unit % job->num_pairs;
        int first = job->range_starts[range];
        int batch = pair / call->num_kv_heads, head = pair % call->num_kv_heads;
        for (int i = first < before ? before - first : 0; first + i < job->range_starts[range + 1]; i++) {
            const bf16 *keys = key_gradients(job->parts[unit]), *values = value_gradients(job, job->parts[unit]);
            scatter_rows(call, keys + (long)i * AREA, &call->key_gradient, batch, head, first + i - before);
            scatter_rows(call, values + (long)i * AREA, &call->value_gradient, batch, head, first + i - before);
        }
    }
}

static void write_query_gradients(const backward_job *job, void **results) {
    const causal_call *call = job->call;
    int group = group_of(call), num_heads = job->num_pairs * group;
    for (int block = 0; block < job->num_blocks; block++) {
        const bf16 *rows = results[block / job->blocks_at_once];
        rows += (long)(block % job->blocks_at_once) * num_heads * AREA;
        for (int i = 0; i < num_heads; i++) {
            int head = job->first_pair * group + i, batch = head / call->num_heads;
            scatter_rows(call, rows + (long)i * AREA, &call->query_gradient, batch, head % call->num_heads, block);
        }
    }
}

// Returns the work of the blocks of keys before one: twice the number of query blocks that see them.
static long work_before(const backward_job *job, long block) {
    long count = job->num_blocks, before = blocks_before(job->call), left = before + count - block;
    return block < before ? 2 * count * block : 2 * count * before + count * count - left * left;
}

// Splits keys into ranges of about equal work.
static void split_keys(backward_job *job, int *starts) {
    long count = blocks_before(job->call) + job->num_blocks, whole = work_before(job, count);
    for (int range = 0, start = 0; range <= job->num_ranges; range++) {
        while (start < count && work_before(job, start) < whole * range / job->num_ranges) start++;
        starts[range] = start;
        if (range && start - starts[range - 1] > job->most_blocks) job->most_blocks = start - starts[range - 1];
    }
    job->range_starts = starts;
}

static void run_ranges(frame *frame, backward_job *job) {
    int num_units = job->num_ranges * job->num_pairs;
    stage_plan plan = {.num_units = num_units,
                       .run = range_unit,
                       .job = job,
                       .job_bytes = sizeof *job,
                       .scratch_bytes = gradient_scratch_bytes(),
                       .slot_bytes = range_bytes(job),
                       .is_small = is_small_call(job->call)};
    plan.own_slots = frame_take(frame, plan.slot_bytes * (size_t)num_units);
    job->parts = frame_take(frame, sizeof(void *) * (size_t)num_units);
    run_stage(frame, &plan, job->parts);
    keep_slots(frame);
    write_key_gradients(job);
}

static void sum_queries(frame *frame, backward_job *job) {
    job->blocks_at_once = (job->num_blocks + MOST_QUERY_UNITS - 1) / MOST_QUERY_UNITS;
    int num_heads = job->num_pairs * group_of(job->call);
    stage_plan plan = {.num_units = (job->num_blocks + job->blocks_at_once - 1) / job->blocks_at_once,
                       .run = query_unit,
                       .job = job,
                       .job_bytes = sizeof *job,
                       .scratch_bytes = gradient_scratch_bytes(),
                       .slot_bytes = sizeof(bf16) * AREA * (size_t)(job->blocks_at_once * num_heads),
                       .is_small = is_small_call(job->call)};
    plan.own_slots = frame_take(frame, plan.slot_bytes * (size_t)plan.num_units);
    void *results[MOST_QUERY_UNITS];
    run_stage(frame, &plan, results);
    write_query_gradients(job, results);
}

// Returns how many pairs of a batch and a key head units and their slots have room for.
static int pairs_at_once(const backward_job *job, int num_pairs) {
    size_t room = MOST_PART_BYTES / ((size_t)job->num_ranges * range_bytes(job));
    int most = MOST_UNITS / job->num_ranges;
    most = room < (size_t)most ? (int)room : most;
    most = most < num_pairs ? most : num_pairs;
    return most ? most : 1;
}

void causal_backward(team *team, const causal_call *call) {
    int starts[MOST_RANGES + 1], num_pairs = call->batch_size * call->num_kv_heads;
    backward_job job = {.call = call, .num_blocks = (call->length + SIDE - 1) / SIDE};
    int wanted = (ENOUGH_UNITS + num_pairs - 1) / num_pairs;
    int worthwhile = (blocks_before(call) + job.num_blocks) / LEAST_RANGE;
    job.num_ranges = wanted < MOST_RANGES ? wanted : MOST_RANGES;
    if (worthwhile < job.num_ranges) job.num_ranges = worthwhile ? worthwhile : 1;
    split_keys(&job, starts);
    for (int at_once = pairs_at_once(&job, num_pairs); job.first_pair < num_pairs; job.first_pair += at_once) {
        job.num_pairs = num_pairs - job.first_pair < at_once ? num_pairs - job.first_pair : at_once;
        frame *frame = frame_open(team);
        job.call = memcpy(frame_take(frame, sizeof *call), call, sizeof *call);
        job.range_starts = memcpy(frame_take(frame, sizeof starts), starts, sizeof starts);
        run_ranges(frame, &job);
        sum_queries(frame, &job);
        frame_close(frame);
        job.call = call;
    }
}
#endif
