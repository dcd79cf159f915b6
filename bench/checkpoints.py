"""The cost of writing state, and its gain on a resume."""

from __future__ import annotations

import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from bench.options import Ints
from bench.peak_memory import peak_bytes, reset_peak
from bench.tables import Record
from swiftbatch.jobs.checkpoints.checkpoint_files import ResumeRecord
from swiftbatch.jobs.checkpoints.checkpoint_store import CheckpointStore
from swiftbatch.jobs.job import Job, JobRecord, packed
from swiftbatch.jobs.run.run import Run
from swiftbatch.jobs.run.run_records import RunManifest
from swiftbatch.jobs.sampling_params import SamplingParams
from swiftbatch.worker.config import CheckpointSettings, Computation, EngineConfig
from swiftbatch.worker.decode_bench import BenchError, BenchOptions, check_length, text_tokens
from swiftbatch.worker.model.model_files import locate_model
from swiftbatch.worker.session.session import WorkerSession
from swiftbatch.worker.session.work_messages import Assignment, Orders
from swiftbatch.worker.text.tokenizer import TextCodec

JOB_ID = "bench"
SLICE_SECONDS = 0.05
STEP_SECONDS = 1e-6  # about one step
MOST_SLICE_TOKENS = 1024  # more than any slice generates
DRAIN_SECONDS = 600.0


@dataclass(frozen=True)
class Turn:
    num_tokens: int
    seconds: float
    num_peak_bytes: int  # of resident memory above the start

    @property
    def ms_per_token(self) -> float:
        return 1000 * self.seconds / self.num_tokens


def make_run(folder: Path, model: str, prompt: str, max_tokens: int) -> None:
    """Make a run with one job at temperature 1 and min-p 0.1."""
    files = locate_model(model)
    manifest = RunManifest(
        run_id="bench",
        created=time.time(),
        model=model,
        model_fingerprint=files.fingerprint,
        text_fingerprint=files.text_fingerprint,
        model_files={**files.digests.model, **files.digests.text},
        engine="",
        dtype="bfloat16",
        device="auto",
        num_threads=1,
        seed=0,
        clock="",
        versions={},
        exactness="not probed",
        cpu_capability="",
    )
    sampling = SamplingParams(max_tokens=max_tokens, temperature=1.0, min_p=0.1, seed=1, ignore_eos=True)
    job = Job(custom_id="bench", url="/v1/completions", prompt=prompt, sampling=sampling)
    ids = TextCodec(files).prompt_of(job).token_ids
    record = JobRecord(JOB_ID, job, 1, len(ids), prompt_token_ids=packed(ids))
    Run.planned(str(folder), manifest).made().add_jobs([record])


class BenchWorker:
    """One attempt at a run's only job."""

    def __init__(self, folder: Path, config: EngineConfig) -> None:
        run = Run.open(str(folder))
        [record] = run.jobs()
        self._session = WorkerSession(config, str(folder), "bench")
        self._checkpoints = CheckpointStore.of(run)
        attempt = max(self._checkpoints.attempts(JOB_ID), default=0) + 1
        self._orders = Orders((Assignment.of(record, attempt, num_attempts=attempt),))
        self.num_tokens = 0

    @property
    def output_ids(self) -> np.ndarray:
        [sequence] = self._session.engine.sequences
        return sequence.output_ids

    @property
    def num_state_bytes(self) -> int:
        return self._session.engine.counters.checkpoint_bytes["state"]

    def generate_to(self, num_tokens: int) -> Turn:
        """Work until the job has `num_tokens` tokens, resume included."""
        resident, started, num_before = reset_peak(), time.perf_counter(), self.num_tokens
        while self.num_tokens < num_tokens:
            self._work(STEP_SECONDS if num_tokens - self.num_tokens < MOST_SLICE_TOKENS else SLICE_SECONDS)
        return Turn(self.num_tokens - num_before, time.perf_counter() - started, peak_bytes() - resident)

    def resume_seconds(self) -> float:
        """Resume until the first new token."""
        self._work(STEP_SECONDS)
        num_recovered = self._resume().num_recovered_tokens
        while self.num_tokens <= num_recovered:
            self._work(STEP_SECONDS)
        return self._resume().seconds

    def drain(self) -> None:
        self._session.drain(DRAIN_SECONDS)

    def _work(self, seconds: float) -> None:
        report = self._session.work(self._orders, seconds)
        if not report.of("running"):
            reasons = [outcome.reason for outcome in report.of("failed", "refused")]
            ended = "; ".join(reasons) or "take other positions"
            raise BenchError(f"the job ended while it was measured: {ended}")
        [progress] = report.of("running")
        self._orders = Orders()
        self.num_tokens = progress.num_generated_tokens

    def _resume(self) -> ResumeRecord:
        record = self._checkpoints.history(JOB_ID)[-1].resume
        assert record is not None
        return record


SPARE_TOKENS = 1024  # the last step may overrun, but must not end the job


class Options(BenchOptions):
    """Options; `num_rounds` x `checkpoint_tokens` tokens after each position."""

    text: Path
    engine: str = Computation.engine
    positions: Ints = (4096,)
    checkpoint_tokens: int = CheckpointSettings.checkpoint_tokens  # between two states; more than a step generates
    num_rounds: int = 5  # intervals measured with and without state

    def engine_config(self, checkpoint: Literal["tokens", "state"]) -> EngineConfig:
        fields = self.model_dump(include={"model", "engine", "dtype", "device", "num_threads", "checkpoint_tokens"})
        return EngineConfig(checkpoint=checkpoint, **fields)


def run(options: Options) -> Iterator[Record]:
    """Measure what writing state costs while a job runs, and what it saves when the job is resumed.

    `overhead` is time with state over time without, less 1; the seconds of a resume end with its first new token.

    \b
    Example:
      python -m bench checkpoints --positions 4096,60000 --text book.txt --json checkpoints.jsonl
    """
    files, highest = locate_model(options.model), max(options.positions)
    num_tokens = (options.num_rounds + 3) * options.checkpoint_tokens
    check_length(files, highest, num_tokens)
    text = text_tokens(options.text, files, highest)
    for position in options.positions:
        with tempfile.TemporaryDirectory(prefix="swiftbatch-bench-") as folder:
            prompt = TextCodec(files).decode(text[:position])
            most = min(num_tokens + SPARE_TOKENS, files.max_positions - position)
            make_run(Path(folder) / "state", options.model, prompt, most)
            yield _measure(options, position, Path(folder))


def _measure(options: Options, position: int, folder: Path) -> Record:
    first = BenchWorker(folder / "state", options.engine_config("state"))
    first.generate_to(1)
    first.drain()
    shutil.copytree(folder / "state", folder / "tokens")
    pair = [BenchWorker(folder / name, options.engine_config(name)) for name in ("tokens", "state")]
    rounds = list(_rounds(pair, options))
    tokens_ms, state_ms = ([turn.ms_per_token for turn in turns] for turns in zip(*rounds, strict=True))
    undisturbed, preempted = pair
    preempted.drain()  # so that background writes are complete and counted
    shutil.copytree(folder / "state", folder / "replay", ignore=shutil.ignore_patterns("*.arrow", "manifest.json"))
    resumed = [BenchWorker(folder / name, options.engine_config("state")) for name in ("state", "replay")]
    kv_seconds, replay_seconds = (worker.resume_seconds() for worker in resumed)
    num_tokens = resumed[0].num_tokens + options.checkpoint_tokens
    for worker in (undisturbed, *resumed):
        worker.generate_to(num_tokens)
    outputs = {tuple(worker.output_ids[:num_tokens]) for worker in (undisturbed, *resumed)}
    for worker in (undisturbed, *resumed):
        worker.drain()  # so that nothing writes into the folder any more
    return {
        "position": position,
        "tokens_ms_per_token": statistics.median(tokens_ms),
        "state_ms_per_token": statistics.median(state_ms),
        "overhead": statistics.median(s / t for t, s in zip(tokens_ms, state_ms, strict=True)) - 1,
        "segment_MiB": max(path.stat().st_size for path in (folder / "state").glob("checkpoints/*/*/kv-*")) / 2**20,
        "bytes_per_token": preempted.num_state_bytes / (preempted.num_tokens - first.num_tokens),
        "peak_MiB_above": statistics.median(s.num_peak_bytes - t.num_peak_bytes for t, s in rounds) / 2**20,
        "kv_seconds": kv_seconds,
        "replay_seconds": replay_seconds,
        "same_tokens": len(outputs) == 1,  # of both resumes and the undisturbed worker
    }


def _rounds(pair: list[BenchWorker], options: Options) -> Iterator[tuple[Turn, Turn]]:
    """Generate one interval with both workers, in alternating order."""
    half = options.checkpoint_tokens // 2  # so that a state is due and written in the middle of a turn
    for worker in pair:
        worker.generate_to(half)
    for number in range(1, options.num_rounds + 1):
        num_tokens = half + number * options.checkpoint_tokens
        ordered = pair if number % 2 else pair[::-1]
        turns = {worker: worker.generate_to(num_tokens) for worker in ordered}
        yield turns[pair[0]], turns[pair[1]]
