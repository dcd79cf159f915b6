"""What a run may compute in, on and with. Light: the command line shows them."""

from __future__ import annotations

from typing import Literal

Dtype = Literal["bfloat16", "float32"]
Device = Literal["auto", "cpu", "cuda"]
AttentionName = Literal["triton", "flash"]  # of a GPU's kernels, as the next
LinearName = Literal["cublas", "triton"]
