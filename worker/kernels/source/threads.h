// A caller and its helpers. Work comes in stages of independent units; the caller takes units like everyone else and
// never waits for a thread that does not run: what a helper took and does not bring in time, the caller does again.
#pragma once
#include <stddef.h>
#include "api.h"

#define MOST_UNITS 1088  // a prefix of 2^21 keys, and more

// Computes one unit into `slot`, the same bits whoever does it; `scratch` is the thread's own.
typedef void (*unit_function)(const void *job, int unit, void *slot, void *scratch);

// Memory of one call, which a late helper may look at after the call has ended: it is used again when all have left.
typedef struct frame frame;

// For `free`; both end the process where there is no memory.
void *allocate_aligned(size_t alignment, size_t bytes);
void *allocate_clear(size_t bytes);  // 64-aligned zeros

frame *frame_open(team *team);
void frame_close(frame *frame);
// Memory until the frame is closed, 64-aligned and not cleared.
void *frame_take(frame *frame, size_t bytes);
// The results of the frame's last stage stay until it is closed.
void keep_slots(frame *frame);

typedef struct {
    int num_units;  // at most MOST_UNITS
    unit_function run;
    const void *job;  // `job_bytes` that are copied; what it points to stays as it is, or may be read half changed
    size_t job_bytes, scratch_bytes, slot_bytes;
    void *own_slots;  // where the caller puts its units, or NULL: then it gets NULL as its slot
    bool is_small;    // not worth waking anybody
} stage_plan;

// Runs all units; `results[unit]` says in which slot each one lies, until the frame's next stage.
void run_stage(frame *frame, const stage_plan *plan, void **results);
