"""The last checks: whole forwards. Rows of trees, graphs, another process, and what transformers says."""

from __future__ import annotations

import torch

from swiftbatch.worker.exactness.first_run.findings import Finding, Row, differing_bits
from swiftbatch.worker.exactness.first_run.parts import Parts
from swiftbatch.worker.exactness.first_run.second_process import ROOM, digest_elsewhere, work_digest
from swiftbatch.worker.exactness.probe import MAX_LENGTH, NUM_CACHES, probe_rows
from swiftbatch.worker.exactness.transformers_agreement import compare
from swiftbatch.worker.kernels.cuda.graph import Graph, Repeated, Work
from swiftbatch.worker.kernels.sizes import TILE_ROWS


def check_rows(parts: Parts) -> Finding:
    """Random trees of several sequences against plain decoding, one row a forward."""
    target = parts.target(NUM_CACHES, MAX_LENGTH)
    found = probe_rows(target, parts.extent.num_rows, most_nodes=parts.extent.most_nodes)
    words = f"{differing_bits(found.num_differing, found.num_rows, 'tree rows')} from plain decoding"
    row: Row = {"tried": found.num_rows, "differing": found.num_differing}
    return Finding(passed=found.num_differing == 0, words=words, rows=[row])


def check_replay(parts: Parts) -> Finding:
    """The same work by kernels that are launched one by one, and by the graph of them."""
    eager, replayed, again = (_digest(parts, is_eager=each) for each in (True, False, False))
    rows: list[Row] = [
        {"how": how, "sha256": digest[:16]}
        for how, digest in (("launched one by one", eager), ("replayed", replayed), ("replayed, another graph", again))
    ]
    if eager == replayed == again:
        return Finding(passed=True, words="a graph gives the bits of its kernels", rows=rows)
    return Finding(passed=False, words="a graph gives other bits than its kernels", rows=rows)


def check_transformers(parts: Parts) -> Finding:
    """Logits of a random text against those of transformers, whose weights need as much room again."""
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
    """The same work in another process, with kernels that it has compiled and a graph that it has captured."""
    here = _digest(parts, is_eager=False)
    parts.release()  # both would not fit a model that fills the device
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
    """A `Capture` that captures nothing."""
    return Repeated(work)


def _weight_bytes(parts: Parts) -> int:
    return parts.weights.product_bytes + parts.weights.embedding.nbytes
