// Memory of weights, side by side in regions of huge pages, which save address look-ups.
#pragma once
#include <stddef.h>

// Returns 64-aligned zeros; ends the process if memory is exhausted.
void *weights_take(size_t bytes);
void weights_give_back(void *memory);  // accepts NULL
