"""The options of a GPU's benchmark. Without Triton, which only a machine with a GPU needs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, Field, field_validator

from swiftbatch.jobs.run.option_values import AttentionName, Device, LinearName
from swiftbatch.worker.bench.options import BenchOptions, Positions
from swiftbatch.worker.config import Computation
from swiftbatch.worker.drafters.catalogue import ENGINES
from swiftbatch.worker.kernels.sizes import NUM_ROWS


def _slots(numbers: tuple[int, ...]) -> tuple[int, ...]:
    if not numbers or not all(1 <= each <= NUM_ROWS for each in numbers):
        raise ValueError(f"got {', '.join(map(str, numbers)) or 'none'}; expected 1 to {NUM_ROWS}")
    return tuple(sorted(set(numbers)))


Counts = Annotated[tuple[int, ...], AfterValidator(_slots)]


class GPUBenchOptions(BenchOptions):
    """The measurement asked for: steps and engines behind each of `lengths` that fits, prompts behind nothing, too."""

    device: Device = "cuda"
    draft_model: Path | None = None
    engines: tuple[str, ...]
    lengths: Positions
    slot_counts: Counts
    row_counts: Counts  # of each slot
    num_read: int = Field(ge=1)  # tokens of a prompt that are timed
    num_tokens: int = Field(ge=5)  # of each engine at each length
    attention: AttentionName = Computation.attention
    linear: LinearName = Computation.linear
    text: Path | None = None

    @field_validator("engines")
    @classmethod
    def _known_engines(cls, engines: tuple[str, ...]) -> tuple[str, ...]:
        unknown = [name for name in engines if name not in ENGINES]
        if unknown or not engines or len(set(engines)) < len(engines):
            raise ValueError(f"got {', '.join(engines) or 'none'}; expected some of: {', '.join(ENGINES)}, each once")
        return engines
