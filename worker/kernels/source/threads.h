// A caller and its helpers. Work comes in stages of independent units; the caller takes units too and never waits for a
// thread that does not run: it repeats units that a helper claimed but did not finish in time.
#pragma once
#include <stddef.h>
#include "api.h"

#define MOST_UNITS 1088  // enough for a prefix of 2^21 keys

// Computes one unit into `slot`, with the same bits in every thread; `scratch` is the thread's own.
typedef void (*unit_function)(const void *job, int unit, void *slot, void *scratch);

// Memory of one call. A late helper may read it after the call has ended, so it is reused only when all helpers have
// left.
typedef struct frame frame;

// Freed by `free`; both end the process if memory is exhausted.
void *allocate_aligned(size_t alignment, size_t bytes);
void *allocate_clear(size_t bytes);  // 64-aligned zeros

frame *frame_open(team *team);
void frame_close(frame *frame);
// Returns memory until the frame is closed, 64-aligned and not cleared.
void *frame_take(frame *frame, size_t bytes);
// Keeps the results of the frame's last stage until it is closed.
void keep_slots(frame *frame);

typedef struct {
    int num_units;  // at most MOST_UNITS
    unit_function run;
    const void *job;  // `job_bytes` are copied; memory it points to must stay unchanged, or helpers may read it half changed
    size_t job_bytes, scratch_bytes, slot_bytes;
    void *own_slots;  // where the caller puts its units, or NULL: then its slot is NULL
    bool is_small;    // not worth waking helpers
} stage_plan;

// Runs all units; `results[unit]` is each one's slot, until the frame's next stage.
void run_stage(frame *frame, const stage_plan *plan, void **results);
