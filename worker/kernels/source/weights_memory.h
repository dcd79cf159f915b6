// Memory of weights: side by side in regions of large pages, which cost a step's reads fewer look-ups of addresses.
#pragma once
#include <stddef.h>

// 64-aligned zeros; ends the process where there is no memory.
void *weights_take(size_t bytes);
void weights_give_back(void *memory);  // or NULL
