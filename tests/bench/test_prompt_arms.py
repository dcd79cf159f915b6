from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import get_args

import numpy as np
import pytest

from bench.prompt_arms import Prompt, PromptArms, ReadPrompt, figures_of, read_prompt
from bench.tables import Record
from bench.triforce_ablation import TOP_P, Plan, PromptArm, new_drafter
from swiftbatch.jobs.sampling_params import SamplingParams
from swiftbatch.worker.decode_bench import BenchError
from swiftbatch.worker.drafters.choice.choosing_drafter import ChoosingDrafter
from swiftbatch.worker.drafters.drafter_interface import AutoregressiveDrafter, Drafter, DraftRequest
from swiftbatch.worker.drafters.triforce import hierarchy
from swiftbatch.worker.engine.engine import Engine
from swiftbatch.worker.forward.target_model import TargetModel
from swiftbatch.worker.kv.file_offload import FileRows
from swiftbatch.worker.kv.full_cache import FullKVCache
from swiftbatch.worker.sampling.draft_tree import DraftTree, Verification
from swiftbatch.worker.sampling.sequence import Sequence
from tests.tiny_targets import target as target
from tests.worker.drafters.drafter_parts import free_rows, run_to_ends

pytestmark = pytest.mark.usefixtures("one_thread")

PREFILL = 300
NUM_TOKENS = 40
SEED, TEMPERATURE = 7, 1.0
ARM = PromptArm({"budget": 64}, TEMPERATURE)


@pytest.fixture
def make_read(target: TargetModel) -> Callable[..., list[ReadPrompt]]:
    def make(num_sequences: int = 1, expected_ids: tuple[int, ...] = ()) -> list[ReadPrompt]:
        random = np.random.default_rng(3)
        prompts = [
            Prompt(random.integers(1, target.vocab_size, PREFILL).tolist(), list(expected_ids))
            for _ in range(num_sequences)
        ]
        return [read_prompt(target, prompt, NUM_TOKENS) for prompt in prompts]

    return make


class Oracle(Drafter):
    """Drafts three tokens of the known continuation, or always others."""

    def __init__(self, output_ids: np.ndarray, is_right: bool = True) -> None:
        self._output_ids = output_ids  # [num_generated]
        self._is_right = is_right

    def propose(self, requests: list[DraftRequest]) -> list[DraftTree]:
        return [self._chain(request.sequence, request.max_depth) for request in requests]

    def _chain(self, sequence: Sequence, max_depth: int) -> DraftTree:
        coming = self._output_ids[sequence.num_generated_tokens :][: min(3, max_depth)]
        return DraftTree.chain([t if self._is_right else (t + 1) % 200 for t in coming.tolist()])


class Vandal(Drafter):
    """Damages the cache after the prompt from plain decoding's turn on."""

    first_damaged = 15

    def start(self, sequence: Sequence, cache: FullKVCache) -> None:
        self._cache = cache

    def propose(self, requests: list[DraftRequest]) -> list[DraftTree]:
        return [DraftTree() for _ in requests]

    def update(self, sequence: Sequence, verification: Verification) -> None:
        if sequence.num_generated_tokens >= self.first_damaged:
            for layer in range(2):
                self._cache.stored(layer)[1][:, sequence.num_prompt_tokens : self._cache.length] = 30.0


def arms_behind(read: list[ReadPrompt], target: TargetModel, num_plain_tokens: int = NUM_TOKENS) -> PromptArms:
    return PromptArms(target, read, NUM_TOKENS, num_plain_tokens, SEED, TOP_P)


def run(arms: PromptArms, drafter: Drafter, expected_ids: tuple[int, ...] = ()) -> Record:
    return figures_of(*arms.run(drafter, TEMPERATURE), list(expected_ids))


def plain_ids(read: list[ReadPrompt], target: TargetModel) -> list[np.ndarray]:
    found = []
    for number, prompt in enumerate(read):
        sampling = SamplingParams(
            max_tokens=NUM_TOKENS, temperature=TEMPERATURE, top_p=0.9, seed=SEED + number, ignore_eos=True
        )
        sequence = Sequence("alone", prompt.prompt.token_ids, sampling, target.vocab_size)
        run_to_ends(Engine(target, AutoregressiveDrafter()), sequence)
        found.append(sequence.output_ids)
    return found


def test_arms_say_what_the_engine_says_alone_whoever_else_used_the_cache(
    target: TargetModel, make_read: Callable[..., list[ReadPrompt]]
) -> None:
    read = make_read(num_sequences=2)
    before = [prompt.cache.kv(0, PREFILL - 1).copy() for prompt in read]
    expected = plain_ids(read, target)
    arms = arms_behind(read, target, num_plain_tokens=35)
    plans: tuple[Plan, ...] = ("own", "paper", "naive")
    digests = {
        run(arms, new_drafter(target, free_rows, arm, None))["tokens_sha256"]
        for arm in [replace(ARM, plan=plan) for plan in plans]
    }
    assert digests == {hashlib.sha256(np.concatenate(expected).astype("<u4").tobytes()).hexdigest()}
    assert not np.array_equal(expected[0], expected[1])
    for prompt, kv in zip(read, before, strict=True):
        assert np.array_equal(prompt.cache.kv(0, PREFILL - 1), kv)


def test_wrong_tokens_stop_the_run_and_never_lead_plain_decoding_astray(
    target: TargetModel, make_read: Callable[..., list[ReadPrompt]]
) -> None:
    read = make_read()
    with pytest.raises(BenchError, match=r"sequence 0, token \d+ at T = 1: found \d+, expected \d+") as caught:
        run(arms_behind(read, target), Vandal())
    _, index, _, found, expected = (int(number) for number in re.findall(r"\d+", str(caught.value)))
    assert Vandal.first_damaged <= index < NUM_TOKENS
    assert expected == plain_ids(read, target)[0][index] != found
    assert "\n" not in str(caught.value)


def test_arms_are_compared_beyond_the_tokens_of_plain_decoding(
    target: TargetModel, make_read: Callable[..., list[ReadPrompt]]
) -> None:
    read = make_read()
    arms = arms_behind(read, target, num_plain_tokens=8)
    run(arms, Oracle(plain_ids(read, target)[0]))
    with pytest.raises(BenchError, match="token"):
        run(arms, Vandal())


@pytest.mark.parametrize(("is_right", "acceptance"), [(True, 1.0), (False, 0.0)])
def test_acceptance_is_accepted_over_drafted(
    target: TargetModel, make_read: Callable[..., list[ReadPrompt]], is_right: bool, acceptance: float
) -> None:
    read = make_read()
    figures = run(arms_behind(read, target), Oracle(plain_ids(read, target)[0], is_right))
    assert figures["acceptance"] == acceptance
    assert figures["middle_acceptance"] is None
    assert figures["tokens_per_step"] == pytest.approx(1 + acceptance * figures["drafted_per_step"], abs=0.01)
    assert figures["num_tokens"] == NUM_TOKENS
    lost = 1.0 if is_right else 1 + figures["drafted_per_step"]
    assert figures["speedup_bound"] == pytest.approx(lost * figures["speedup"], rel=0.01)


def test_plain_decoding_drafts_nothing(target: TargetModel, make_read: Callable[..., list[ReadPrompt]]) -> None:
    figures = run(arms_behind(make_read(), target), AutoregressiveDrafter())
    assert (figures["acceptance"], figures["middle_acceptance"], figures["tokens_per_step"]) == (None, None, 1.0)
    assert figures["needle_share"] is None
    assert figures["speedup"] > 0


def test_times_begin_behind_the_first_step(
    target: TargetModel, make_read: Callable[..., list[ReadPrompt]], monkeypatch: pytest.MonkeyPatch
) -> None:
    read = make_read()
    oracle = Oracle(plain_ids(read, target)[0])
    clock, propose, num_drafts = time.perf_counter, oracle.propose, 0

    def propose_late_at_first(requests: list[DraftRequest]) -> list[DraftTree]:
        nonlocal num_drafts
        num_drafts += 1
        return propose(requests)

    monkeypatch.setattr(oracle, "propose", propose_late_at_first)
    monkeypatch.setattr(time, "perf_counter", lambda: clock() + (100_000.0 if num_drafts else 0.0))
    figures = run(arms_behind(read, target), oracle)
    assert figures["first_step_ms"] > 100_000_000
    assert (
        max(figures["ms_per_token"], figures["step_ms"]["propose"]) < 100_000
    )  # with it, a token would take 2,500,000
    assert figures["speedup"] == pytest.approx(figures["plain_ms_per_token"] / figures["ms_per_token"], rel=0.01)


def test_the_middle_level_is_what_the_partial_cache_agrees_with(
    target: TargetModel, make_read: Callable[..., list[ReadPrompt]]
) -> None:
    arms = arms_behind(make_read(), target)
    whole = replace(ARM, plan="paper", options={"budget": 4096})
    figures = run(arms, new_drafter(target, free_rows, whole, None))
    assert figures["acceptance"] > 0.9  # the partial cache holds everything, so only rounding differs
    assert 0 < figures["middle_acceptance"] < figures["acceptance"]
    assert figures["rounds_per_step"] > 1
    assert set(figures["draft_ms"]) == {"follow", "propose", "check"}


def test_the_naive_policy_asks_no_partial_cache(
    target: TargetModel, make_read: Callable[..., list[ReadPrompt]]
) -> None:
    arm = replace(ARM, plan="naive")
    figures = run(arms_behind(make_read(), target), new_drafter(target, free_rows, arm, None))
    assert (figures["rounds_per_step"], figures["middle_acceptance"]) == (0.0, None)
    assert figures["drafted_per_step"] > 0.5
    assert figures["draft_ms"]["check"] == figures["draft_ms"]["follow"] == 0.0 < figures["draft_ms"]["propose"]


def test_plans_are_the_paper_s_at_every_step_or_where_they_pay(target: TargetModel) -> None:
    drafters = (new_drafter(target, free_rows, PromptArm(plan=plan), None) for plan in get_args(Plan))
    own, paper, naive, independent = drafters
    assert paper.plan == independent.plan == hierarchy(2, 6)
    assert naive.plan.num_rounds == 0
    assert isinstance(own, ChoosingDrafter)


def test_the_needle_s_share_is_what_plain_decoding_says_of_it(
    target: TargetModel, make_read: Callable[..., list[ReadPrompt]]
) -> None:
    [said] = plain_ids(make_read(), target)
    for num_wrong, share in ((0, 1.0), (10, 0.75), (NUM_TOKENS, 0.0)):
        expected = (*(said[:num_wrong] ^ 1).tolist(), *said[num_wrong:].tolist())
        figures = run(arms_behind(make_read(), target), Oracle(said), expected)
        assert figures["needle_share"] == share


def test_a_cache_outside_the_device_says_the_same(
    target: TargetModel, make_read: Callable[..., list[ReadPrompt]], tmp_path: Path
) -> None:
    read = make_read()
    outside = TargetModel(target.forwards, target.files, str(tmp_path))
    copies = [prompt.copy_to(outside, NUM_TOKENS) for prompt in read]
    assert isinstance(copies[0].cache.rows, FileRows)
    figures = [
        run(arms_behind(prompts, target), new_drafter(target, free_rows, ARM, None))
        for target, prompts in ((target, read), (outside, copies))
    ]
    assert figures[0]["tokens_sha256"] == figures[1]["tokens_sha256"]
