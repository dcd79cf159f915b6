"""The options of all benchmarks. Defaults of their own fields stand with the options of the commands."""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from pydantic import AfterValidator, ConfigDict, Field, field_validator

from swiftbatch.jobs.frozen_records import Frozen
from swiftbatch.jobs.run.option_values import Device, Dtype
from swiftbatch.worker.bench.bench_engine import BenchError
from swiftbatch.worker.bench.bench_tables import in_a_folder, write_json
from swiftbatch.worker.caches.cache_room import check_folder
from swiftbatch.worker.caches.memory.memory_plan import SlotsWanted
from swiftbatch.worker.config import Computation
from swiftbatch.worker.model.model_files import ModelFiles
from swiftbatch.worker.target.hardware import cpu_capability
from swiftbatch.worker.target.target import TargetModel


def _ascending(positions: tuple[int, ...]) -> tuple[int, ...]:
    if not positions or min(positions) < 1:
        raise ValueError(f"got {list(positions)}; expected at least one position, each 1 or more")
    return tuple(sorted(set(positions)))


Positions = Annotated[tuple[int, ...], AfterValidator(_ascending)]


def _some(temperatures: tuple[float, ...]) -> tuple[float, ...]:
    if not temperatures:
        raise ValueError("got none; expected at least one temperature")
    return temperatures


Temperature = Annotated[float, Field(ge=0.0, le=100.0)]
Temperatures = Annotated[tuple[Temperature, ...], AfterValidator(_some)]


class BenchOptions(Frozen):
    """A model, what it computes in and on, and the file for the figures."""

    model_config = ConfigDict(allow_inf_nan=False)

    model: str = Computation.model
    dtype: Dtype = Computation.dtype
    device: Device = Computation.device
    num_threads: int = Field(default=Computation.num_threads, ge=1)
    json_path: Path | None = None

    _in_a_folder = field_validator("json_path", "plot_path", check_fields=False)(in_a_folder)

    def load(self, files: ModelFiles, slots: SlotsWanted | None = None, kv_offload: Path | None = None) -> TargetModel:
        """The model, computing as was asked for; a GPU is shared out as a worker's is. Raises ModelError, KVRoomError.

        Without `slots` caches come one by one, and the model is run by `transformers` there. With `kv_offload`, a
        folder, they lie outside the device.
        """
        torch.set_num_threads(self.num_threads)
        folder = None if kv_offload is None else str(kv_offload)
        check_folder(folder)
        return TargetModel.load(files, self.dtype, self.device, folder, slots=slots)

    def write(self, content: dict[str, Any], target: TargetModel, **further: Any) -> None:
        """Write figures with what they were measured with, where a file was named: it is whole at any moment."""
        self.write_beside(content, machine(target), **further)

    def write_beside(self, content: dict[str, Any], found: dict[str, Any], **further: Any) -> None:
        """Write as `write` does, with a description of the `machine` that was made before."""
        if self.json_path is not None:
            settings = self.model_dump(mode="json", exclude={"json_path", "plot_path"}) | further
            write_json(self.json_path, content | {"settings": settings, "machine": found})


def check_length(files: ModelFiles, length: int, num_tokens: int) -> None:
    """Raises BenchError where the model has too few positions for `num_tokens` behind `length`."""
    if length + num_tokens > files.max_positions:
        raise BenchError(f"{length} + {num_tokens} tokens: {files.name} has {files.max_positions} positions only")


def machine(target: TargetModel) -> dict[str, Any]:
    """Describe what figures depend on beside the settings: device, model and versions."""
    import transformers  # late: options may be refused, and a command that asks for none be half a second sooner

    return {
        "device": str(target.device) if target.device.type == "cpu" else torch.cuda.get_device_name(target.device),
        "cpu_capability": cpu_capability(),
        "numerics": target.forwards.numerics,
        "model_fingerprint": target.files.fingerprint,
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "numpy": np.__version__,
        },
    }
