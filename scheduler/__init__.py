"""The command line, the driver loop and all use of Ray. No other room imports this one."""

import os

# numpy's import would start threads, which could receive signals while Ray starts.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
