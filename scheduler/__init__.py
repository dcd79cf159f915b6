"""The command line, the driver loop and all use of Ray; no other room imports it."""

import os

# numpy's import would start threads, which could receive signals while Ray starts.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
