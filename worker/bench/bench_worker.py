"""A worker's session with one job, generating by command, for benchmarks of checkpoints."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from swiftbatch.jobs.checkpoints.checkpoint_store import CheckpointStore, ResumeRecord
from swiftbatch.jobs.job import Job, JobRecord, SentJob, packed
from swiftbatch.jobs.run.run import Run, RunManifest
from swiftbatch.jobs.sampling import SamplingParams
from swiftbatch.worker.bench.bench_engine import BenchError
from swiftbatch.worker.bench.peak_memory import peak_bytes, reset_peak
from swiftbatch.worker.config import EngineConfig
from swiftbatch.worker.model.model_files import locate_model
from swiftbatch.worker.model.tokenizer import TextCodec
from swiftbatch.worker.session.session import WorkerSession
from swiftbatch.worker.session.work_messages import Assignment, Orders

JOB_ID = "bench"
SLICE_SECONDS = 0.05
STEP_SECONDS = 1e-6  # a slice of about one step
MOST_SLICE_TOKENS = 1024  # what no slice generates
DRAIN_SECONDS = 600.0


@dataclass(frozen=True)
class Turn:
    num_tokens: int
    seconds: float
    num_peak_bytes: int  # of resident memory, above that at its beginning

    @property
    def ms_per_token(self) -> float:
        return 1000 * self.seconds / self.num_tokens


def make_run(folder: Path, model: str, prompt: str, max_tokens: int) -> None:
    """A run folder with one job: the prompt, sampled on at temperature 1 with min-p 0.1."""
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
    Run.create_or_open(str(folder), manifest).add_jobs([record])


class BenchWorker:
    """One attempt at the job of a run folder."""

    def __init__(self, folder: Path, config: EngineConfig) -> None:
        run = Run.open(str(folder))
        [record] = run.jobs()
        self._session = WorkerSession(config, str(folder), "bench")
        self._checkpoints = CheckpointStore.of(run)
        attempt = max(self._checkpoints.attempts(JOB_ID), default=0) + 1
        self._orders = Orders((Assignment(SentJob.of(record), attempt, num_attempts=attempt),))
        self.num_tokens = 0

    @property
    def output_ids(self) -> np.ndarray:
        """The tokens so far, `[num_tokens]`."""
        [sequence] = self._session.engine.sequences
        return sequence.output_ids

    @property
    def num_state_bytes(self) -> int:
        return self._session.engine.counters.checkpoint_bytes["state"]

    def generate_to(self, num_tokens: int) -> Turn:
        """Work until the job has `num_tokens` tokens; the time of what a resume has to do first counts as well."""
        resident, started, num_before = reset_peak(), time.perf_counter(), self.num_tokens
        while self.num_tokens < num_tokens:
            self._work(STEP_SECONDS if num_tokens - self.num_tokens < MOST_SLICE_TOKENS else SLICE_SECONDS)
        return Turn(self.num_tokens - num_before, time.perf_counter() - started, peak_bytes() - resident)

    def resume_seconds(self) -> float:
        """Take the preempted job in and work until it has a new token; returns the seconds from one to the other."""
        self._work(STEP_SECONDS)
        num_recovered = self._resume().num_recovered_tokens
        while self.num_tokens <= num_recovered:
            self._work(STEP_SECONDS)
        return self._resume().seconds

    def drain(self) -> None:
        """Write a whole checkpoint and hand the job back."""
        self._session.drain(DRAIN_SECONDS)

    def _work(self, seconds: float) -> None:
        report = self._session.work(self._orders, seconds)
        if not report.progress:
            reasons = [*(words for _, words in report.failed), *(words for *_, words in report.refused)]
            ended = "; ".join(reasons) or "take other positions"
            raise BenchError(f"the job ended while it was measured: {ended}")
        [progress] = report.progress
        self._orders = Orders()
        self.num_tokens = progress.num_generated_tokens

    def _resume(self) -> ResumeRecord:
        """Return how this attempt began; the record is written again with its seconds at the first new token."""
        record = self._checkpoints.history(JOB_ID)[-1].resume
        assert record is not None
        return record
