"""What a run may compute in and on. Light: the command line shows them."""

from __future__ import annotations

from typing import Literal

Dtype = Literal["bfloat16", "float32"]
Device = Literal["auto", "cpu", "cuda"]
