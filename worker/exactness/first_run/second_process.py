"""The same work every time, here and in a process of its own, which prints a digest of every bit that came of it.

The work is prompts, then trees of all sequences at once."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import random
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import torch

from swiftbatch.jobs.errors import UserError
from swiftbatch.jobs.processes import environment_of_code, module_command
from swiftbatch.worker.exactness.first_run.parts import ArenaTarget, Parts
from swiftbatch.worker.exactness.probe import random_tree
from swiftbatch.worker.kernels.choice import CudaKernels
from swiftbatch.worker.model.files import locate_model
from swiftbatch.worker.target.tiles import max_tree_depth, tree_rows

NUM_STEPS = 3
MOST_NODES = 12  # of each tree
ROOM = (MOST_NODES + 1) * NUM_STEPS  # positions behind the prompts
SECONDS = 900  # for a large model to be loaded, and kernels to be compiled


def work_digest(target: ArenaTarget, lengths: Sequence[int]) -> str:
    """SHA-256 over final hidden states, logits, keys and values, of a sequence for each of `lengths`."""
    rng, digest = random.Random(0), hashlib.sha256()
    caches = []
    for length in lengths:
        caches.append(target.new_cache(length + ROOM))
        while (missing := length - caches[-1].length) > 0:
            token_ids = [rng.randrange(target.vocab_size) for _ in range(missing)]
            _add(digest, target.read(caches[-1], token_ids))
    for _ in range(NUM_STEPS):
        groups = []
        for cache in caches:
            tree = random_tree(rng, MOST_NODES, max_tree_depth(cache.length), target.vocab_size)
            groups.append(tree_rows(cache, rng.randrange(target.vocab_size), tree))
        for cache, outputs in zip(caches, target.verify(groups), strict=True):
            _add(digest, outputs.hidden)
            _add(digest, outputs.logits)
            cache.commit([])
    for cache in caches:
        digest.update(cache.kv(0, cache.length).tobytes())
    return digest.hexdigest()


def _add(digest: hashlib._Hash, numbers: torch.Tensor) -> None:
    digest.update(numbers.contiguous().view(torch.uint8).cpu().numpy().tobytes())


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
