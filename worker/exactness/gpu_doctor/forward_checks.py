"""Checks of whole forwards: tree rows, graphs, a second process (which runs this module), and transformers."""

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
from swiftbatch.jobs.python_processes import environment_of_code, module_command
from swiftbatch.worker.exactness.forward_comparisons import MAX_LENGTH, compare, num_caches, probe_rows, random_tree
from swiftbatch.worker.exactness.gpu_doctor.findings import Finding, Row, differing_bits
from swiftbatch.worker.exactness.gpu_doctor.model_under_test import ArenaTarget, Parts
from swiftbatch.worker.forward.tile_packing import max_tree_depth, tree_rows
from swiftbatch.worker.kernels.cuda.cuda_graph import Graph, Repeated, Work
from swiftbatch.worker.kernels.gpu_kernel_choice import CudaKernels
from swiftbatch.worker.kernels.kernel_sizes import TILE_ROWS
from swiftbatch.worker.model.model_files import locate_model

NUM_STEPS = 3
MOST_NODES = 12
ROOM = (MOST_NODES + 1) * NUM_STEPS  # positions of a cache after the prompt
SECONDS = 900  # enough to load a large model and compile kernels


def check_rows(parts: Parts) -> Finding:
    """Compare random trees of several sequences with plain decoding."""
    target = parts.target(num_caches(parts.kernels.num_rows), MAX_LENGTH)
    found = probe_rows(target, parts.extent.num_rows, most_nodes=parts.extent.most_nodes)
    words = f"{differing_bits(found.num_differing, found.num_rows, 'tree rows')} from plain decoding"
    row: Row = {"tried": found.num_rows, "differing": found.num_differing}
    return Finding(passed=found.num_differing == 0, words=words, rows=[row])


def check_replay(parts: Parts) -> Finding:
    """Compare single kernel launches with their graph."""
    eager, replayed, again = (_digest(parts, is_eager=each) for each in (True, False, False))
    rows: list[Row] = [
        {"how": how, "sha256": digest[:16]}
        for how, digest in (("launched one by one", eager), ("replayed", replayed), ("replayed, another graph", again))
    ]
    if eager == replayed == again:
        return Finding(passed=True, words="a graph gives the bits of its kernels", rows=rows)
    return Finding(passed=False, words="a graph gives other bits than its kernels", rows=rows)


def check_transformers(parts: Parts) -> Finding:
    """Compare logits of a random text with transformers, whose weights take the same memory again."""
    if parts.device.type == "cuda":
        free, needed = torch.cuda.mem_get_info(parts.device)[0], _weight_bytes(parts)
        if free < 1.2 * needed:
            words = f"not compared: the weights need {needed / 1e9:.1f} GB once more, {free / 1e9:.1f} GB are free"
            return Finding(passed=True, words=words, rows=[], unproved=f"that of transformers ({words})")
    found = compare(parts.target(1, parts.extent.num_compared + TILE_ROWS), parts.extent.num_compared)
    row: Row = {
        "rows": found.num_rows,
        "same best token": found.num_same_choices,
        "greatest difference": found.greatest_difference,
        "shift": found.shift,
    }
    return Finding(passed=found.agrees, words=found.summary(), rows=[row])


def check_second_process(parts: Parts) -> Finding:
    """Repeat the work in another process, with its own compiled kernels and graph."""
    here = _digest(parts, is_eager=False)
    parts.release()  # both may not fit on the device
    there = digest_elsewhere(parts)
    rows: list[Row] = [{"process": "this one", "sha256": here[:16]}, {"process": "another one", "sha256": there[:16]}]
    words = "another process computes the same bits" if here == there else "another process computes other bits"
    return Finding(passed=here == there, words=words, rows=rows)


def _digest(parts: Parts, is_eager: bool) -> str:
    lengths = parts.extent.work_lengths
    digest = work_digest(parts.target(len(lengths), max(lengths) + ROOM, _repeat if is_eager else None), lengths)
    parts.forget_unused()
    return digest


def _repeat(work: Work, _device: torch.device) -> Graph:
    return Repeated(work)


def _weight_bytes(parts: Parts) -> int:
    return parts.weights.product_bytes + parts.weights.embedding.nbytes


def work_digest(target: ArenaTarget, lengths: Sequence[int]) -> str:
    """Return the SHA-256 of final hidden states, logits, keys and values, for sequences of `lengths`."""
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
    """Return another process's digest. Raises UserError if it fails."""
    order = {
        "model": str(parts.files.path),
        "dtype": str(parts.dtype).removeprefix("torch."),
        "device": parts.device.type,
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
    lengths = order["lengths"]
    assert isinstance(lengths, list)
    print(work_digest(parts.target(len(lengths), max(lengths) + ROOM), lengths))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
