"""Measured in Triton's interpreter, on a CPU."""

import tests.worker.interpreter  # noqa: F401
