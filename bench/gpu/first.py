"""The stages of `bench gpu --first`: whole runs over Ray with kills, attention of many jobs, packed products."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import json
import math
import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch

from bench.batch_run import figures_of
from bench.gpu.stages import ran, untried
from bench.gpu.trial import Trial, Try, written
from bench.tables import Record
from swiftbatch.jobs.python_processes import module_command
from swiftbatch.jobs.run.run import Run
from swiftbatch.metrics.report.attempts import parsed_history
from swiftbatch.worker.exactness.gpu_doctor.attention_check import OneLayer, prefix_bytes
from swiftbatch.worker.exactness.gpu_doctor.findings import Finding, Row, differing_bits
from swiftbatch.worker.exactness.gpu_doctor.gemm_checks import (
    copies,
    random_matrix,
    random_rows,
    try_packed_kernel,
    weight_shapes,
)
from swiftbatch.worker.exactness.gpu_doctor.model_under_test import Parts
from swiftbatch.worker.kernels.cuda.attention_backends import TritonAttention
from swiftbatch.worker.kernels.cuda.gemm import cublas_linear
from swiftbatch.worker.kernels.kernel_sizes import BLOCK
from swiftbatch.worker.kernels.quantized_weights import Code, PackedMatrix

KILLED_TWICE = ("chaos", "--workers", "1", "--kills", "2")
EVENTS = ("driver_started", "worker_ready", "worker_lost", "run_ended")


def ray_run(trial: Trial) -> Iterator[Try]:
    """Kill a worker and its node in a run of a small model, long enough that it doesn't end before."""
    size = ("--jobs", "3", "--tokens", str(trial.sizes.small_run_tokens), "--kind", "worker", "--kind", "raylet")
    yield "three jobs of the embedded model", functools.partial(_killed_twice, trial, "ray", size)


def model_run(trial: Trial) -> Iterator[Try]:
    """Kill a worker and the driver in a run of many jobs over a folder of weights."""
    sizes = trial.sizes
    changes = {"num_hidden_layers": sizes.num_layers, "tie_word_embeddings": False}
    model = dataclasses.replace(sizes.model, config=sizes.model.config | changes)
    folder = trial.scratch / "whole-model"
    yield "a folder of weights", lambda: _measured_folder(written(model, folder, trial.device).path)
    num_jobs, kinds = str(sizes.num_run_jobs), ("--kind", "worker", "--kind", "driver")
    size = ("--model", str(folder), "--jobs", num_jobs, "--slots", num_jobs, "--tokens", str(sizes.run_tokens), *kinds)
    yield f"{num_jobs} jobs", functools.partial(_killed_twice, trial, "model-run", size)


def _measured_folder(folder: Path) -> Finding:
    num_bytes = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    return Finding(passed=True, words=f"{num_bytes / 1e9:.2f} GB", rows=[])


def _killed_twice(trial: Trial, name: str, size: tuple[str, ...]) -> Finding:
    """Run jobs undisturbed and with kills; return when drivers and workers started, and the first token came."""
    if importlib.util.find_spec("ray") is None:
        return untried("a run over Ray: no Ray here")
    folder = trial.scratch / name
    shutil.rmtree(folder, ignore_errors=True)  # left by an interrupted stage
    where = ("--device", trial.device.type, "--run", str(folder))
    finding = ran(module_command("swiftbatch.scheduler", *KILLED_TWICE, *size, *where), trial.scratch)
    logs = sorted(folder.glob("driver-*.log"))
    rows, words = [row for log in logs for row in starts_of(log)], finding.words
    if finding.passed:
        run = Run.open(str(folder / "undisturbed"))
        seconds = _first_token(run) - _events(logs[0])[0]["time"]
        words = f"first token after {seconds:.1f} s, {figures_of(run)['tokens_per_second']:,.0f} tokens/s; {words}"
    return finding.model_copy(update={"words": words, "rows": rows})


def _events(log: Path) -> list[Record]:
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()  # a killed driver may leave half a line
    return [json.loads(line) for line in lines if line.startswith('{"event"') and line.endswith("}")]


def starts_of(log: Path) -> Iterator[Row]:
    """Yield the main events of a driver, in seconds after its first one."""
    events = _events(log)
    for event in (event for event in events if event["event"] in EVENTS):
        parts = ", ".join(f"{what} {seconds:.1f}" for what, seconds in event.get("seconds", {}).items())
        seconds = event["time"] - events[0]["time"]
        yield {"driver": log.stem, "event": event["event"], "s": seconds, "a worker's start, s": parts}


def _first_token(run: Run) -> float:
    bodies = (line["response"]["body"] for _, line in run.output_lines() if line)
    attempts = (attempt for body in bodies for attempt in parsed_history(body["metrics"]["attempts"]))
    return min(attempt.timeline.started for attempt in attempts if attempt.timeline is not None)


NUM_STAGES = (2, 3, 5)


def many_jobs(trial: Trial) -> Iterator[Try]:
    """Time attention of one layer, one row a job."""
    parts = trial.layer_parts()
    for num_rows, num_jobs, length in trial.sizes.attention_loads:
        attempt = functools.partial(_attended, parts.with_rows(num_rows), num_jobs, length)
        yield f"{num_jobs} jobs of {length:,}, {num_rows} rows", attempt
        parts.forget_unused()


def _attended(parts: Parts, num_jobs: int, length: int) -> Finding:
    layer = OneLayer(parts, num_jobs, length + BLOCK)
    placed = layer.placed(random.Random(1), length, num_jobs, num_jobs, shorter=0)
    num_bytes, query = prefix_bytes(parts, placed), layer.random_query(1)[:num_jobs]
    rows, found = list[Row](), list[torch.Tensor]()
    assert isinstance(layer.attention, TritonAttention)
    for stages in NUM_STAGES:
        layer.attention.shape = dataclasses.replace(layer.attention.shape, num_stages=stages)
        found.append(layer.attended(query, placed))
        seconds = parts.seconds(layer.attend)
        rows.append({"stages": stages, "ms": 1000 * seconds, "TB/s": num_bytes / seconds / 1e12})
    num_differing = sum(not each.equal(found[0]) for each in found[1:])
    words = differing_bits(num_differing, len(found) - 1, "results of other numbers of stages")
    return Finding(passed=num_differing == 0, words=words, rows=rows)


FORMS: tuple[tuple[str, Code, int, float, torch.dtype], ...] = (  # name, code, group, offset in scales, scale
    ("int4", "uint4", 128, -8, torch.bfloat16),
    ("int4 with float32 offsets", "uint4", 128, -7, torch.half),
    ("FP8", "e4m3", 128, 0, torch.half),
    ("MXFP4", "e2m1", 32, 0, torch.bfloat16),
)


def packed_products(trial: Trial) -> Iterator[Try]:
    """Compare packed products of a layer with dequantized weights by bits, and with cuBLAS by time."""
    parts = trial.layer_parts()
    for name, code, group, offset, dtype in FORMS:
        for num_rows in trial.sizes.product_rows:
            attempt = functools.partial(_packed, parts.with_rows(num_rows), code, group, offset, dtype)
            yield f"{name}, {num_rows} rows", attempt
            parts.forget_unused()


def _packed(parts: Parts, code: Code, group: int, offset: float, dtype: torch.dtype) -> Finding:
    rows = list[Row]()
    for name, linears in weight_shapes(parts.weights).items():
        if name == "head":
            continue
        columns, depth = linears[0].weight.shape
        matrix = random_matrix(parts, code, (columns, depth), math.gcd(group, depth), offset, dtype)
        matrices = copies(parts, matrix)
        row = try_packed_kernel(parts, name, matrices)
        milliseconds = 1000 * _cublas_seconds(parts, matrices)
        rows.append(row | {"cuBLAS bfloat16, ms": milliseconds, "times as fast": milliseconds / float(row["ms"])})
    differing, tried = (sum(int(row[name]) for row in rows) for name in ("differing", "tried"))
    return Finding(passed=differing == 0, words=differing_bits(differing, tried, "rows"), rows=rows)


def _cublas_seconds(parts: Parts, matrices: list[PackedMatrix]) -> float:
    """Time a plain product, with several weights in turn."""
    columns, depth = matrices[0].shape
    weights, given = [each.dequantized() for each in matrices], random_rows(parts, depth, parts.generator(3))
    out = torch.zeros(len(given), columns, dtype=parts.dtype, device=parts.device)

    def work() -> None:
        for weight in weights:
            cublas_linear(given, weight, None, out)

    return parts.seconds(work) / len(weights)
