// Helpers claim units of work, and callers never wait for a helper that does not run.
#include "threads.h"

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "gemm.h"

#define MOST_JOB_BYTES 256
#define SPINS_IN_FRAME 4000     // polls for the next stage before yielding the core
#define SPINS_OUTSIDE 100000     // polls for the next call before sleeping
#define LEAST_PATIENCE 10e-6    // seconds that a helper may take beyond the time of two of the caller's units
#define FIRST_CHUNK (1u << 20)  // bytes

#if defined(__x86_64__)
#define PAUSE() __builtin_ia32_pause()
#else
#define PAUSE() atomic_signal_fence(memory_order_seq_cst)
#endif

typedef struct chunk {
    struct chunk *next;
    size_t size, used;  // bytes after the header
} chunk;

// Once open, only claims and finishes change, so a late helper reads nothing invalid.
typedef struct stage {
    struct stage *next;  // stages are reused by later calls
    unit_function run;
    int num_units;
    size_t scratch_bytes, slot_bytes;
    char *helper_slots;
    size_t bytes_per_helper;
    _Alignas(16) char job[MOST_JOB_BYTES];
    _Atomic unsigned char is_claimed[MOST_UNITS];
    _Atomic unsigned char finished_by[MOST_UNITS];  // 0, else 1 + the helper
} stage;

struct frame {
    frame *next;
    team *team;
    chunk *chunks;
    stage *stages, *last_stage;  // all, and the call's last one
    char *helper_slots;
    size_t bytes_per_helper;
    _Atomic(stage *) open_stage;
    atomic_int num_inside;
    bool has_helpers;
};

typedef struct {
    team *team;
    int number;
} helper;

struct team {
    int num_helpers, num_started;
    pid_t owner;
    frame *frames;
    void *scratch;
    size_t scratch_bytes;
    _Atomic(frame *) open_frame;
    atomic_int num_asleep;
    atomic_bool is_over;
    pthread_mutex_t lock;
    pthread_cond_t opened;
    helper *helpers;
    pthread_t *threads;
};

void *allocate_aligned(size_t alignment, size_t bytes) {
    bytes = (size_t)round_up((long)bytes, (long)alignment);
    void *memory = aligned_alloc(alignment, bytes);
    if (!memory) {
        fprintf(stderr, "swiftbatch: no memory for %zu bytes\n", bytes);
        abort();
    }
    return memory;
}

static void *allocate(size_t bytes) { return allocate_aligned(64, bytes); }

void *allocate_clear(size_t bytes) { return memset(allocate(bytes), 0, bytes); }

static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

// ---- memory of a frame

static chunk *chunk_new(size_t size) {
    chunk *fresh = allocate(sizeof(chunk) + 64 + size);
    *fresh = (chunk){.size = size};
    return fresh;
}

static void *chunk_take(chunk *chunk, size_t bytes) {
    char *start = (char *)(((uintptr_t)(chunk + 1) + 63) & ~(uintptr_t)63);
    void *memory = start + chunk->used;
    chunk->used += bytes;
    return memory;
}

void *frame_take(frame *frame, size_t bytes) {
    bytes = (size_t)round_up((long)bytes, 64);
    if (!frame->chunks || frame->chunks->size - frame->chunks->used < bytes) {
        size_t size = frame->chunks ? 2 * frame->chunks->size : FIRST_CHUNK;
        chunk *fresh = chunk_new(size > bytes ? size : bytes);
        fresh->next = frame->chunks;
        frame->chunks = fresh;
    }
    return chunk_take(frame->chunks, bytes);
}

void keep_slots(frame *frame) {
    frame->helper_slots = NULL;
    frame->bytes_per_helper = 0;
}

// A call that needed several chunks leaves a single one of their size to the next.
static void frame_clear(frame *frame) {
    size_t total = 0;
    bool is_whole = frame->chunks && !frame->chunks->next;
    while (frame->chunks && !is_whole) {
        chunk *first = frame->chunks;
        total += first->size;
        frame->chunks = first->next;
        free(first);
    }
    if (total) frame->chunks = chunk_new(total);
    if (frame->chunks) frame->chunks->used = 0;
    frame->last_stage = NULL;
    keep_slots(frame);
}

static void frame_free(frame *frame) {
    while (frame->chunks) {
        chunk *first = frame->chunks;
        frame->chunks = first->next;
        free(first);
    }
    while (frame->stages) {
        stage *first = frame->stages;
        frame->stages = first->next;
        free(first);
    }
    free(frame);
}

// ---- units

// Where a thread looks for units: first in its own share of a stage, to read one stretch of weights, then in others'.
typedef struct {
    stage *stage;
    int next, num_left;
} unit_search;

static unit_search search_from(stage *stage, int thread, int num_threads) {
    return (unit_search){stage, (int)((long)thread * stage->num_units / num_threads), stage->num_units};
}

// Claims a unit for this thread; -1 if all are claimed.
static int claim_unit(unit_search *search) {
    for (; search->num_left > 0; search->num_left--) {
        int unit = search->next;
        _Atomic unsigned char *is_claimed = &search->stage->is_claimed[unit];
        search->next = unit + 1 < search->stage->num_units ? unit + 1 : 0;
        if (atomic_load_explicit(is_claimed, memory_order_relaxed) || atomic_exchange(is_claimed, 1)) continue;
        search->num_left--;
        return unit;
    }
    return -1;
}

// ---- helpers

static void help(team *team, frame *frame, int number, void **scratch, size_t *scratch_bytes) {
    stage *seen = NULL;
    for (int spins = 0; atomic_load(&team->open_frame) == frame;) {
        stage *stage = atomic_load(&frame->open_stage);
        if (!stage || stage == seen) {
            if (++spins < SPINS_IN_FRAME) PAUSE();
            else sched_yield();
            continue;
        }
        seen = stage;
        spins = 0;
        if (*scratch_bytes < stage->scratch_bytes) {
            free(*scratch);
            *scratch = allocate_clear(*scratch_bytes = stage->scratch_bytes);
        }
        char *slots = stage->helper_slots + (size_t)number * stage->bytes_per_helper;
        unit_search search = search_from(stage, 1 + number, 1 + team->num_helpers);
        for (int unit; (unit = claim_unit(&search)) >= 0;) {
            stage->run(stage->job, unit, slots + (size_t)unit * stage->slot_bytes, *scratch);
            atomic_store(&stage->finished_by[unit], (unsigned char)(1 + number));
            if (atomic_load(&team->open_frame) != frame) return;
        }
    }
}

static frame *next_frame(team *team) {
    for (int spins = 0; spins < SPINS_OUTSIDE; spins++) {
        frame *frame = atomic_load(&team->open_frame);
        if (frame || atomic_load(&team->is_over)) return frame;
        PAUSE();
    }
    pthread_mutex_lock(&team->lock);
    atomic_fetch_add(&team->num_asleep, 1);
    frame *frame;
    while (!(frame = atomic_load(&team->open_frame)) && !atomic_load(&team->is_over))
        pthread_cond_wait(&team->opened, &team->lock);
    atomic_fetch_sub(&team->num_asleep, 1);
    pthread_mutex_unlock(&team->lock);
    return frame;
}

static void *helper_main(void *argument) {
    helper *self = argument;
    team *team = self->team;
    void *scratch = NULL;
    size_t scratch_bytes = 0;
    while (!atomic_load(&team->is_over)) {
        frame *frame = next_frame(team);
        if (!frame) continue;
        atomic_fetch_add(&frame->num_inside, 1);
        if (atomic_load(&team->open_frame) == frame) {
            machine_begin();
            help(team, frame, self->number, &scratch, &scratch_bytes);
            machine_end();
        }
        atomic_fetch_sub(&frame->num_inside, 1);
    }
    free(scratch);
    return NULL;
}

static void wake_all(team *team) {
    if (!atomic_load(&team->num_asleep)) return;
    pthread_mutex_lock(&team->lock);
    pthread_cond_broadcast(&team->opened);
    pthread_mutex_unlock(&team->lock);
}

// Resets the team in the child of a fork, which has only the calling thread.
static void settle(team *team) {
    if (team->owner == getpid()) return;
    team->owner = getpid();
    team->frames = NULL;
    team->num_started = 0;
    atomic_store(&team->open_frame, NULL);
    atomic_store(&team->num_asleep, 0);
    pthread_mutex_init(&team->lock, NULL);
    pthread_cond_init(&team->opened, NULL);
}

static bool start_helpers(team *team) {
    for (int i = team->num_started; i < team->num_helpers; i++) {
        team->helpers[i] = (helper){team, i};
        if (pthread_create(&team->threads[i], NULL, helper_main, &team->helpers[i])) break;
        team->num_started++;
    }
    return team->num_started > 0;
}

// ---- what callers use

team *team_new(int num_threads) {
    team *fresh = allocate_clear(sizeof(team));
    fresh->num_helpers = num_threads - 1;
    fresh->helpers = allocate_clear(sizeof(helper) * (size_t)num_threads);
    fresh->threads = allocate_clear(sizeof(pthread_t) * (size_t)num_threads);
    return fresh;
}

void team_free(team *team) {
    atomic_store(&team->is_over, true);
    if (team->owner == getpid()) {
        pthread_mutex_lock(&team->lock);
        pthread_cond_broadcast(&team->opened);
        pthread_mutex_unlock(&team->lock);
        for (int i = 0; i < team->num_started; i++) pthread_join(team->threads[i], NULL);
        while (team->frames) {
            frame *first = team->frames;
            team->frames = first->next;
            frame_free(first);
        }
    }
    free(team->helpers);
    free(team->threads);
    free(team->scratch);
    free(team);
}

int team_is_busy(team *team) {
    for (frame *frame = team->frames; frame; frame = frame->next)
        if (atomic_load(&frame->num_inside)) return 1;
    return 0;
}

frame *frame_open(team *team) {
    settle(team);
    frame *free_one = team->frames;
    while (free_one && atomic_load(&free_one->num_inside)) free_one = free_one->next;
    if (!free_one) {
        free_one = allocate_clear(sizeof(frame));
        free_one->team = team;
        free_one->next = team->frames;
        team->frames = free_one;
    }
    frame_clear(free_one);
    atomic_store(&free_one->open_stage, NULL);
    free_one->has_helpers = false;
    machine_begin();
    return free_one;
}

void frame_close(frame *frame) {
    machine_end();
    atomic_store(&frame->team->open_frame, NULL);
    for (int spins = 0; spins < 1000 && atomic_load(&frame->num_inside); spins++) PAUSE();
}

static void *own_scratch(team *team, size_t bytes) {
    if (team->scratch_bytes < bytes) {
        free(team->scratch);
        team->scratch = allocate_clear(team->scratch_bytes = bytes);
    }
    return team->scratch;
}

static stage *stage_of(frame *frame, const stage_plan *plan) {
    stage **place = frame->last_stage ? &frame->last_stage->next : &frame->stages;
    if (!*place) *place = allocate_clear(sizeof(stage));
    stage *fresh = frame->last_stage = *place;
    size_t bytes_per_helper = (size_t)plan->num_units * plan->slot_bytes;
    if (frame->bytes_per_helper < bytes_per_helper) {
        frame->helper_slots = frame_take(frame, bytes_per_helper * (size_t)frame->team->num_helpers);
        frame->bytes_per_helper = bytes_per_helper;
    }
    fresh->run = plan->run;
    fresh->num_units = plan->num_units;
    fresh->scratch_bytes = plan->scratch_bytes;
    fresh->slot_bytes = plan->slot_bytes;
    fresh->helper_slots = frame->helper_slots;
    fresh->bytes_per_helper = frame->bytes_per_helper;
    memcpy(fresh->job, plan->job, plan->job_bytes);
    for (int i = 0; i < plan->num_units; i++) {
        atomic_store_explicit(&fresh->is_claimed[i], 0, memory_order_relaxed);
        atomic_store_explicit(&fresh->finished_by[i], 0, memory_order_relaxed);
    }
    return fresh;
}

static void *own_slot(const stage_plan *plan, int unit) {
    return plan->own_slots ? (char *)plan->own_slots + (size_t)unit * plan->slot_bytes : NULL;
}

static void run_alone(const stage_plan *plan, void *scratch, void **results) {
    for (int unit = 0; unit < plan->num_units; unit++)
        plan->run(plan->job, unit, results[unit] = own_slot(plan, unit), scratch);
}

// Returns the helper that finishes the unit before the deadline, or -1.
static int awaited(stage *stage, int unit, double deadline) {
    do {
        int finished_by = atomic_load(&stage->finished_by[unit]);
        if (finished_by) return finished_by - 1;
        PAUSE();
    } while (now() < deadline);
    return -1;
}

void run_stage(frame *frame, const stage_plan *plan, void **results) {
    team *team = frame->team;
    void *scratch = own_scratch(team, plan->scratch_bytes);
    if (plan->is_small || plan->num_units < 2 || !start_helpers(team)) {
        run_alone(plan, scratch, results);
        return;
    }
    stage *stage = stage_of(frame, plan);
    atomic_store(&frame->open_stage, stage);
    if (!frame->has_helpers) {
        frame->has_helpers = true;
        atomic_store(&team->open_frame, frame);
        wake_all(team);
    }
    bool is_mine[MOST_UNITS] = {false};
    int num_mine = 0;
    double start = now();
    unit_search search = search_from(stage, 0, 1 + team->num_helpers);
    for (int unit; (unit = claim_unit(&search)) >= 0; num_mine++) {
        plan->run(plan->job, unit, results[unit] = own_slot(plan, unit), scratch);
        is_mine[unit] = true;
    }
    double end = now(), deadline = end + LEAST_PATIENCE + 2 * (end - start) / (num_mine ? num_mine : 1);
    for (int unit = 0; unit < plan->num_units; unit++) {
        if (is_mine[unit]) continue;
        int helper = awaited(stage, unit, deadline);
        if (helper >= 0)
            results[unit] = stage->helper_slots + (size_t)helper * stage->bytes_per_helper + (size_t)unit * plan->slot_bytes;
        else plan->run(plan->job, unit, results[unit] = own_slot(plan, unit), scratch);
    }
}
