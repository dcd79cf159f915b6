"""Known tokens use rows that a step's trees leave free."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch

from swiftbatch.jobs.sampling_params import SamplingParams
from swiftbatch.worker.drafters.drafter_interface import Drafter, DraftRequest, ReadRows
from swiftbatch.worker.engine.engine import Engine
from swiftbatch.worker.engine.prefill import Slot
from swiftbatch.worker.forward.cuda.cuda_forwards import CudaForwards
from swiftbatch.worker.forward.target_model import TargetModel
from swiftbatch.worker.forward.tile_packing import SequenceRows
from swiftbatch.worker.kernels.kernel_sizes import NUM_ROWS
from swiftbatch.worker.model.model_files import ModelFiles
from swiftbatch.worker.sampling.draft_tree import ROOT, DraftTree
from swiftbatch.worker.sampling.sequence import Sequence
from tests.worker.forward.cuda.cuda_parts import cuda_target

pytestmark = pytest.mark.long

SPOILT = 200  # a token of no prompt or tree
Forwarded = list[list[tuple[int, int]]]  # per forward and sequence: first entry, rows


class Guesser(Drafter):
    def __init__(self, num_nodes: int, needs_top_k: bool = False) -> None:
        self.num_nodes, self.needs_top_k, self.learns_rows = num_nodes, needs_top_k, needs_top_k
        self.heard: list[ReadRows] = []

    def propose(self, requests: list[DraftRequest]) -> list[DraftTree]:
        return [DraftTree(list(range(self.num_nodes)), [ROOT] * self.num_nodes) for _ in requests]

    def learn(self, rows: ReadRows) -> None:
        self.heard.append(rows)


@pytest.fixture(scope="module")
def on_gpu(files: ModelFiles) -> TargetModel:
    return cuda_target(files, torch.float32, num_slots=3, linear="cublas")


@pytest.fixture(scope="module")
def in_torch(files: ModelFiles) -> TargetModel:
    """Torch is faster than the interpreter."""
    target = TargetModel(TargetModel.load(files, "float32", "cpu").transformers, files)
    target.forwards.rows_per_forward = NUM_ROWS
    return target


@pytest.fixture(scope="module", params=["graph", "torch"])
def target(request: pytest.FixtureRequest, on_gpu: TargetModel, in_torch: TargetModel) -> TargetModel:
    return on_gpu if request.param == "graph" else in_torch


# the first test covers the GPU, tests of caches cover copied slots
MOSTLY_IN_TORCH = pytest.mark.parametrize(
    "target", [pytest.param("graph", marks=pytest.mark.slow), "torch"], indirect=True
)


@pytest.fixture
def forwarded(monkeypatch: pytest.MonkeyPatch) -> Forwarded:
    seen: Forwarded = []
    verify = TargetModel.verify

    def noted(target: TargetModel, groups: list[SequenceRows], *layers: tuple[int, ...]) -> object:
        seen.append([(group.first_entry, len(group)) for group in groups])
        return verify(target, groups, *layers)

    monkeypatch.setattr(TargetModel, "verify", noted)
    return seen


def job(name: str, num_prompt: int, num_tokens: int, first: int = 3) -> Sequence:
    prompt = [(first + 5 * i + i * i) % 60 + 5 for i in range(num_prompt)]
    params = SamplingParams(max_tokens=num_tokens, temperature=0.8, seed=len(name), ignore_eos=True)
    return Sequence(name, prompt, params, 289)


JOBS = (("a", 3, 4, 3), ("bb", 70, 2, 1), ("ccc", 20, 1, 2))


@functools.cache
def alone(target: TargetModel, fields: tuple[str, int, int, int]) -> tuple[list[int], np.ndarray]:
    """Return tokens, keys and values."""
    engine, sequence = Engine(target, Guesser(2)), job(*fields)
    slot = engine.start(sequence)
    while sequence.finish_reason is None:
        engine.step()
    engine.stop(sequence)
    return sequence.output_ids.tolist(), slot.cache.kv(0, slot.cache.length).copy()


def ridden(target: TargetModel, jobs: tuple[tuple[str, int, int, int], ...]) -> Engine:
    """Check each job against itself alone."""
    expected = [alone(target, fields) for fields in jobs]
    engine = Engine(target, Guesser(2))
    slots = [engine.start(job(*fields)) for fields in jobs]
    while any(slot.sequence.finish_reason is None for slot in slots):
        engine.step()
    for slot, (tokens, kv) in zip(slots, expected, strict=True):
        assert slot.sequence.output_ids.tolist() == tokens
        assert np.array_equal(slot.cache.kv(0, slot.cache.length), kv)
    return engine


def test_tokens_and_keys_and_values_are_those_of_a_job_alone(target: TargetModel) -> None:
    """Prompts of several jobs, at once and in turn, over block boundaries."""
    engine = ridden(target, JOBS)
    assert engine.counters.num_prompt_tokens == sum(fields[1] for fields in JOBS)
    assert engine.counters.num_read_tokens == sum(fields[1] - 1 for fields in JOBS)


@MOSTLY_IN_TORCH
def test_a_beginning_that_two_jobs_share_rides_once_and_the_other_slot_has_its_bits(target: TargetModel) -> None:
    jobs = (*JOBS[:2], ("ccc", 76, 1, 1))
    engine = ridden(target, jobs)
    assert (engine.counters.num_read_tokens, engine.counters.num_copied_tokens) == (2 + 69 + 6, 69)


def test_who_waited_for_a_shared_beginning_copies_it_before_it_rides(in_torch: TargetModel) -> None:
    """The first reads it in a step with free rows, so the second needs none."""
    jobs = (("bb", 100, 2, 1), ("ccc", 110, 2, 1))
    expected = [alone(in_torch, fields) for fields in jobs]
    engine = Engine(in_torch, Guesser(2))
    slots = [engine.start(job(*fields)) for fields in jobs]
    while any(slot.sequence.finish_reason is None for slot in slots):
        engine.step()
    assert (engine.counters.num_read_tokens, engine.counters.num_copied_tokens) == (99 + 10, 99)
    for slot, (tokens, kv) in zip(slots, expected, strict=True):
        assert slot.sequence.output_ids.tolist() == tokens
        assert np.array_equal(slot.cache.kv(0, slot.cache.length), kv)


def test_nothing_is_drafted_in_rows_that_a_prompt_fills(in_torch: TargetModel) -> None:
    asked: list[tuple[int, int, int]] = []
    engine, slots = Engine(in_torch, Guesser(2)), list[Slot]()
    propose = engine.drafter.propose

    def noted(requests: list[DraftRequest]) -> list[DraftTree]:
        num_unread = sum(slot.num_to_prefill for slot in slots)
        asked.append((num_unread, requests[0].max_nodes, requests[0].max_depth))
        return propose(requests)

    engine.drafter.propose = noted  # type: ignore[method-assign]
    engine.start(job("a", 3, 30))
    while engine.step() == []:
        pass
    slots.append(engine.start(job("bb", 200, 30)))
    for _ in range(8):
        engine.step()
    beside = [limits for num_unread, *limits in asked if num_unread]
    alone_again = [limits for num_unread, *limits in asked if not num_unread]
    assert len(beside) > 1
    assert {tuple(limits) for limits in beside} == {(0, 0)}
    assert all(max_nodes > 0 and max_depth > 0 for max_nodes, max_depth in alone_again)


def test_prompts_fill_the_rows_of_a_step_and_nobody_waits(in_torch: TargetModel, forwarded: Forwarded) -> None:
    engine = Engine(in_torch, Guesser(7))
    decoding, first, second = job("a", 1, 40), job("b", 75, 3), job("c", 100, 3, first=1)
    for sequence in (decoding, first, second):
        engine.start(sequence)
    for step in range(1, 3):
        engine.step()
        assert decoding.num_generated_tokens >= step
    assert [rows[0][1] for rows in forwarded] == [8, 8]
    # 74 tokens of b, then the first of c; a new part at each 64th position
    assert [rows[1:] for rows in forwarded] == [[(0, 56)], [(56, 8), (64, 10), (0, 38)]]


def test_where_nobody_decodes_prompts_are_read_by_whole_forwards(in_torch: TargetModel, forwarded: Forwarded) -> None:
    engine = Engine(in_torch, Guesser(7))
    for sequence in (job("a", 90, 3), job("b", 60, 3)):
        engine.start(sequence)
    assert engine.step() == []
    assert forwarded == [[(0, 64)]]
    assert [sequence.sequence_id for sequence, _ in engine.step()] == ["a"]
    assert forwarded[1:] == [[(64, 25), (0, 39)], [(89, 8), (39, 20)]]


def test_where_trees_leave_few_rows_a_prompt_has_one_forward_more_a_step(
    in_torch: TargetModel, forwarded: Forwarded
) -> None:
    engine = Engine(in_torch, Guesser(39))
    decoding, reading = job("a", 1, 40), job("b", 150, 3)
    engine.start(decoding)
    engine.start(reading)
    engine.step()
    assert forwarded == [[(0, 40), (0, 64), (64, 24)]]  # 24 rows beside the tree, then 64
    assert decoding.num_generated_tokens >= 1


@MOSTLY_IN_TORCH
def test_drafters_hear_of_every_token_that_rode(target: TargetModel) -> None:
    drafter, sequences = Guesser(2, needs_top_k=True), [job("a", 2, 3), job("bb", 70, 1)]
    engine = Engine(target, drafter)
    for sequence in sequences:
        engine.start(sequence)
    while not all(sequence.finish_reason for sequence in sequences):
        engine.step()
    prompts = [sequence.token_ids[: sequence.num_prompt_tokens - 1] for sequence in sequences]
    heard = np.concatenate([rows.token_ids for rows in drafter.heard])
    assert np.array_equal(heard, np.concatenate(prompts))
    previous = np.concatenate([rows.previous_ids for rows in drafter.heard])
    assert np.array_equal(previous, np.concatenate([[prompt[0], *prompt[:-1]] for prompt in prompts]))
    plain = Guesser(0, needs_top_k=True)
    on_cpu = Engine(TargetModel.load(target.files, "float32", "cpu"), plain)
    for sequence in (job("a", 2, 3), job("bb", 70, 1)):
        on_cpu.start(sequence)
    on_cpu.step()
    best = [np.concatenate([rows.top_ids[:, 0] for rows in each.heard]) for each in (drafter, plain)]
    assert np.array_equal(*best)


@pytest.mark.filterwarnings("ignore:All-NaN slice")  # the interpreter's
def test_nan_behind_a_prompt_s_tokens_ends_that_job_alone(on_gpu: TargetModel) -> None:
    expected, _ = alone(on_gpu, JOBS[0])
    assert isinstance(on_gpu.forwards, CudaForwards)
    embedding = on_gpu.forwards._weights.embedding[SPOILT]
    whole = embedding.clone()
    embedding.fill_(float("nan"))
    other, spoilt = job(*JOBS[0]), job("b", 20, 3)
    spoilt.token_ids[9] = SPOILT
    engine = Engine(on_gpu, Guesser(2, needs_top_k=True))
    for sequence in (other, spoilt):
        engine.start(sequence)
    while not (other.finish_reason and spoilt.finish_reason):
        engine.step()
    embedding.copy_(whole)
    assert (other.error, other.output_ids.tolist()) == (None, expected)
    assert "logits for position 20 are not finite (NaN)" in (spoilt.error or "")


def test_a_replay_rides_too(on_gpu: TargetModel, forwarded: Forwarded) -> None:
    """A resume's text is longer than its prompt, and its cache may hold a part."""
    fields = ("bb", 20, 4, 1)
    tokens, kv = alone(on_gpu, fields)
    forwarded.clear()
    engine, again = Engine(on_gpu, Guesser(2)), job(*fields)
    engine.start(job("a", 1, 40))
    again.extend(tokens[:3])
    cache = on_gpu.new_cache(again.max_length)
    cache.load(kv[:, :10])
    engine.start(again, cache)
    while again.finish_reason is None:
        engine.step()
    assert again.output_ids.tolist() == tokens
    assert np.array_equal(cache.kv(0, cache.length), kv)
    assert forwarded[0] == [(0, 3), (10, 12)]
    assert engine.counters.num_read_tokens == 12
