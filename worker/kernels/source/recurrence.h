// States of heads over the rows of some sequences, for all layers with a state.
#pragma once
#include "api.h"
#include "threads.h"

// Runs the rows of all calls, which have the same sizes; writes each call's `updates` and `found`.
void recurrence_run(frame *frame, const recurrence *calls, int num_calls);
