"""GRIFFIN drafts by its definition, alone or in a batch."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from swiftbatch.jobs.sampling_params import SamplingParams
from swiftbatch.worker.drafters.drafter_interface import DraftRequest
from swiftbatch.worker.drafters.engine_options import GRIFFIN_PAPER, GriffinOptions
from swiftbatch.worker.drafters.griffin import draft_forwards
from swiftbatch.worker.drafters.griffin.draft_forwards import GriffinForwards, Level
from swiftbatch.worker.drafters.griffin.draft_input import entry_of, regressed_place, window_start
from swiftbatch.worker.drafters.griffin.griffin import GriffinDrafter
from swiftbatch.worker.engine.engine import Engine
from swiftbatch.worker.forward.target_model import TargetModel
from swiftbatch.worker.sampling.draft_tree import ROOT, DraftTree
from tests.worker.drafters.drafter_parts import proposed
from tests.worker.drafters.griffin.griffin_parts import (
    WAYS,
    Way,
    by_token,
    defined_outputs,
    guess,
    load,
    random_draft_model,
    random_tokens,
    read_sequence,
)

PARAMS = SamplingParams(max_tokens=600, temperature=1.0, seed=5, ignore_eos=True)
GREEDY = SamplingParams(max_tokens=600, temperature=0.0, ignore_eos=True)
LENGTHS = [1, 2, 40, 63, 64, 65, 70, 511, 512, 513, 800]


@pytest.fixture(scope="module")
def exact_target(tiny_model: Path) -> TargetModel:
    return load(tiny_model, "float32")


@pytest.fixture(scope="module")
def target_model(tiny_model: Path) -> TargetModel:
    return load(tiny_model)


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest) -> Way:
    return WAYS[request.param]


def new_drafter(way: Way, target: TargetModel, options: GriffinOptions = GRIFFIN_PAPER) -> GriffinDrafter:
    rows = way(random_draft_model(target), target, options.breadth)
    return GriffinDrafter(GriffinForwards(rows, target), None, options)


def regressed(forwards: GriffinForwards, row: int) -> torch.Tensor:
    return forwards._contexts["a"].room.features.rows([regressed_place(row)])[0]


@pytest.mark.sample(3)
@pytest.mark.long
@pytest.mark.parametrize("length", LENGTHS)
def test_candidates_and_features_of_a_draft_are_those_of_its_definition(
    way: Way, exact_target: TargetModel, length: int
) -> None:
    model = random_draft_model(exact_target)
    token_ids, chain = random_tokens(exact_target, length), [7, 8, 9]
    sequence, cache = read_sequence(exact_target, token_ids, GREEDY)
    forwards = GriffinForwards(way(model, exact_target, exact_target.vocab_size), exact_target)
    forwards.start(sequence, cache)
    [candidates] = forwards.follow([sequence])
    exact_target.model.set_attn_implementation("sdpa")
    try:
        expected = [defined_outputs(model, exact_target, token_ids, chain[:depth]) for depth in range(4)]
    finally:
        exact_target.model.set_attn_implementation("swiftbatch_row_groups")
    torch.testing.assert_close(by_token(candidates), guess(expected[0][0]), rtol=1e-3, atol=3e-3)
    tree = DraftTree()
    for depth, token_id in enumerate(chain, start=1):
        if (length - 1) % 64 + depth > 63:  # the root is at or near the end of a block
            return
        tree.token_ids.append(token_id)
        tree.parents.append(depth - 2)
        [[candidates]] = forwards.expand([Level(sequence, tree, depth - 1)])
        torch.testing.assert_close(by_token(candidates), guess(expected[depth][0]), rtol=1e-3, atol=3e-3)
        torch.testing.assert_close(regressed(forwards, depth), expected[depth][1], rtol=1e-3, atol=1e-3)


def test_siblings_do_not_see_each_other(way: Way, exact_target: TargetModel) -> None:
    sequence, cache = read_sequence(exact_target, random_tokens(exact_target, 30), PARAMS)
    forwards = GriffinForwards(way(random_draft_model(exact_target), exact_target), exact_target)
    forwards.start(sequence, cache)
    forwards.follow([sequence])
    [together] = forwards.expand([Level(sequence, DraftTree([5, 6, 7], [ROOT] * 3), 0)])
    feature = regressed(forwards, 3)
    [alone] = forwards.expand([Level(sequence, DraftTree([7], [ROOT]), 0)])
    assert together[2] == alone[0]
    assert torch.equal(regressed(forwards, 1), feature)


def test_the_window_begins_anew_and_entries_agree_with_blocks() -> None:
    assert [window_start(n) for n in (1, 64, 511, 512, 767, 768, 100_000)] == [64, 64, 64, 256, 256, 512, 99_584]
    assert [entry_of(p, 512) for p in (0, 63, 512, 1000)] == [0, 63, 64, 552]
    assert all(entry_of(n - 1, window_start(n)) % 64 == (n - 1) % 64 for n in range(1, 3000))
    assert max(entry_of(n - 1, window_start(n)) for n in range(1, 3000)) < 576


@pytest.mark.sample(3)
@pytest.mark.parametrize(("length", "num_tokens"), [(100, 20), (100, 90), (490, 40)])
def test_a_resumed_sequence_has_the_very_same_drafts(
    way: Way, target_model: TargetModel, length: int, num_tokens: int
) -> None:
    options = GriffinOptions(max_depth=2, max_nodes=6, breadth=3, at_every_step=True)
    drafter = new_drafter(way, target_model, options)
    sequence, cache = read_sequence(target_model, random_tokens(target_model, length), PARAMS)
    engine = Engine(target_model, drafter)
    engine.start(sequence, cache)
    while sequence.num_generated_tokens < num_tokens:
        engine.step()
    resumed, cache = read_sequence(target_model, sequence.token_ids.tolist(), PARAMS)
    resumed.noise = sequence.noise  # its prompt's noise, not that of everything read here
    fresh = new_drafter(way, target_model, options)
    fresh.start(resumed, cache)
    kept = cache.kv(0, cache.length).copy()
    assert proposed(fresh, resumed, 60, 3) == proposed(drafter, sequence, 60, 3)
    expected, found = drafter._forwards._contexts["a"].room.cache, fresh._forwards._contexts["a"].room.cache
    assert found.length == expected.length
    assert (found.kv(0, found.length) == expected.kv(0, found.length)).all()
    assert (cache.kv(0, cache.length) == kept).all()


def test_the_target_runs_the_window_once_and_then_gives_its_features_with_every_step(
    way: Way, target_model: TargetModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafter = new_drafter(way, target_model, GriffinOptions(max_depth=2, max_nodes=6, breadth=3, at_every_step=True))
    sequence, cache = read_sequence(target_model, random_tokens(target_model, 700), PARAMS)
    engine = Engine(target_model, drafter)
    engine.start(sequence, cache)
    engine.step()
    replays: list[int] = []
    monkeypatch.setattr(draft_forwards, "replayed", lambda *args: replays.append(1))
    while len(sequence) < 800:  # at 768 the window begins anew
        engine.step()
    assert replays == []


def test_sequences_of_a_batch_have_the_drafts_they_have_alone(way: Way, target_model: TargetModel) -> None:
    lengths = {"a": 90, "b": 17, "c": 300}
    drafter, alone = new_drafter(way, target_model), []
    requests = []
    for name, length in lengths.items():
        sequence, cache = read_sequence(target_model, random_tokens(target_model, length, length), PARAMS, name)
        drafter.start(sequence, cache)
        single = new_drafter(way, target_model)
        single.start(sequence, cache)
        requests.append(DraftRequest(sequence, 40, 4))
        alone.append(proposed(single, sequence, 40, 4))
    assert drafter.propose(requests) == alone
    assert drafter.propose(requests[::-1]) == alone[::-1]


def test_one_forward_serves_a_level_of_all_sequences(
    way: Way, target_model: TargetModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafter = new_drafter(way, target_model, GriffinOptions(breadth=3, at_every_step=True))
    requests = []
    for name in "abc":
        sequence, cache = read_sequence(target_model, random_tokens(target_model, 20), PARAMS, name)
        drafter.start(sequence, cache)
        requests.append(DraftRequest(sequence, 20, 4))
    drafter.propose(requests)
    calls: list[int] = []
    rows = drafter._forwards._rows
    run = rows.run
    monkeypatch.setattr(rows, "run", lambda parts: calls.append(len(parts)) or run(parts))
    drafter.propose(requests)
    assert calls == [3] * 4  # the root's level, and three below it


def test_drafting_leaves_committed_positions_as_they_are_where_rows_are_not_exact(
    way: Way, target_model: TargetModel
) -> None:
    sequence, cache = read_sequence(target_model, random_tokens(target_model, 200), PARAMS)
    for layer in range(2):
        cache.stored(layer)[0][:, 50:190] += 0.5  # as if another kernel had written them
    kept = cache.kv(0, cache.length).copy()
    drafter = new_drafter(way, target_model)
    drafter.start(sequence, cache)
    assert len(proposed(drafter, sequence, 20, 4)) == 20
    assert (cache.kv(0, cache.length) == kept).all()
