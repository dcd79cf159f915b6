// The name of this build.
#include "api.h"
#include "vectors.h"

const char *kernels_variant(void) { return VARIANT; }
