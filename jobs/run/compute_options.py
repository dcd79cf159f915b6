"""The allowed values of compute options, without heavy imports."""

from __future__ import annotations

from typing import Literal

Dtype = Literal["bfloat16", "float32"]
KVDtype = Literal["fp8", "int8"]  # None: as the run's dtype
Device = Literal["auto", "cpu", "cuda"]
AttentionName = Literal["triton", "flash"]  # GPUs only, like the next
LinearName = Literal["cublas", "triton"]
NumRows = Literal[64, 128, 256]  # rows of every forward on a GPU

LogprobsMode = Literal["raw_logprobs", "processed_logprobs"]
"""The source of log-probabilities: the model's logits, or the scores that are drawn from. The names are vLLM's."""
SamplingDefaults = Literal["model", "openai"]
"""The source of sampling fields that a line leaves out: the model's generation config, or OpenAI's defaults."""
ThinkingMarkers = tuple[str, str] | tuple[()] | None
"""The texts around a thought, () if a model has none; None if each worker is to look for them."""
