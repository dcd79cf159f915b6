"""Option fields shared by benchmarks."""

from __future__ import annotations

import datetime
import os
import platform
import re
from pathlib import Path
from typing import Annotated, Any, TypeVar

import torch
from pydantic import AfterValidator, BeforeValidator

from swiftbatch.jobs.json_records import Frozen
from swiftbatch.jobs.run.run_records import AttentionName, Device
from swiftbatch.worker.config import Computation
from swiftbatch.worker.decode_bench import BY_NAME, BenchError, BenchOptions
from swiftbatch.worker.drafters.catalogue import ENGINES
from swiftbatch.worker.kernels.native_library import chosen_variant
from swiftbatch.worker.model.model_files import locate_model

ALL = "all"  # tables of a paper
Entry = TypeVar("Entry")


def _split(text: Any) -> Any:
    return tuple(part.strip() for part in text.split(",") if part.strip()) if isinstance(text, str) else text


def _known(names: tuple[str, ...]) -> tuple[str, ...]:
    if unknown := [name for name in names if name not in BY_NAME]:
        raise ValueError(f"there is no engine {unknown[0]!r}; known: {', '.join(BY_NAME)}")
    return names


Names = Annotated[tuple[str, ...], BeforeValidator(_split)]
Engines = Annotated[Names, AfterValidator(_known)]
Ints = Annotated[tuple[int, ...], BeforeValidator(_split)]
Floats = Annotated[tuple[float, ...], BeforeValidator(_split)]


class TextOptions(BenchOptions):
    """A text, by default the model's own, and its sampling."""

    text: Path | None = None
    temperature: float = 1.0
    min_p: float = 0.1
    seed: int = 0


class JSONOptions(Frozen):
    """Options of a benchmark that loads no model in its process."""

    json_path: Path | None = None


class GPUOptions(BenchOptions):
    """Options of `bench gpu`."""

    device: Device = "cuda"
    draft_model: Path | None = None
    engines: Names = tuple(ENGINES)
    lengths: Ints = (1000, 20_000, 50_000, 100_000)
    slots: Ints = (1, 4)
    rows: Ints = (1, 16)  # per slot
    num_read: int = 4096  # timed tokens of a prompt
    num_tokens: int = 256  # per engine and length
    attention: AttentionName = Computation.attention
    text: Path | None = None
    everything: bool = False
    first: bool = False  # the stages of the first quarter of an hour
    minutes: float = 27  # for all stages
    output: Path | None = None


def one_of(known: dict[str, Entry], name: str) -> Entry:
    """Look a name up. Raises BenchError."""
    if name not in known:
        raise BenchError(f"got {name}; expected one of: {', '.join(known)}")
    return known[name]


def machine_facts(options: BenchOptions) -> dict[str, Any]:
    """Return what figures depend on, besides their own options."""
    cpuinfo = Path("/proc/cpuinfo").read_text(errors="replace") if Path("/proc/cpuinfo").exists() else ""
    cpu = re.search(r"^model name\s*: (.*)$", cpuinfo, re.MULTILINE)
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "cpu": cpu[1].strip() if cpu else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "instructions": chosen_variant() or "none",
        "torch": torch.__version__,
        "model": locate_model(options.model).fingerprint[:12],
    } | ({"gpu": torch.cuda.get_device_name()} if options.device != "cpu" and torch.cuda.is_available() else {})
