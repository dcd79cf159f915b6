"""The engine that chooses by itself: the same tokens whatever it does, and it does what pays."""

from __future__ import annotations

import numpy as np
import pytest

from swiftbatch.jobs.sampling_params import SamplingParams
from swiftbatch.worker.drafters.auto import auto
from swiftbatch.worker.drafters.catalogue import create_drafter
from swiftbatch.worker.drafters.choice import ways
from swiftbatch.worker.drafters.choice.choosing_drafter import ChoosingDrafter
from swiftbatch.worker.drafters.choice.rounds import (
    PRIOR_ALIKE,
    STEPS_TO_KNOW,
    RoundsChoice,
    RoundsPlanner,
)
from swiftbatch.worker.drafters.choice.tree_sizes import NODE_CHOICES
from swiftbatch.worker.drafters.choice.ways import ChainWay
from swiftbatch.worker.drafters.drafter_interface import DraftRequest
from swiftbatch.worker.drafters.self_speculation import ChainTree, Round
from swiftbatch.worker.engine.engine import Engine
from swiftbatch.worker.forward.step_costs import ROW_COUNTS, StepCosts
from swiftbatch.worker.forward.target_model import TargetModel
from swiftbatch.worker.kernels.kv_codes import SCAN_CHUNK
from swiftbatch.worker.kv.scan_cache import MOST_ENTRIES, NUM_RECENT
from swiftbatch.worker.kv.sparse_cache import NUM_PINNED
from swiftbatch.worker.sampling.draft_tree import DraftTree
from swiftbatch.worker.sampling.sequence import Sequence
from tests.worker.drafters.drafter_parts import check_resumed, free_rows, proposed, run_to_ends
from tests.worker.kernels.kernel_parts import needs_kernels

pytestmark = needs_kernels
LENGTHS = (64, 8192, 100_000)
SAMPLERS = {
    "T=0": {"temperature": 0.0},
    "T=1, min-p 0.1, penalty": {"temperature": 1.0, "min_p": 0.1, "repetition_penalty": 1.2, "penalty_window": 128},
}


def long_caches_cost() -> StepCosts:
    """A millisecond a forward, and what 100,000 positions take: 18 for a row, 2.5 more for every other."""
    rows = np.array(ROW_COUNTS)
    return StepCosts(LENGTHS, np.array([[0.001 + length / 1e5 * (0.018 + 0.0025 * rows)] for length in LENGTHS])[:, 0])


def rounds_always_pay() -> StepCosts:
    """Return costs by which reading a cache takes so long that a row of it is worth any number of scans."""
    return StepCosts(
        (64, MOST_ENTRIES, 8192), np.array([[0.001] * 6, [0.001] * 6, [10.0 + 0.001 * n for n in ROW_COUNTS]])
    )


def new_sequence(target: TargetModel, sampler: str, length: int, num_tokens: int, name: str = "a") -> Sequence:
    prompt = np.random.default_rng(5).integers(3, target.vocab_size, length).tolist()
    params = SamplingParams(max_tokens=num_tokens, seed=5, ignore_eos=True, **SAMPLERS[sampler])  # type: ignore[arg-type]
    return Sequence(name, prompt, params, target.vocab_size)


def drafter_with(target: TargetModel, costs: StepCosts) -> ChoosingDrafter:
    return auto(target, lambda: costs, None)


def chains_of(drafter: ChoosingDrafter) -> ChainWay:
    way = drafter.ways["chain"]
    assert isinstance(way, ChainWay)
    return way


@pytest.mark.long
@pytest.mark.parametrize("sampler", [pytest.param("T=0", marks=pytest.mark.slow), "T=1, min-p 0.1, penalty"])
def test_chains_drawn_with_scanned_keys_give_plain_decoding_s_tokens(target: TargetModel, sampler: str) -> None:
    plain, drafted = (new_sequence(target, sampler, 1400, 130) for _ in range(2))
    run_to_ends(Engine(target, create_drafter("autoregressive", target, free_rows)), plain)
    drafter = drafter_with(target, rounds_always_pay())
    engine = Engine(target, drafter)
    run_to_ends(engine, drafted)
    assert drafted.output_ids.tolist() == plain.output_ids.tolist()
    assert drafter.counters.num_rounds > 30
    assert engine.counters.num_tokens_by_draft["chain"] > 100
    assert engine.counters.num_accepted_tokens > 0.3 * engine.counters.num_draft_tokens


@pytest.mark.long
def test_a_batch_of_short_and_long_texts_gives_the_tokens_of_each_alone(target: TargetModel) -> None:
    alone, together = (
        [new_sequence(target, "T=0", length, 100, f"{length}") for length in (30, 1200, 1500)] for _ in "ab"
    )
    for sequence in alone:
        run_to_ends(Engine(target, create_drafter("autoregressive", target, free_rows)), sequence)
    drafter = drafter_with(target, rounds_always_pay())
    run_to_ends(Engine(target, drafter), *together)
    assert drafter.counters.num_rounds > 10
    assert [each.output_ids.tolist() for each in together] == [each.output_ids.tolist() for each in alone]


def test_rounds_that_check_no_tree_are_one_call(target: TargetModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RoundsPlanner, "best", lambda *_: RoundsChoice(0, 9, rate=1e9))
    made = [[new_sequence(target, "T=1, min-p 0.1, penalty", n, 60, f"{n}") for n in (1200, 1500)] for _ in "ab"]
    run_to_ends(Engine(target, create_drafter("autoregressive", target, free_rows)), *made[0])
    drafter = drafter_with(target, rounds_always_pay())
    monkeypatch.setattr(target, "check", None)
    run_to_ends(Engine(target, drafter), *made[1])
    assert drafter.counters.num_rounds > 60
    assert [each.output_ids.tolist() for each in made[1]] == [each.output_ids.tolist() for each in made[0]]


@pytest.mark.sample(2)
@pytest.mark.long
@pytest.mark.parametrize("num_nodes", [0, 3])
def test_a_resumed_job_drafts_the_same_chain(
    target: TargetModel, monkeypatch: pytest.MonkeyPatch, num_nodes: int
) -> None:
    choice = RoundsChoice(num_nodes, 9, rate=1e9)
    monkeypatch.setattr(RoundsPlanner, "best", lambda *_: choice)  # plans follow measured times
    undisturbed, resumed = (drafter_with(target, rounds_always_pay()) for _ in range(2))
    sequence = new_sequence(target, "T=1, min-p 0.1, penalty", 1400, 120)
    assert len(check_resumed(target, sequence, 60, undisturbed, resumed)) > 2


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "damage",
    [np.array([1.0]), np.array([1.0, 5.0, 2.0]), np.array([1.0, np.nan, 2.0]), np.ones(3, dtype=complex)],
    ids=str,
)
def test_unfit_state_is_refused_and_changes_nothing(target: TargetModel, damage: np.ndarray) -> None:
    drafter = drafter_with(target, rounds_always_pay())
    sequence = new_sequence(target, "T=0", 1400, 40)
    run_to_ends(Engine(target, drafter), sequence)
    state = drafter.state(sequence)
    before = {name: array.copy() for name, array in state.items()}
    with pytest.raises(ValueError, match="plan of rounds"):
        drafter.restore(sequence, state | {"rounds_plan": damage})
    with pytest.raises(ValueError, match="recycling matrix"):
        drafter.restore(sequence, state | {"recycling_ids": np.zeros(3)})
    with pytest.raises(ValueError, match="node budget"):
        drafter.restore(sequence, state | {"tree_acceptance": np.zeros(3)})
    assert all(np.array_equal(before[name], array) for name, array in drafter.state(sequence).items())


def best(lengths: list[int], planner: RoundsPlanner | None = None) -> float:
    """Tokens per second that rounds without trees promise, beside plain decoding."""
    costs, no_tokens = long_caches_cost(), np.ones((len(lengths), len(NODE_CHOICES)))
    found = (planner or RoundsPlanner(costs)).best(np.array(lengths), no_tokens, 0.0)
    own = costs.own_seconds(np.array([1]), np.array(lengths)).sum()
    return float(found.rate / (len(lengths) / (costs.shared_seconds(len(lengths)) + own)))


def test_rounds_promise_most_where_caches_are_long() -> None:
    gains = [best([length]) for length in (500, 8000, 30_000, 100_000)]
    assert gains == sorted(gains)
    assert gains[0] < 1.0
    assert gains[-1] > 2.0


def test_one_long_text_makes_no_batch_of_short_ones_wait() -> None:
    assert best([100_000]) > 2 > 1 > best([500] * 31 + [3000])


def test_what_is_not_accepted_and_what_takes_long_promises_less() -> None:
    tree = DraftTree.chain([1] * 9)
    rejecting, slow = (RoundsPlanner(long_caches_cost()) for _ in range(2))
    for planner in (rejecting, slow):
        lengths = np.array([100_000])
        planner.begin(planner.best(lengths, np.ones((1, len(NODE_CHOICES))), 0.0), lengths)
    for _ in range(60):
        rejecting.observe(ChainTree(tree, 9, [Round(0, [], rejecting._expected)] * 9), [])
        slow.observe(ChainTree(tree, 9, [Round(0, [], 8 * slow._expected)] * 9), list(range(9)))
    assert best([100_000], rejecting) < best([100_000])
    assert best([100_000], slow) < 1.0 < best([100_000])
    alike, compared = rejecting.state()["rounds_plan"][1:]
    assert alike / compared < 0.2 < PRIOR_ALIKE


def test_one_round_that_took_long_says_little() -> None:
    planner, lengths = RoundsPlanner(long_caches_cost()), np.array([100_000])
    planner.begin(planner.best(lengths, np.ones((1, len(NODE_CHOICES))), 0.0), lengths)
    rounds = [Round(0, [], seconds) for seconds in (planner._expected, 60.0, planner._expected)]
    planner.observe(ChainTree(DraftTree.chain([1] * 3), 3, rounds), [0, 1, 2])
    assert best([100_000], planner) > 0.9 * best([100_000])


def test_the_first_chain_tells_where_rounds_take_long() -> None:
    planner, lengths = RoundsPlanner(long_caches_cost()), np.array([30_000])
    planner.begin(planner.best(lengths, np.ones((1, len(NODE_CHOICES))), 0.0), lengths)
    planner.observe(ChainTree(DraftTree.chain([1] * 7), 7, [Round(0, [], 2 * planner._expected)] * 7), list(range(7)))
    assert best([30_000], planner) < 0.8 * best([30_000])


def test_rounds_in_which_nothing_can_be_drawn_count_against_them() -> None:
    planner, lengths = RoundsPlanner(long_caches_cost()), np.array([100_000])
    planner.begin(planner.best(lengths, np.ones((1, len(NODE_CHOICES))), 0.0), lengths)
    for _ in range(100):
        planner.observe(ChainTree(DraftTree(), 0, [Round(0, [], planner._expected)]), [])
    assert best([100_000], planner) < 1.0


def test_a_worker_that_has_seen_texts_does_not_unlearn_by_a_resumed_one() -> None:
    planner, lengths = RoundsPlanner(long_caches_cost()), np.array([100_000])
    planner.begin(planner.best(lengths, np.ones((1, len(NODE_CHOICES))), 0.0), lengths)
    planner.observe(ChainTree(DraftTree.chain([1] * 9), 9, [Round(0, [], 0.004)] * 9), list(range(9)))
    before = planner.state()["rounds_plan"]
    planner.restore({"rounds_plan": np.array([1.0, 1.0, 20.0])})
    assert np.array_equal(planner.state()["rounds_plan"], before)


def test_what_a_planner_says_of_itself_another_one_takes() -> None:
    """The longest chains that there are have passed: rounds that check trees draw more tokens than were asked for."""
    planner, lengths = RoundsPlanner(long_caches_cost()), np.array([100_000])
    planner.begin(planner.best(lengths, np.ones((1, len(NODE_CHOICES))), 0.0), lengths)
    for _ in range(400):
        planner.observe(ChainTree(DraftTree.chain([1] * 18), 18, [Round(3, [0, 1, 2], 0.004)] * 5), list(range(18)))
    other = RoundsPlanner(long_caches_cost())
    other.restore(planner.state())
    assert np.array_equal(other.state()["rounds_plan"][1:], planner.state()["rounds_plan"][1:])


def test_a_text_that_stays_short_has_no_partial_cache(target: TargetModel) -> None:
    drafter = drafter_with(target, long_caches_cost())
    sequence = new_sequence(target, "T=0", 100, 40)
    run_to_ends(Engine(target, drafter), sequence)
    assert chains_of(drafter).chains._tracked == {}
    drafter.stop(sequence)


def test_a_long_text_is_taken_in_over_several_steps(target: TargetModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ways, "CHUNKS_AT_ONCE", 16)
    sequence = new_sequence(target, "T=0", NUM_PINNED + NUM_RECENT + 18 * SCAN_CHUNK, 300)
    drafter, cache = drafter_with(target, rounds_always_pay()), target.new_cache(sequence.max_length)
    cache.advance(len(sequence) - 1)
    drafter.start(sequence, cache)
    way, request, were_ready = chains_of(drafter), DraftRequest(sequence, 31, 20), []
    way.promise([request], 0.0)
    for _ in range(3):
        were_ready.append(way.propose([request]) is not None)
        keys = way.chains._tracked["a"].partial._scannable  # type: ignore[union-attr]
        assert keys.end <= NUM_PINNED + len(were_ready) * 16 * SCAN_CHUNK
    assert were_ready == [False, True, True]


def test_while_a_text_is_taken_in_trees_are_drafted(target: TargetModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ways, "CHUNKS_AT_ONCE", 16)
    sequence = new_sequence(target, "T=0", NUM_PINNED + NUM_RECENT + 18 * SCAN_CHUNK, 300)
    drafter, cache = drafter_with(target, rounds_always_pay()), target.new_cache(sequence.max_length)
    cache.advance(len(sequence) - 1)
    drafter.start(sequence, cache)
    proposed(drafter, sequence, 31, 20)
    assert drafter.draft_kind == "tree"


def test_chains_promise_little_where_few_tokens_are_left_to_pay_for_the_text(target: TargetModel) -> None:
    promised = []
    for num_tokens in (4, 20_000):
        sequence = new_sequence(target, "T=0", 4 * SCAN_CHUNK, num_tokens)
        drafter = drafter_with(target, long_caches_cost())
        drafter.start(sequence, target.new_cache(sequence.max_length))
        promised.append(chains_of(drafter).promise([DraftRequest(sequence, 31, 20)], 0.0))
    assert promised[0] < 0.5 * promised[1]


def test_where_no_drafts_pay_no_candidates_are_looked_for(target: TargetModel) -> None:
    dear = StepCosts((64, 8192), np.array([[0.001 + 10.0 * (n > 1) for n in ROW_COUNTS]] * 2))
    sequence, drafter = new_sequence(target, "T=0", 100, 8), drafter_with(target, dear)
    engine = Engine(target, drafter)
    engine.start(sequence)
    wanted = []
    while sequence.finish_reason is None:
        results = engine.step()
        wanted += [verification.top_ids is not None for _, verification in results]
    assert wanted
    assert not any(wanted)


def test_chains_become_as_long_as_forwards_have_rows_where_all_of_them_is_accepted() -> None:
    dear = StepCosts((64, 8192), np.array([[0.001] * 6, [1.0] * 6]))  # whatever reads the cache, rows are free
    planner, lengths = RoundsPlanner(dear), np.array([8000])
    for _ in range(50):
        planner.begin(planner.best(lengths, np.ones((1, len(NODE_CHOICES))), 0.0), lengths)
        planner.observe(
            ChainTree(DraftTree.chain([1] * 31), 31, [Round(0, [], planner._expected)] * 31), list(range(31))
        )
    assert planner.best(lengths, np.ones((1, len(NODE_CHOICES))), 0.0).chain_length == 31


def test_rounds_are_planned_anew_at_every_step_until_some_were_seen() -> None:
    planner, lengths = RoundsPlanner(long_caches_cost()), np.array([100_000])
    for _ in range(STEPS_TO_KNOW):
        assert planner.is_new
        planner.begin(planner.best(lengths, np.ones((1, len(NODE_CHOICES))), 0.0), lengths)
    assert not planner.is_new


def test_a_guess_at_rounds_is_looked_at_after_every_step(target: TargetModel, monkeypatch: pytest.MonkeyPatch) -> None:
    planned: list[RoundsChoice] = []

    def best(*_: object) -> RoundsChoice:
        planned.append(RoundsChoice(0, 3, rate=1e9))
        return planned[-1]

    monkeypatch.setattr(RoundsPlanner, "best", best)
    sequence = new_sequence(target, "T=1, min-p 0.1, penalty", 2500, 200)
    engine = Engine(target, drafter_with(target, rounds_always_pay()))
    engine.start(sequence)
    while sequence.num_generated_tokens == 0:
        engine.step()
    for _ in range(3):
        engine.step()
    assert len(planned) == 4
