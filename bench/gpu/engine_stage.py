"""The stage of engines: what `bench gpu` measures of the embedded model, with every engine whose parts are there."""

from __future__ import annotations

import functools
from collections.abc import Iterator

from bench.gpu.gpu_figures import GPUBenchOptions, GPUBenchResult
from bench.gpu.measuring import measured
from bench.gpu.trial import Trial, Try
from swiftbatch.worker.drafters.catalogue import ENGINES
from swiftbatch.worker.exactness.gpu_doctor.findings import Finding, Row


def engines(trial: Trial) -> Iterator[Try]:
    """Steps, prompts, a resume, and every engine; on a CPU plain decoding alone."""
    yield "bench gpu", functools.partial(_benched, trial)


def _benched(trial: Trial) -> Finding:
    is_gpu = trial.device.type == "cuda"
    options = GPUBenchOptions(
        model=str(trial.decoded_files.path),
        dtype=trial.sizes.dtype,
        engines=tuple(ENGINES) if is_gpu else ("autoregressive",),
        lengths=trial.sizes.engine_positions,
        slot_counts=(1, 4) if is_gpu else (1,),
        row_counts=(1, 16) if is_gpu else (2,),
        num_read=2048 if is_gpu else 2,
        num_tokens=trial.sizes.engine_tokens,
    )
    return _finding(measured(trial.parts(files=trial.decoded_files), options, print))


def _finding(result: GPUBenchResult) -> Finding:
    first = {record.position: record.tokens_sha256 for record in reversed(result.engines)}
    rows: list[Row] = [
        {
            "engine": record.engine,
            "position": record.position,
            "tokens/s": 1000 / record.ms_per_token,
            "tokens a step": record.mean_acceptance_length,
            "verify, ms": record.verify_ms,
            "propose, ms": record.propose_ms,
            "same tokens": "yes" if record.tokens_sha256 == first[record.position] else "NO",
        }
        for record in result.engines
    ]
    is_good = result.resume.same_bits and all(row["same tokens"] == "yes" for row in rows)
    prefill = f"prefill {result.reads[0].tokens_per_second:,.0f} tokens/s"
    words = f"{'the same' if is_good else 'OTHER'} tokens and bits; {prefill}"
    left_out = f"; left out: {', '.join(result.left_out)}" if result.left_out else ""
    return Finding(passed=is_good, words=words + left_out, rows=rows)
