"""Stages of speed: products of more rows than a forward has, rounds of scanned texts, and the memory of graphs."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from bench.gpu.decoding import random_ids, sequences_of
from bench.gpu.exact_stages import untried
from bench.gpu.trial import Trial, Try
from swiftbatch.worker.drafters.auto.auto import NUM_BEST
from swiftbatch.worker.exactness.batch_invariance import MAX_LENGTH, num_caches, probe_rows
from swiftbatch.worker.exactness.gpu_doctor.findings import Finding, Row
from swiftbatch.worker.exactness.gpu_doctor.gemm_checks import bits, weight_shapes
from swiftbatch.worker.exactness.gpu_doctor.model_under_test import Parts
from swiftbatch.worker.forward.forward_interface import partial_rows
from swiftbatch.worker.forward.target_model import TargetModel
from swiftbatch.worker.forward.tile_packing import tree_rows
from swiftbatch.worker.kernels.cuda.gemm import cublas_linear, triton_linear
from swiftbatch.worker.kernels.quantized_weights import AnyLinear
from swiftbatch.worker.kv.scan_cache import ScanKVCache
from swiftbatch.worker.sampling.cuda.cuda_sampler import CudaBatchSampler
from swiftbatch.worker.sampling.draft_tree import DraftTree

NUM_TIMES = 7
NUM_PLACES = 16  # of a row that are tried


def wide_products(trial: Trial) -> Iterator[Try]:
    """Every weight shape with both kernels at each number of rows, and whole forwards of more rows than the fewest."""
    parts = trial.parts(dtype="bfloat16" if trial.device.type == "cuda" else None)
    for num_rows in trial.sizes.row_counts:
        yield f"{num_rows} rows", functools.partial(_products_of, parts, num_rows)
    for num_rows in trial.sizes.row_counts[1:]:
        yield f"trees in forwards of {num_rows} rows", functools.partial(_trees_of, parts.with_rows(num_rows))


def _trees_of(parts: Parts) -> Finding:
    """Trees against plain decoding."""
    target = parts.target(num_caches(parts.kernels.num_rows), MAX_LENGTH)
    found = probe_rows(target, parts.extent.num_rows // 4 or 1, most_nodes=parts.extent.most_nodes)
    words = f"{found.num_differing} of {found.num_rows} rows differ from plain decoding"
    return Finding(passed=found.num_differing == 0, words=words, rows=[])


def _products_of(parts: Parts, num_rows: int) -> Finding:
    kernels: dict[str, Callable[..., None]] = {"cublas": cublas_linear, "triton": triton_linear}
    rows: list[Row] = []
    for name, linears in weight_shapes(parts.weights).items():
        columns = linears[0].weight.shape[0]
        out = torch.zeros(
            num_rows, columns, dtype=torch.float32 if name == "head" else parts.dtype, device=parts.device
        )
        for kernel_name, kernel in kernels.items():
            taken = _seconds_of(parts, kernel, linears, num_rows, out)
            rows.append(
                {
                    "kernel": kernel_name,
                    "weights": name,
                    "rows": num_rows,
                    "places": NUM_PLACES,
                    "differing": _num_differing(parts, kernel, linears[0], num_rows, out),
                    "ms": 1000 * taken / len(linears),
                    "GB/s": sum(linear.weight.nbytes for linear in linears) / taken / 1e9,
                }
            )
    differing = {name: sum(int(row["differing"]) for row in rows if row["kernel"] == name) for name in kernels}
    words = ", ".join(f"{name}: {count} places differ" for name, count in differing.items())
    return Finding(passed=min(differing.values()) == 0, words=words, rows=rows)


def _seconds_of(
    parts: Parts, kernel: Callable[..., None], linears: Sequence[AnyLinear], num_rows: int, out: Tensor
) -> float:
    rows = _random_rows(parts, num_rows, linears[0].weight.shape[1], 3)

    def work() -> None:
        for linear in linears:
            kernel(rows, linear.weight, linear.bias, out)

    return parts.seconds(work)


def _num_differing(parts: Parts, kernel: Callable[..., None], linear: AnyLinear, num_rows: int, out: Tensor) -> int:
    """Count the places in which one row's bits are not those of the first place, each time among other neighbours."""
    row, differing = _random_rows(parts, 1, linear.weight.shape[1], 1)[0], 0
    expected: Tensor | None = None
    for number in range(NUM_PLACES):
        rows, place = _random_rows(parts, num_rows, len(row), 10 + number), number * num_rows // NUM_PLACES
        rows[place] = row
        kernel(rows, linear.weight, linear.bias, out)
        expected = out[place].clone() if expected is None else expected
        differing += not bits(out[place]).equal(bits(expected))
    return differing


def _random_rows(parts: Parts, num_rows: int, depth: int, seed: int) -> Tensor:
    return torch.randn(num_rows, depth, generator=parts.generator(seed), device=parts.device).to(parts.dtype)


def scans(trial: Trial) -> Iterator[Try]:
    """Rounds behind scanned texts of some lengths, beside forwards that attend to all of them."""
    parts = trial.deep_parts()
    for length in trial.sizes.scanned_lengths:
        yield f"{length:,} positions", functools.partial(_scanned, parts, length)


def _scanned(parts: Parts, length: int) -> Finding:
    target = parts.target(1, length + 64)
    target.arena.buffer.normal_(generator=parts.generator(5))
    new_entries = target.forwards.room_for(ScanKVCache, NUM_BEST)
    [sequence] = sequences_of(target, [random_ids(target.vocab_size, length, 1)], 32)
    full = target.new_cache(length + 32)
    full.reserve(length)
    full.length = length - 1
    partial = ScanKVCache(target.cache_shape, NUM_BEST, sequence, new_entries)
    started = time.perf_counter()
    partial.follow(full, lambda position: torch.empty(0))
    target.synchronize()
    taken_in = time.perf_counter() - started
    rounds = _median(target, lambda: target.check([partial_rows(partial, 5, length - 1, DraftTree())]))
    forward = _median(target, lambda: target.verify([tree_rows(full, 5, DraftTree())]))
    row: Row = {
        "positions": length,
        "ms a round": 1000 * rounds,
        "ms a forward": 1000 * forward,
        "seconds to take it in": taken_in,
    }
    parts.forget_unused()
    return Finding(passed=True, words=f"a round takes {rounds / forward:.2f} of a forward", rows=[row])


def _median(target: TargetModel, call: Callable[[], object]) -> float:
    seconds = []
    for _ in range(1 + (NUM_TIMES if target.device.type == "cuda" else 1)):
        started = time.perf_counter()
        call()
        target.synchronize()
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds[1:])


def graph_memory(trial: Trial) -> Iterator[Try]:
    """Measure what CUDA's context, graphs and workspaces take beside what torch was asked for."""
    yield "context and graphs", functools.partial(_graph_memory, trial)


def _graph_memory(trial: Trial) -> Finding:
    if trial.device.type != "cuda":
        return untried("memory of graphs: no CUDA device")
    rows: list[Row] = [{"behind": "the start of CUDA", **_taken(trial.device)}]
    parts = trial.deep_parts()
    rows.append({"behind": f"weights of {parts.weights.product_bytes / 1e9:.1f} GB", **_taken(trial.device)})
    target = parts.target(2, 4096)
    rows.append({"behind": "the graph of a forward", **_taken(trial.device)})
    target.forwards.room_for(ScanKVCache, NUM_BEST)
    rows.append({"behind": "the graphs of rounds and queries", **_taken(trial.device)})
    drawing = CudaBatchSampler(target.vocab_size, trial.device)
    drawing.top_candidates(torch.zeros(1, target.vocab_size, device=trial.device))
    rows.append({"behind": "the graphs of draws", **_taken(trial.device)})
    first, last = (float(row["outside, GB"]) for row in (rows[0], rows[-1]))
    words = f"the context takes {first:.2f} GB, graphs and libraries {last - first:.2f} GB more"
    return Finding(passed=True, words=words, rows=rows)


def _taken(device: torch.device) -> dict[str, float]:
    """The memory that torch holds, and what is taken outside of it."""
    torch.cuda.synchronize(device)
    free, total = torch.cuda.mem_get_info(device)
    reserved = torch.cuda.memory_reserved(device)
    return {
        "allocated, GB": torch.cuda.memory_allocated(device) / 1e9,
        "reserved, GB": reserved / 1e9,
        "outside, GB": (total - free - reserved) / 1e9,
    }
