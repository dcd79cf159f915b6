"""A process of its own that does the fixed work and prints its digest."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from typing import Any

import torch

from swiftbatch.jobs.errors import UserError
from swiftbatch.jobs.processes import environment_of_code, module_command
from swiftbatch.worker.exactness.first_run.fixed_work import ROOM, work_digest
from swiftbatch.worker.exactness.first_run.parts import Parts
from swiftbatch.worker.kernels.choice import CudaKernels
from swiftbatch.worker.model.files import locate_model

SECONDS = 900  # for a large model to be loaded, and kernels to be compiled


def digest_elsewhere(parts: Parts) -> str:
    """The digest by another process. Raises UserError where it fails."""
    order = {
        "model": str(parts.files.path),
        "dtype": str(parts.dtype).removeprefix("torch."),
        "device": parts.device.type,
        "num_splits": parts.num_splits,
        "kernels": dataclasses.asdict(parts.kernels),
        "lengths": parts.extent.work_lengths,
    }
    command = module_command(__name__, json.dumps(order))
    ran = subprocess.run(command, env=environment_of_code(), capture_output=True, text=True, timeout=SECONDS)
    if ran.returncode != 0:
        last = (ran.stderr.strip() or f"exit code {ran.returncode}").splitlines()[-1]
        raise UserError(f"first run: the second process failed: {last}")
    return ran.stdout.split()[-1]


def main(order: dict[str, Any]) -> None:
    """Print the digest."""
    files = locate_model(str(order["model"]))
    kernels = CudaKernels(**order["kernels"])
    parts = Parts.of(files, str(order["dtype"]), torch.device(str(order["device"])), kernels)
    parts.num_splits = int(str(order["num_splits"]))
    lengths = order["lengths"]
    assert isinstance(lengths, list)
    print(work_digest(parts.target(len(lengths), max(lengths) + ROOM), lengths))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
