"""Stages that compare bits: the checks of `doctor`, and attention to keys and values in 8 bits."""

from __future__ import annotations

import functools
import importlib.util
import random
from collections.abc import Iterator

from bench.gpu.trial import Trial, Try
from swiftbatch.jobs.run.compute_options import KVDtype
from swiftbatch.worker.exactness.gpu_doctor.attention_check import OneLayer
from swiftbatch.worker.exactness.gpu_doctor.findings import Finding, Row, differing_bits
from swiftbatch.worker.exactness.gpu_doctor.gpu_doctor import CHECKS
from swiftbatch.worker.exactness.gpu_doctor.model_under_test import Parts
from swiftbatch.worker.kernels.gpu_kernel_choice import CudaKernels
from swiftbatch.worker.kernels.kernel_sizes import CUDA_SCALE_BYTES
from swiftbatch.worker.kernels.kv_quantization import CODES, coded, numbers_of

NUM_ATTENDED = 8  # rows of two slots


def products(trial: Trial) -> Iterator[Try]:
    """Versions, the memory's speed, products in all places."""
    return _checks(trial.parts(), "machine", "products")


def rows(trial: Trial) -> Iterator[Try]:
    """Trees against plain decoding, graphs against launches, our forward against transformers'."""
    return _checks(trial.parts(), "rows", "replay", "transformers")


def attention(trial: Trial) -> Iterator[Try]:
    """Attention at all lengths and its speed, and the noise."""
    return _checks(trial.parts(), "attention", "attention speed", "noise")


def packed(trial: Trial) -> Iterator[Try]:
    """Random codes of all kinds in the model's shapes."""
    return _checks(trial.parts(dtype="bfloat16"), "packed products")


def second_process(trial: Trial) -> Iterator[Try]:
    """The same work in another process."""
    return _checks(trial.parts(), "second process")


def flash(trial: Trial) -> Iterator[Try]:
    """The checks that flash-attn has a part in, where it is installed."""
    if importlib.util.find_spec("flash_attn") is None:
        yield "flash-attn", lambda: untried("flash-attn is not installed")
        return
    parts = trial.parts(CudaKernels(attention="flash"), dtype="bfloat16")
    yield from _checks(parts, "attention", "attention speed", "rows", "replay")


def untried(why: str) -> Finding:
    """A finding about what this machine does not have."""
    return Finding(passed=True, words=f"not tried: {why}", rows=[], unproved=why)


def _checks(parts: Parts, *names: str) -> Iterator[Try]:
    """Yield the checks of `doctor` with these names; unlike there, one that fails ends nothing."""
    for check in CHECKS:
        if check.name in names:
            yield check.name, functools.partial(check.run, parts)
            parts.forget_unused()


def kept_rows(trial: Trial) -> Iterator[Try]:
    """Attention to codes against attention to the numbers that they stand for."""
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
