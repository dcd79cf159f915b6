// Regions shared by weights, each freed with the last of its weights.
#include "weights_memory.h"

#include <pthread.h>
#include <stdlib.h>
#include <sys/mman.h>

#include "threads.h"

#if defined(__SANITIZE_ADDRESS__)
#define HAS_SANITIZER 1
#elif defined(__has_feature)
#define HAS_SANITIZER __has_feature(address_sanitizer)
#else
#define HAS_SANITIZER 0
#endif

enum { LARGE_PAGE = 2 << 20, REGION_BYTES = 32 << 20, HEADER_BYTES = 64 };

typedef struct {
    size_t size, used;
    int num_held;
} region;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static region *open_region;  // where the next weights go, or NULL

static region *region_new(size_t least) {
    size_t size = (size_t)round_up((long)(least > REGION_BYTES ? least : REGION_BYTES), LARGE_PAGE);
    region *fresh = allocate_aligned(LARGE_PAGE, size);
#if defined(MADV_HUGEPAGE)
    madvise(fresh, size, MADV_HUGEPAGE);  // optional: fails on systems without huge pages
#endif
    *fresh = (region){.size = size, .used = HEADER_BYTES};
    return fresh;
}

// Returns room for a header and `bytes` after it.
static char *take_from_region(size_t bytes) {
    if (!open_region || open_region->size - open_region->used < HEADER_BYTES + bytes) {
        region *fresh = region_new(2 * HEADER_BYTES + bytes);
        if (open_region && open_region->num_held == 0) free(open_region);
        open_region = fresh;
    }
    char *header = (char *)open_region + open_region->used;
    open_region->used += HEADER_BYTES + bytes;
    open_region->num_held++;
    memcpy(header, &open_region, sizeof open_region);
    return header + HEADER_BYTES;
}

void *weights_take(size_t bytes) {
    bytes = (size_t)round_up((long)bytes, HEADER_BYTES);
    if (HAS_SANITIZER) return allocate_clear(bytes);  // the sanitizer sees no out-of-bounds reads within a region
    pthread_mutex_lock(&lock);
    char *memory = take_from_region(bytes);
    pthread_mutex_unlock(&lock);
    return memset(memory, 0, bytes);
}

void weights_give_back(void *memory) {
    if (HAS_SANITIZER || !memory) {
        free(memory);
        return;
    }
    region *owner;
    memcpy(&owner, (char *)memory - HEADER_BYTES, sizeof owner);
    pthread_mutex_lock(&lock);
    if (--owner->num_held == 0 && owner != open_region) free(owner);
    else if (owner->num_held == 0) owner->used = HEADER_BYTES;
    pthread_mutex_unlock(&lock);
}
