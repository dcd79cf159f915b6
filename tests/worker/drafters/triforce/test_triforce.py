"""TriForce gives equal tokens with any middle level or batch."""

from __future__ import annotations

import functools
import itertools

import pytest

from bench import compared_caches
from bench.compared_caches import PARTIAL_CACHES
from swiftbatch.jobs.sampling_params import SamplingParams
from swiftbatch.worker.drafters.catalogue import create_drafter
from swiftbatch.worker.drafters.engine_options import TriForceOptions
from swiftbatch.worker.drafters.self_speculation import SelfSpeculationDrafter
from swiftbatch.worker.drafters.triforce import triforce
from swiftbatch.worker.engine.engine import Engine
from swiftbatch.worker.forward.target_model import TargetModel
from swiftbatch.worker.kv.importance_cache import RetrievalKVCache
from swiftbatch.worker.sampling.sequence import Sequence
from swiftbatch.worker.text.tokenizer import TextCodec
from tests.tiny_targets import target as target
from tests.worker.drafters.drafter_parts import check_resumed, check_same_entries, free_rows, proposed
from tests.worker.drafters.test_two_level import run

pytestmark = pytest.mark.long

PROMPT = "the quick brown fox jumps over the lazy dog. the lazy fox jumps over the brown dog. " * 3
SAMPLERS = {
    "T=0": {"temperature": 0.0},
    "T=0.6": {"temperature": 0.6},
    "T=1, penalty": {"temperature": 1.0, "repetition_penalty": 1.2, "penalty_window": 64},
    "T=1.2, top-p 0.9": {"temperature": 1.2, "top_p": 0.9},
}
HARDEST = "T=1, penalty"
NUM_TOKENS = 100
CACHES = ("retrieval", "streaming", "h2o", "topk", "summary")


@pytest.fixture(autouse=True)
def small_periods(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compared_caches, "OBSERVED_EVERY", 8)


def new_sequence(target: TargetModel, sampler: str, name: str = "a", seed: int = 5) -> Sequence:
    params = SamplingParams(max_tokens=NUM_TOKENS, seed=seed, ignore_eos=True, **SAMPLERS[sampler])  # type: ignore[arg-type]
    return Sequence(name, TextCodec(target.files).encode(PROMPT), params, target.vocab_size)


def hierarchical(target: TargetModel, cache: str = "retrieval") -> SelfSpeculationDrafter:
    """Draft two tokens per middle verification up to six; the text overflows the budget."""
    new_cache = functools.partial(RetrievalKVCache, stride=24) if cache == "retrieval" else PARTIAL_CACHES[cache]
    return triforce(target, free_rows, None, TriForceOptions(budget=48, at_every_step=True), new_cache)


@pytest.fixture(scope="module")
def plain(target: TargetModel) -> dict[str, list[int]]:
    outputs = {}
    for sampler in SAMPLERS:
        sequence = new_sequence(target, sampler)
        run(target, create_drafter("autoregressive", target, free_rows), sequence)
        outputs[sampler] = sequence.output_ids.tolist()
    return outputs


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("sampler", "cache"),
    [
        pytest.param(sampler, cache, marks=() if cache == CACHES[0] or sampler == HARDEST else pytest.mark.slow)
        for sampler, cache in itertools.product(SAMPLERS, CACHES)
    ],
)
def test_the_tokens_are_those_of_plain_decoding(
    target: TargetModel, plain: dict[str, list[int]], sampler: str, cache: str
) -> None:
    sequence = new_sequence(target, sampler)
    drafter = hierarchical(target, cache)
    counters = run(target, drafter, sequence).counters
    assert sequence.output_ids.tolist() == plain[sampler]
    assert counters.num_accepted_tokens > 0
    assert 0 < drafter.counters.num_agreed_nodes <= drafter.counters.num_checked_nodes


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "sampler", [pytest.param(name, marks=() if name in ("T=0", HARDEST) else pytest.mark.slow) for name in SAMPLERS]
)
def test_chains_where_they_pay_change_no_token(target: TargetModel, plain: dict[str, list[int]], sampler: str) -> None:
    sequence = new_sequence(target, sampler)
    run(target, create_drafter("triforce", target, free_rows), sequence)
    assert sequence.output_ids.tolist() == plain[sampler]


def test_a_batch_shares_the_middle_verification(
    target: TargetModel, plain: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    sampler = "T=1, penalty"
    sequences = [new_sequence(target, sampler, name, seed) for name, seed in (("a", 5), ("b", 6), ("c", 7))]
    group_counts: list[int] = []
    check = target.check
    monkeypatch.setattr(target, "check", lambda groups: group_counts.append(len(groups)) or check(groups))
    run(target, hierarchical(target), *sequences)
    assert sequences[0].output_ids.tolist() == plain[sampler]
    assert group_counts.count(3) > group_counts.count(1)


@pytest.mark.parametrize("cache", CACHES)
def test_a_resumed_job_has_the_same_drafts(target: TargetModel, cache: str) -> None:
    undisturbed, resumed = hierarchical(target, cache), hierarchical(target, cache)
    sequence = new_sequence(target, "T=1, penalty")
    check_resumed(target, sequence, 80, undisturbed, resumed)
    check_same_entries(undisturbed, resumed)


def test_each_middle_verification_checks_gamma_1_tokens_until_there_are_gamma_2(
    target: TargetModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafter = hierarchical(target)
    sequence = new_sequence(target, "T=0")
    engine = Engine(target, drafter)
    engine.start(sequence)
    while sequence.num_generated_tokens == 0:
        engine.step()
    rows: list[int] = []
    check = target.check
    monkeypatch.setattr(target, "check", lambda groups: rows.append(len(groups[0])) or check(groups))
    tree = proposed(drafter, sequence, 31, 20)
    assert set(rows) == {3}
    assert 6 <= len(tree) <= 8
    assert tree.parents == list(range(-1, len(tree) - 1))
