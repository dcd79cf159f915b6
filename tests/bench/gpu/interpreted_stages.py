"""A process for a stage in Triton's interpreter as tests have it, on a machine without Ray."""

from __future__ import annotations

import sys

import numpy as np

import tests.worker.interpreter  # noqa: F401
from bench.gpu.gpu_stages import STAGES
from bench.gpu.stage_process import main
from bench.gpu.trial import here

if __name__ == "__main__":
    sys.modules["ray"] = None  # type: ignore[assignment]
    np.seterr(all="ignore")  # NaN and infinities pass without a word, as they do on a GPU
    main(STAGES, here)
