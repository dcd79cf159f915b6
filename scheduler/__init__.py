"""The command line, the driver loop, and everything that says Ray. Nothing imports this room."""

import os

# The threads of numpy's library would start as it is imported, and hear signals while Ray starts.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
