// States of heads over the rows of some sequences: what layers with a state have in common.
#pragma once
#include "api.h"
#include "threads.h"

// Runs the rows of all calls, whose heads are alike; each call's `updates` and `found` get what comes of its own.
void recurrence_run(frame *frame, const recurrence *calls, int num_calls);
