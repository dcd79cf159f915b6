"""The stages of `bench gpu --everything` except jobs."""

from __future__ import annotations

import functools
import importlib.util
import os
import random
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from bench.gpu.jobs import random_ids
from bench.gpu.steps import measured
from bench.gpu.trial import Trial, Try
from bench.options import GPUOptions as Options
from bench.tables import flat, tables
from swiftbatch.jobs.python_processes import environment_of_code
from swiftbatch.jobs.run.run_records import KVDtype
from swiftbatch.jobs.sampling_params import SamplingParams
from swiftbatch.worker.drafters.catalogue import ENGINES
from swiftbatch.worker.exactness.gpu_doctor.attention_check import OneLayer
from swiftbatch.worker.exactness.gpu_doctor.findings import Finding, Row, differing_bits
from swiftbatch.worker.exactness.gpu_doctor.gpu_doctor import CHECKS
from swiftbatch.worker.exactness.gpu_doctor.model_under_test import Parts
from swiftbatch.worker.forward.target_model import DTYPES, TargetModel
from swiftbatch.worker.forward.tile_packing import tree_rows
from swiftbatch.worker.kernels.gpu_kernel_choice import CudaKernels
from swiftbatch.worker.kernels.kernel_sizes import CUDA_SCALE_BYTES, NUM_ROWS
from swiftbatch.worker.kernels.kv_codes import CODES, coded, numbers_of
from swiftbatch.worker.kv.full_cache import FullKVCache
from swiftbatch.worker.kv.sparse_cache import SummaryKVCache
from swiftbatch.worker.model.decoder_loading import dense_weights
from swiftbatch.worker.sampling.batch_sampler import TorchBatchSampler
from swiftbatch.worker.sampling.cuda.cuda_sampler import CudaBatchSampler
from swiftbatch.worker.sampling.draft_tree import DraftTree
from swiftbatch.worker.sampling.sequence import Sequence

NUM_ATTENDED = 8  # rows of two slots


def products(trial: Trial) -> Iterator[Try]:
    return _checks(trial.parts(), "machine", "products")


def rows(trial: Trial) -> Iterator[Try]:
    """Check trees against plain decoding, graphs against launches, our forward against transformers'."""
    return _checks(trial.parts(), "rows", "replay", "transformers")


def attention(trial: Trial) -> Iterator[Try]:
    return _checks(trial.parts(), "attention", "attention speed", "noise")


def packed(trial: Trial) -> Iterator[Try]:
    return _checks(trial.parts(dtype="bfloat16"), "packed products")


def second_process(trial: Trial) -> Iterator[Try]:
    return _checks(trial.parts(), "second process")


def flash(trial: Trial) -> Iterator[Try]:
    """Check what flash-attn affects, if installed."""
    if importlib.util.find_spec("flash_attn") is None:
        yield "flash-attn", lambda: untried("flash-attn is not installed")
        return
    parts = trial.parts(CudaKernels(attention="flash"), dtype="bfloat16")
    yield from _checks(parts, "attention", "attention speed", "rows", "replay")


def untried(why: str) -> Finding:
    return Finding(passed=True, words=f"not tried: {why}", rows=[], unproved=why)


def _checks(parts: Parts, *names: str) -> Iterator[Try]:
    """Yield the checks of `doctor`; a failure stops none."""
    for check in CHECKS:
        if check.name in names:
            yield check.name, functools.partial(check.run, parts)
            parts.forget_unused()


def kept_rows(trial: Trial) -> Iterator[Try]:
    """Check attention to codes against attention to their values."""
    parts = trial.parts()
    for kv_dtype in CODES:
        yield (
            f"attention to {kv_dtype}",
            functools.partial(_attention_to_codes, parts, trial.sizes.kept_length, kv_dtype),
        )


def _attention_to_codes(parts: Parts, length: int, kv_dtype: KVDtype) -> Finding:
    random_numbers = random.Random(3)
    layer = OneLayer(parts, 2, length)
    codes = coded(layer.arena.buffer, CODES[kv_dtype], CUDA_SCALE_BYTES)
    layer.arena.buffer.copy_(numbers_of(codes, parts.dtype, parts.sizes.head_dim))
    placed, query = layer.placed(random_numbers, length, 2, NUM_ATTENDED), layer.random_query(3)
    num_rows = sum(len(each) for each, _ in placed)
    expected, plain_seconds = layer.attended(query[:num_rows], placed), parts.seconds(layer.attend)
    numbers, layer.arena.buffer = layer.arena.buffer, codes
    found, seconds = layer.attended(query[:num_rows], placed), parts.seconds(layer.attend)
    differing = sum(not ours.equal(theirs) for ours, theirs in zip(found, expected, strict=True))
    read = [sum(each.boundary for each, _ in placed) * buffer[0, :, 0, :, 0].nbytes for buffer in (codes, numbers)]
    figures: list[Row] = [
        {"keys": name, "ms": 1000 * taken, "GB/s": num_bytes / taken / 1e9}
        for name, taken, num_bytes in zip((kv_dtype, "numbers"), (seconds, plain_seconds), read, strict=True)
    ]
    return Finding(passed=differing == 0, words=differing_bits(differing, num_rows, "rows"), rows=figures)


LAST_LINES = 6


def _of_tests(*names: str) -> Callable[[Trial], Iterator[Try]]:
    """Make a stage of GPU tests in files of `tests/worker`."""

    def tries(trial: Trial) -> Iterator[Try]:
        yield f"pytest -m gpu {' '.join(names)}", functools.partial(_tests, trial, *names)

    return tries


kinds, bits, rows_of_kinds, predictors = (
    _of_tests(f"test_gpu_{name}") for name in ("kinds", "bits", "rows", "predictors")
)
tests = _of_tests("test_gpu", "kv/test_every_cache", "kv/test_host_copies")


def _tests(trial: Trial, *chosen: str) -> Finding:
    checkout = Path(__file__).parents[2]
    if importlib.util.find_spec("pytest") is None:
        return untried("the tests: no pytest")
    chosen = tuple(f"tests/worker/{name}.py" for name in chosen)
    options = ["-m", "gpu", "-v", "-p", "no:cacheprovider", "-W", "ignore", "--timeout=120", *chosen]
    if trial.device.type != "cuda":
        options.append("--collect-only")
    return ran([sys.executable, "-m", "pytest", *options], checkout)


def ran(command: list[str], folder: Path) -> Finding:
    """Put a command's last words into the finding."""
    environment = environment_of_code() | {"TRITON_INTERPRET": os.environ.get("TRITON_INTERPRET", "0")}
    lines = []
    with subprocess.Popen(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            lines.append(line.strip())
    words = " / ".join(line for line in lines[-LAST_LINES:] if line)
    return Finding(passed=process.returncode == 0, words=words or "it said nothing", rows=[])


KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "plain": {},
    "min-p": {"min_p": 0.05},
    "top-k": {"top_k": 50},
    "top-p": {"top_p": 0.9},
    "top-k 20, top-p 0.95, T 0.6": {"top_k": 20, "top_p": 0.95, "temperature": 0.6},
    "eta": {"eta": 2e-4},
    "penalties": {"repetition_penalty": 1.2, "penalty_window": 128, "frequency_penalty": 0.3},
    "all": {"top_k": 200, "top_p": 0.98, "min_p": 0.01, "eta": 1e-4, "repetition_penalty": 1.1, "temperature": 1.2},
}
MOST_OTHER = 0.005  # share of draws that may differ: a filter's edge or two scores may be a rounding apart
SPREAD = 3.0  # of logits, as in models
PENALISED = 30  # sequences with penalty counts


def draws(trial: Trial) -> Iterator[Try]:
    vocab = trial.sizes.sampled_vocab
    drawing = CudaBatchSampler(torch.zeros(NUM_ROWS, vocab, device=trial.device))
    for name in KINDS:
        yield name, functools.partial(_compared, trial, drawing, name)


def _compared(trial: Trial, drawing: CudaBatchSampler, name: str) -> Finding:
    sizes, plain = trial.sizes, TorchBatchSampler(trial.sizes.sampled_vocab, torch.device("cpu"))
    generator, differing, times = torch.Generator().manual_seed(1), 0, []
    num_drawn, at_once = 0, min(PENALISED, sizes.num_drawn)
    while num_drawn < sizes.num_drawn:
        params = [SamplingParams(max_tokens=9, seed=num_drawn + each, **KINDS[name]) for each in range(at_once)]
        sequences = [_sequence(sizes.sampled_vocab, each) for each in params]
        logits = SPREAD * torch.randn(at_once, 1, sizes.sampled_vocab, generator=generator)
        ours = _drawn(drawing, sequences, logits.to(trial.device))
        theirs = _drawn(plain, sequences, logits)
        differing += sum(a != b for a, b in zip(ours, theirs, strict=True))
        num_drawn += at_once
    for _ in range(NUM_TIMES if trial.device.type == "cuda" else 1):
        times.append(_seconds(drawing, sequences[:1] * min(NUM_ROWS, at_once), logits.to(trial.device), trial))
    words = f"{differing} of {num_drawn} tokens are not the CPU's; {1000 * statistics.median(times):.2f} ms a table"
    return Finding(passed=differing <= MOST_OTHER * num_drawn, words=words, rows=[])


def _sequence(vocab: int, params: SamplingParams) -> Sequence:
    return Sequence(f"s{params.seed}", random_ids(vocab, 40, params.seed or 0), params, vocab)


def _drawn(drawing: Any, sequences: list[Sequence], logits: torch.Tensor) -> list[list[int]]:
    samplers = [drawing.sampler(sequence) for sequence in sequences]
    walks = drawing.walks(samplers, [DraftTree()] * len(sequences), list(logits))
    return [walk.drawn for walk in walks]


def _seconds(drawing: CudaBatchSampler, sequences: list[Sequence], logits: torch.Tensor, trial: Trial) -> float:
    """Time one draw of all rows, up to tokens on the host."""
    samplers, trees = [drawing.sampler(sequence) for sequence in sequences], [DraftTree()] * len(sequences)
    rows = list(logits[: len(sequences)])
    started = time.perf_counter()
    drawing.walks(samplers, trees, rows)
    return time.perf_counter() - started


NUM_STEPS = 30
MOST_SLOWER = 1.5  # times slower beside a checkpoint; users would notice more


def copies(trial: Trial) -> Iterator[Try]:
    yield "a checkpoint beside steps", functools.partial(_checkpoint, trial, trial.deep_parts())


def _row(name: str, num_bytes: int, seconds: float) -> Row:
    return {"what": name, "GB": num_bytes / 1e9, "seconds": seconds, "GB/s": num_bytes / seconds / 1e9}


def _checkpoint(trial: Trial, parts: Parts) -> Finding:
    """Time steps alone and beside a thread that copies their cache."""
    length = trial.sizes.checkpoint_length
    target = parts.target(1, length + NUM_STEPS)
    target.arena.buffer.normal_(generator=parts.generator(5))
    cache = target.new_cache(length + NUM_STEPS)
    cache.reserve(length)
    cache.length = length
    alone, is_over, copied = _step_seconds(target, cache), threading.Event(), list[float]()

    def copy_again_and_again() -> None:
        while not is_over.is_set():
            started = time.perf_counter()
            num_bytes = cache.kv(0, length).nbytes
            copied.append(num_bytes / (time.perf_counter() - started) / 1e9)

    thread = threading.Thread(target=copy_again_and_again)
    thread.start()
    beside = _step_seconds(target, cache)
    is_over.set()
    thread.join()
    rows: list[Row] = [
        {"steps": "alone", "ms": 1000 * alone, "GB/s to the host": 0.0},
        {"steps": "beside copies", "ms": 1000 * beside, "GB/s to the host": statistics.mean(copied)},
    ]
    words = f"a step takes {beside / alone:.2f} times as long beside copies of {length:,} positions"
    is_good = beside <= MOST_SLOWER * alone or trial.device.type != "cuda"
    return Finding(passed=is_good, words=words, rows=rows)


def _step_seconds(target: TargetModel, cache: FullKVCache) -> float:
    """Return the median of a one-row step."""
    seconds = []
    for token_id in random_ids(target.vocab_size, NUM_STEPS if target.device.type == "cuda" else 2, 3):
        started = time.perf_counter()
        target.verify([tree_rows(cache, token_id, DraftTree())])
        target.synchronize()
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds[1:])


def loading(trial: Trial) -> Iterator[Try]:
    yield "from files", functools.partial(_loading, trial)


def _loading(trial: Trial) -> Finding:
    rows: list[Row] = []
    for time_of in ("first", "again"):
        started = time.perf_counter()
        weights = dense_weights(trial.files, DTYPES[trial.sizes.dtype], trial.device)
        if trial.device.type == "cuda":
            torch.cuda.synchronize(trial.device)
        seconds = time.perf_counter() - started
        assert weights is not None
        rows.append(_row(time_of, sum(file.stat().st_size for file in trial.files.path.glob("*.safetensors")), seconds))
        del weights
    return Finding(passed=True, words=f"{rows[0]['GB/s']:.2f} GB/s from files in the page cache", rows=rows)


NUM_TIMES = 7


def wide_products(trial: Trial) -> Iterator[Try]:
    """Check products, and trees against plain decoding, at each number of rows."""
    parts = trial.parts(dtype="bfloat16" if trial.device.type == "cuda" else None)
    for num_rows in trial.sizes.row_counts:
        for name, attempt in _checks(parts.with_rows(num_rows), "products", "rows"):
            yield f"{name}, {num_rows} rows", attempt


def graph_memory(trial: Trial) -> Iterator[Try]:
    yield "context and graphs", functools.partial(_graph_memory, trial)


def _graph_memory(trial: Trial) -> Finding:
    if trial.device.type != "cuda":
        return untried("memory of graphs: no CUDA device")
    rows: list[Row] = [{"behind": "the start of CUDA", **_taken(trial.device)}]
    parts = trial.deep_parts()
    rows.append({"behind": f"weights of {parts.weights.product_bytes / 1e9:.1f} GB", **_taken(trial.device)})
    target = parts.target(2, 4096)
    rows.append({"behind": "the graph of a forward", **_taken(trial.device)})
    target.forwards.room_for(SummaryKVCache, 2048)
    rows.append({"behind": "the graphs of rounds and queries", **_taken(trial.device)})
    drawing = target.forwards.new_batch_sampler()
    drawing.top_candidates(torch.zeros(1, target.vocab_size, device=trial.device))
    rows.append({"behind": "the graphs of draws", **_taken(trial.device)})
    first, last = (float(row["outside, GB"]) for row in (rows[0], rows[-1]))
    words = f"the context takes {first:.2f} GB, graphs and libraries {last - first:.2f} GB more"
    return Finding(passed=True, words=words, rows=rows)


def _taken(device: torch.device) -> dict[str, float]:
    """Return the memory held by torch, and taken outside it."""
    torch.cuda.synchronize(device)
    free, total = torch.cuda.mem_get_info(device)
    reserved = torch.cuda.memory_reserved(device)
    return {
        "allocated, GB": torch.cuda.memory_allocated(device) / 1e9,
        "reserved, GB": reserved / 1e9,
        "outside, GB": (total - free - reserved) / 1e9,
    }


def engines(trial: Trial) -> Iterator[Try]:
    yield "bench gpu", functools.partial(_benched, trial)


def _benched(trial: Trial) -> Finding:
    is_gpu = trial.device.type == "cuda"
    asked: dict[str, Any] = {"slots": (1, 4), "rows": (1, 16), "num_read": 2048, "engines": tuple(ENGINES)}
    small: dict[str, Any] = {"slots": (1,), "rows": (2,), "num_read": 2, "engines": ("autoregressive",)}
    options = Options(
        model=str(trial.decoded_files.path),
        dtype=trial.sizes.dtype,
        lengths=trial.sizes.engine_positions,
        num_tokens=trial.sizes.engine_tokens,
        **(asked if is_gpu else small),
    )
    records = list(measured(trial.parts(files=trial.decoded_files), options))
    print(tables(records), flush=True)
    rows = [flat(record) for record in records if "engine" in record]
    is_good = all(record.get("same_bits", True) and record.get("same_tokens", True) for record in records)
    [prefill, *_] = [record["tokens/s"] for record in records if "num_read" in record]
    words = f"{'the same' if is_good else 'OTHER'} tokens and bits; prefill {prefill:,.0f} tokens/s"
    return Finding(passed=is_good, words=words, rows=[{name: str(each) for name, each in row.items()} for row in rows])
