"""Prompts that a batch takes in beside decoding."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict, deque
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from pydantic import PositiveInt

from bench.options import Engines
from bench.tables import Record
from swiftbatch.jobs.sampling_params import SamplingParams
from swiftbatch.worker.decode_bench import (
    BASELINE,
    BY_NAME,
    BenchEngine,
    BenchError,
    BenchOptions,
    bench_slots,
    check_length,
    digest,
    encode,
    read_text,
)
from swiftbatch.worker.drafters.catalogue import DEFAULT_ENGINE
from swiftbatch.worker.engine.prefill import Slot
from swiftbatch.worker.forward.step_costs import step_costs_of
from swiftbatch.worker.forward.target_model import TargetModel
from swiftbatch.worker.model.model_files import locate_model
from swiftbatch.worker.sampling.sequence import Sequence

SHORT = 16  # tokens of the prompts that long ones are compared with
SAMPLING = SamplingParams(max_tokens=1, temperature=1.0, min_p=0.1, ignore_eos=True)


class Options(BenchOptions):
    """Jobs with prompts of `prompt` tokens; the next one starts when one of `slots` jobs ends."""

    text: Path
    engines: Engines = (BASELINE, DEFAULT_ENGINE)
    prompt: PositiveInt = 550
    num_tokens: PositiveInt = 128  # per job, half as many to half as many again
    slots: PositiveInt = 8
    num_jobs: PositiveInt = 24


def run(options: Options) -> Iterator[Record]:
    """Run jobs that follow each other, with short prompts and with long ones, on one worker's engine.

    `share_of_steps` is the share of decoding steps beside which a prompt is read, `decoding_share` the speed of a
    decoding job in these steps over its speed in the others.

    \b
    Example:
      python -m bench prompts --model model.gguf --prompt 550 --slots 8 --text book.txt --json prompts.jsonl
    """
    files = locate_model(options.model)
    check_length(files, options.prompt, 2 * options.num_tokens)
    longest = options.prompt + 2 * options.num_tokens
    target = options.load(files, bench_slots(options.engines, longest, options.slots, files))
    ids = encode(files, read_text(options.text))
    if len(ids) <= options.prompt:
        raise BenchError(f"text {options.text}: it has {len(ids)} tokens, a prompt needs {options.prompt + 1}")
    for name in options.engines:
        for length in (SHORT, options.prompt):
            yield {"engine": name, "prompt": length} | _Batch(options, target, name).figures(ids, length)


class _Batch:
    """Jobs on an engine, and what their steps took."""

    def __init__(self, options: Options, target: TargetModel, name: str) -> None:
        self._options, self._target = options, target
        self._engine = BenchEngine(target, BY_NAME[name](target, step_costs_of(target), None))
        self._slots: list[Slot] = []
        self._seconds = 0.0  # of all steps
        self._started, self._waited = dict[str, float](), list[float]()  # the seconds to each job's first token
        # of steps beside prompts (True) and of the others: steps, decoding jobs times seconds, tokens
        self._sums: dict[bool, np.ndarray] = defaultdict(lambda: np.zeros(3))

    def _jobs(self, ids: list[int], length: int) -> Iterator[Sequence]:
        draw, target, num_tokens = np.random.default_rng(5), self._target, self._options.num_tokens
        for number, start in enumerate(draw.integers(len(ids) - length, size=self._options.num_jobs).tolist()):
            own = int(draw.integers(num_tokens // 2, num_tokens * 3 // 2 + 1))
            sampling = SAMPLING.model_copy(update={"max_tokens": own, "seed": number})
            yield Sequence(f"job-{number}", ids[start : start + length], sampling, target.vocab_size, target.device)

    def figures(self, ids: list[int], length: int) -> Record:
        jobs = list(self._jobs(ids, length))
        waiting = deque(jobs)
        while waiting or self._slots:
            while waiting and len(self._slots) < self._options.slots:
                self._started[waiting[0].sequence_id] = self._seconds
                self._slots.append(self._engine.start(waiting.popleft()))
            self._step()
        (_, beside_seconds, beside_tokens), (_, seconds, num_tokens) = self._sums[True], self._sums[False]
        rates = beside_tokens / max(beside_seconds, 1e-9), num_tokens / max(seconds, 1e-9)
        return {
            "tokens_per_second": sum(job.num_generated_tokens for job in jobs) / self._seconds,
            "share_of_steps": float(self._sums[True][0] / (self._sums[True][0] + self._sums[False][0])),
            "decoding_share": float(rates[0] / rates[1]) if beside_tokens and num_tokens else None,
            "first_token_seconds": statistics.median(self._waited),
            "tokens_sha256": digest(*(job.output_ids for job in jobs)),
        }

    def _step(self) -> None:
        decoding = {slot.sequence.sequence_id for slot in self._slots if not slot.num_to_prefill}
        num_steps, begun = self._engine.counters.num_steps, time.perf_counter()
        results = self._engine.step()
        seconds = time.perf_counter() - begun
        self._seconds += seconds
        for sequence, _ in results:
            if (started := self._started.pop(sequence.sequence_id, None)) is not None:
                self._waited.append(self._seconds - started)
        if decoding:
            num_tokens = sum(len(each.committed_ids) for job, each in results if job.sequence_id in decoding)
            num_taken = self._engine.counters.num_steps - num_steps
            self._sums[len(decoding) < len(self._slots)] += num_taken, len(decoding) * seconds, num_tokens
        for slot in [slot for slot in self._slots if slot.sequence.finish_reason is not None]:
            self._engine.stop(slot.sequence)
            self._slots.remove(slot)
