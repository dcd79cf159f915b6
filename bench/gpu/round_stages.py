"""Stages of rounds and of caches outside the GPU: chains that are drawn whatever they cost, and bits of layer rings."""

from __future__ import annotations

import functools
from collections.abc import Iterator

from bench.gpu.decoding import decoded, forced_rounds_of, random_ids, sequences_of
from bench.gpu.trial import Trial, Try, streams_of
from bench.variants import create_bench_drafter
from swiftbatch.worker.exactness.gpu_doctor.findings import Finding, Row
from swiftbatch.worker.exactness.gpu_doctor.forward_checks import ROOM, work_digest
from swiftbatch.worker.exactness.gpu_doctor.model_under_test import ArenaTarget, Parts
from swiftbatch.worker.forward.cuda.cuda_forwards import OffloadedForwards
from swiftbatch.worker.forward.step_costs import step_costs_of
from swiftbatch.worker.forward.target_model import TargetModel
from swiftbatch.worker.kv.kv_offload import OffloadedArena

NUM_SEQUENCES = 2


def forced_rounds(trial: Trial) -> Iterator[Try]:
    """Chains behind scanned texts against plain decoding, with caches on the GPU."""
    parts = trial.parts(files=trial.decoded_files)
    longest = trial.sizes.forced_length + trial.sizes.forced_tokens
    yield "on the device", lambda: _rounds(trial, parts.target(NUM_SEQUENCES + 1, longest))


def offload(trial: Trial) -> Iterator[Try]:
    """The bits of caches that come layer by layer, and the tokens of rounds that read them by themselves."""
    parts = trial.parts()
    yield "bits", functools.partial(_offloaded_bits, trial, parts)
    deep = trial.parts(files=trial.decoded_files)
    longest = trial.sizes.forced_length + trial.sizes.forced_tokens
    yield "rounds from the host", lambda: _rounds(trial, offloaded_target(deep, NUM_SEQUENCES + 1, longest))


def offloaded_target(parts: Parts, num_slots: int, longest: int) -> ArenaTarget:
    """The model with caches in the host's memory."""
    arena = OffloadedArena(parts.cache_shape(), num_slots, longest, streams_of(parts.device))
    arena.buffer.zero_()
    forwards = OffloadedForwards(parts.weights, arena, frozenset(), parts.num_splits, parts.kernels, parts.capture)
    return ArenaTarget(forwards, parts.files)


def _offloaded_bits(trial: Trial, parts: Parts) -> Finding:
    lengths, rows = (0, trial.sizes.offloaded_length), list[Row]()
    longest = max(lengths) + ROOM
    for name, make in (("device", parts.target), ("host", functools.partial(offloaded_target, parts))):
        rows.append({"caches on the": name, "sha256": work_digest(make(len(lengths), longest), lengths)[:16]})
        parts.forget_unused()
    is_same = rows[0]["sha256"] == rows[1]["sha256"]
    return Finding(
        passed=is_same, words=f"{'the same' if is_same else 'OTHER'} bits with caches on the host", rows=rows
    )


def _rounds(trial: Trial, target: TargetModel) -> Finding:
    """A long text and a short one, which has nothing to scan; plain decoding must give the same tokens."""
    sizes, costs = trial.sizes, step_costs_of(target)
    prompts = [random_ids(target.vocab_size, length, 5) for length in (sizes.forced_length, 20)]
    rows, found = list[Row](), []
    for name in ("rounds", "autoregressive"):
        drafter = forced_rounds_of(target, costs) if name == "rounds" else create_bench_drafter(name, target, costs)
        done = decoded(target, drafter, sequences_of(target, prompts, sizes.forced_tokens), [None] * len(prompts))
        found.append(done.token_ids)
        rows.append(
            {
                "drafts": name,
                "rounds": drafter.counters.num_rounds,
                "tokens a step": done.num_tokens / max(1, done.num_steps) / len(prompts),
                "ms a step": 1000 * done.seconds / max(1, done.num_steps),
                "sha256": done.sha256,
            }
        )
    num_rounds = int(rows[0]["rounds"])
    words = f"{num_rounds} rounds, {'the same' if found[0] == found[1] else 'OTHER'} tokens as plain decoding"
    return Finding(passed=found[0] == found[1] and num_rounds > 0, words=words, rows=rows)
