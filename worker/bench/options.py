"""What all benchmarks are asked for. Defaults of their own fields stand with the options of the commands."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from jobs.run.dtypes import Device, Dtype
from worker.config import Computation


def _ascending(positions: tuple[int, ...]) -> tuple[int, ...]:
    if not positions or min(positions) < 1:
        raise ValueError(f"got {list(positions)}; expected at least one position, each 1 or more")
    return tuple(sorted(set(positions)))


Positions = Annotated[tuple[int, ...], AfterValidator(_ascending)]


class BenchOptions(BaseModel):
    """A model, what it computes in and on, and the file for the figures."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    model: str = Computation.model
    dtype: Dtype = Computation.dtype
    device: Device = Computation.device
    num_threads: int = Field(default=Computation.num_threads, ge=1)
    json_path: Path | None = None
