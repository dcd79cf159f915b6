"""Two levels of speculation give equal tokens and resumable drafts."""

from __future__ import annotations

import itertools
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bench.compared_caches import PARTIAL_CACHES
from swiftbatch.jobs.errors import ModelError
from swiftbatch.jobs.sampling_params import SamplingParams
from swiftbatch.worker.drafters.catalogue import create_drafter
from swiftbatch.worker.drafters.choice.choosing_drafter import TREE
from swiftbatch.worker.drafters.choice.policy import PLAIN, Policy
from swiftbatch.worker.drafters.drafter_interface import Drafter, DraftRequest
from swiftbatch.worker.drafters.engine_options import TOKENSWIFT_PAPER, TokenSwiftOptions, TriForceOptions, changed
from swiftbatch.worker.drafters.self_speculation import Chain, RoundPlan, SelfSpeculationDrafter
from swiftbatch.worker.drafters.tokenswift.decoding_heads import save_heads
from swiftbatch.worker.drafters.tokenswift.tokenswift import tokenswift
from swiftbatch.worker.drafters.triforce import triforce
from swiftbatch.worker.engine.engine import Engine
from swiftbatch.worker.forward.target_model import RowOutputs, TargetModel
from swiftbatch.worker.kv import sparse_cache
from swiftbatch.worker.kv.cache_rows import CacheShape
from swiftbatch.worker.kv.kv_capacity import KVRoomError
from swiftbatch.worker.kv.sparse_cache import Entries
from swiftbatch.worker.sampling.batch_sampler import create_batch_sampler
from swiftbatch.worker.sampling.draft_tree import DraftTree
from swiftbatch.worker.sampling.sequence import Sequence
from swiftbatch.worker.text.tokenizer import TextCodec
from tests import ROOT
from tests.worker.drafters.drafter_parts import check_resumed, check_same_entries, free_rows, proposed, run_to_ends
from tests.worker.kernels.kernel_parts import needs_kernels
from tests.worker.kv.cache_parts import everything_of

PROMPT = "The lighthouse keeper counted the ships each evening, and on the ninth of November there was one too many. "
SAMPLERS = {
    "T=0": {"temperature": 0.0},
    "T=0.4, top-p 0.9": {"temperature": 0.4, "top_p": 0.9},
    "T=1, min-p 0.1, penalty": {"temperature": 1.0, "min_p": 0.1, "repetition_penalty": 1.2, "penalty_window": 128},
    "T=1.2, eta, penalty": {"temperature": 1.2, "eta": 2e-4, "repetition_penalty": 1.15},
}
ENDS = ("T=0", "T=1.2, eta, penalty")
NUM_TOKENS = 60
SMALL_BUDGET = 64  # so that a short text overflows it many times


def new_sequence(target: TargetModel, sampler: str, num_tokens: int, name: str = "a", seed: int = 5) -> Sequence:
    codec = TextCodec(target.files)
    params = SamplingParams(max_tokens=num_tokens, seed=seed, ignore_eos=True, **SAMPLERS[sampler])  # type: ignore[arg-type]
    return Sequence(name, codec.encode(PROMPT), params, target.vocab_size)


def run(target: TargetModel, drafter: Drafter, *sequences: Sequence) -> Engine:
    return run_to_ends(Engine(target, drafter), *sequences)


@pytest.fixture(autouse=True)
def small_periods(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shortens periods, so that a short text is summarised repeatedly."""
    monkeypatch.setattr(sparse_cache, "NUM_RECENT", 48)
    monkeypatch.setattr(sparse_cache, "PERIOD", 32)


@pytest.fixture(scope="module")
def plain(target: TargetModel) -> dict[str, list[int]]:
    outputs = {}
    for sampler in SAMPLERS:
        sequence = new_sequence(target, sampler, NUM_TOKENS)
        run(target, create_drafter("autoregressive", target, free_rows), sequence)
        outputs[sampler] = sequence.output_ids.tolist()
    return outputs


@pytest.mark.sample(3)
@pytest.mark.long
@pytest.mark.parametrize(
    ("sampler", "cache", "rounds"),
    [
        *itertools.product(SAMPLERS, ["summary"], [2]),
        *itertools.product(["T=1.2, eta, penalty"], ["summary", "dynamic", "full", "static"], [0]),
        *(
            pytest.param(*entry, marks=pytest.mark.slow)
            for entry in (
                *itertools.product(list(SAMPLERS)[:-1], ["summary"], [0]),
                *itertools.product(["T=1.2, eta, penalty"], ["dynamic", "full", "static"], [2]),
            )
        ),
    ],
)
def test_the_tokens_are_those_of_plain_decoding(
    target: TargetModel, plain: dict[str, list[int]], sampler: str, cache: str, rounds: int
) -> None:
    options = TokenSwiftOptions(budget=SMALL_BUDGET, rounds=rounds)
    sequence = new_sequence(target, sampler, NUM_TOKENS)
    run(target, tokenswift(target, free_rows, None, options, PARTIAL_CACHES[cache]), sequence)
    assert sequence.output_ids.tolist() == plain[sampler]


def test_a_sequence_without_room_for_a_partial_cache_drafts_without_rounds(
    target: TargetModel, plain: dict[str, list[int]]
) -> None:
    def no_room(shape: CacheShape, capacity: int) -> Entries:
        raise KVRoomError("no slot for a partial cache: all 2 are taken")

    drafter = always(target, 8, "summary", num_nodes=12)
    drafter._new_entries = no_room
    sequence = new_sequence(target, "T=0", NUM_TOKENS)
    counters = run(target, drafter, sequence).counters
    assert sequence.output_ids.tolist() == plain["T=0"]
    assert drafter.counters.num_rounds == 0
    assert counters.num_draft_tokens > 0


@pytest.mark.parametrize("engine", [tokenswift, triforce])
def test_rounds_begin_where_the_text_outgrows_the_partial_cache(
    target: TargetModel, engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Policy, "choose", lambda *_: TREE)
    options = TokenSwiftOptions if engine is tokenswift else TriForceOptions
    sequence = new_sequence(target, "T=0", NUM_TOKENS)
    budget = len(sequence) + NUM_TOKENS // 2
    drafter = engine(target, free_rows, None, options(budget=budget))
    runner, num_rounds = Engine(target, drafter), {True: 0, False: 0}
    runner.start(sequence)
    while sequence.finish_reason is None:
        is_long, before = len(sequence) - 1 > budget, drafter.counters.num_rounds
        runner.step()
        num_rounds[is_long] += drafter.counters.num_rounds - before
    assert num_rounds[False] == 0 < num_rounds[True]


def test_steps_are_plain_while_the_policy_says_so(target: TargetModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Policy, "choose", lambda *_: PLAIN)
    drafter = triforce(target, free_rows, None, TriForceOptions())
    assert run(target, drafter, new_sequence(target, "T=0", NUM_TOKENS)).counters.num_draft_tokens == 0


def always(
    target: TargetModel, chain_length: int, cache: str, num_nodes: int | None = None, **changes: int
) -> SelfSpeculationDrafter:
    """Draft chains of a fixed length, with up to `num_nodes` below."""
    options = TokenSwiftOptions(rounds=1, **changes)  # type: ignore[arg-type]
    drafter = tokenswift(target, free_rows, None, options, PARTIAL_CACHES[cache])
    drafter.plan = RoundPlan(chain_length, 5, chain_length, num_nodes or chain_length)
    return drafter


@pytest.mark.parametrize(
    "sampler", [pytest.param(name, marks=() if name in ENDS else pytest.mark.slow) for name in SAMPLERS]
)
def test_drafts_that_see_the_whole_cache_are_accepted(target: TargetModel, sampler: str) -> None:
    """The partial forward is the target's own, with tree mask, positions, noise and penalty."""
    drafter = always(target, 8, "full")
    counters = run(target, drafter, new_sequence(target, sampler, 300)).counters
    assert drafter.counters.num_rounds > 30
    assert counters.num_accepted_tokens > 0.9 * counters.num_draft_tokens > 0


@pytest.mark.long
def test_a_resumed_job_has_the_same_partial_cache_and_n_grams(target: TargetModel) -> None:
    for cache in ("dynamic", "static", "full", "summary"):
        undisturbed, resumed = (always(target, 8, cache, num_nodes=12, budget=SMALL_BUDGET) for _ in range(2))
        sequence = new_sequence(target, "T=1, min-p 0.1, penalty", 100)
        check_resumed(target, sequence, 70, undisturbed, resumed)
        check_same_entries(undisturbed, resumed)
        tables = [drafter._proposer._tables["a"] for drafter in (undisturbed, resumed)]  # type: ignore[attr-defined]
        newest = int(sequence.token_ids[-1])
        assert len(tables[0]) == len(tables[1])
        assert tables[0].most_frequent(newest, 20) == tables[1].most_frequent(newest, 20)


def test_a_summarised_cache_gives_plain_decoding_s_tokens(target: TargetModel) -> None:
    """Most of the text is summarised by one entry per chunk."""
    plain, drafted = (new_sequence(target, "T=1, min-p 0.1, penalty", 180) for _ in range(2))
    run(target, create_drafter("autoregressive", target, free_rows), plain)
    drafter = always(target, 8, "summary", budget=SMALL_BUDGET)
    counters = run(target, drafter, drafted).counters
    assert drafter._tracked["a"].partial.bias is not None
    assert drafted.output_ids.tolist() == plain.output_ids.tolist()
    assert counters.num_accepted_tokens > 0.4 * counters.num_draft_tokens > 0


def test_queries_are_those_of_the_target_at_that_position(target: TargetModel) -> None:
    sequence = new_sequence(target, "T=0", 100)
    engine = Engine(target, create_drafter("autoregressive", target, free_rows))
    slot = engine.start(sequence)
    while sequence.num_generated_tokens < 60:
        engine.step()
    position = 40
    before = slot.cache.kv(0, slot.cache.length).copy()
    module = target.model.model.layers[3].self_attn
    seen: list[torch.Tensor] = []
    found: list[torch.Tensor] = []
    hook = module.q_norm.register_forward_hook(lambda _module, _inputs, output: seen.append(output[0, 0]))
    for forwards in (target, target.transformers):
        with slot.cache.replayed(position) as cache:
            queries = forwards.queries(cache, int(sequence.token_ids[position]))
        found.append(queries)
    hook.remove()
    unrotated = seen[0].view(queries.shape[1], queries.shape[2], -1)  # rotation keeps the length of every vector
    for queries in found:
        torch.testing.assert_close(
            queries[3].float().norm(dim=-1), unrotated.float().norm(dim=-1), rtol=0.02, atol=0.02
        )
    assert np.array_equal(before, slot.cache.kv(0, slot.cache.length)), "committed positions keep their bits"


def test_committed_positions_keep_their_bits_where_a_machine_is_not_exact(target: TargetModel) -> None:
    sequence = new_sequence(target, "T=0", 100)
    drafter = always(target, 8, "dynamic", budget=SMALL_BUDGET)
    engine = Engine(target, drafter)
    slot = engine.start(sequence)
    while sequence.num_generated_tokens < 60:
        engine.step()
    for layer in range(target.cache_shape.num_layers):
        for part in slot.cache.layer(layer):
            part[:, : slot.cache.length] += 0.01  # as if another kernel had made them
    before = slot.cache.kv(0, slot.cache.length).copy()
    drafter.stop(sequence)
    drafter.start(sequence, slot.cache)
    proposed(drafter, sequence, 31, 20)
    assert np.array_equal(before, slot.cache.kv(0, slot.cache.length))


def test_unfit_state_is_refused_and_changes_nothing(target: TargetModel) -> None:
    drafter = tokenswift(target, free_rows, None, TokenSwiftOptions())
    sequence = new_sequence(target, "T=0", 60)
    run(target, drafter, sequence)
    state = drafter.state(sequence)
    before = {name: array.copy() for name, array in state.items()}
    unfit = {name: np.zeros_like(array) for name, array in state.items()} | {"recycling_pair_keys": np.zeros(3)}
    with pytest.raises(ValueError, match="recycling matrix"):
        drafter.restore(sequence, unfit)
    assert all(np.array_equal(before[name], array) for name, array in drafter.state(sequence).items())


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    ("temperature", "penalty"),
    [(0.4, 1.2), (1.2, 1.0), *(pytest.param(*each, marks=pytest.mark.slow) for each in ((0.4, 1.0), (1.2, 1.2)))],
)
@pytest.mark.parametrize("cut", [{"min_p": 0.1}, {"top_p": 0.9}, {"top_k": 20}, {"eta": 2e-4}], ids=str)
def test_every_sampler_gives_plain_decoding_s_tokens(
    target: TargetModel, temperature: float, penalty: float, cut: dict[str, float]
) -> None:
    params = SamplingParams(
        max_tokens=40, seed=5, ignore_eos=True, temperature=temperature, repetition_penalty=penalty, **cut
    )
    sequences = [Sequence("a", TextCodec(target.files).encode(PROMPT), params, target.vocab_size) for _ in range(2)]
    run(target, create_drafter("autoregressive", target, free_rows), sequences[0])
    run(target, always(target, 6, "dynamic", budget=SMALL_BUDGET), sequences[1])
    assert sequences[1].output_ids.tolist() == sequences[0].output_ids.tolist()


def test_sequences_of_a_batch_share_the_draft_forwards(target: TargetModel, monkeypatch: pytest.MonkeyPatch) -> None:
    drafter = always(target, 8, "summary")
    sequences = [new_sequence(target, "T=1, min-p 0.1, penalty", 60, name, i) for i, name in enumerate("abc")]
    group_counts = []
    check = target.check
    monkeypatch.setattr(target, "check", lambda groups: group_counts.append(len(groups)) or check(groups))
    run(target, drafter, *sequences)
    assert max(group_counts) == 3
    assert group_counts.count(3) > group_counts.count(1)


def test_a_batch_drafts_what_each_sequence_drafts_alone(target: TargetModel) -> None:
    drafter = always(target, 8, "full")
    sequences = [new_sequence(target, "T=0", 40, name, i) for i, name in enumerate("ab")]
    engine = Engine(target, drafter)
    for sequence in sequences:
        engine.start(sequence)
    for _ in range(3):
        engine.step()
    requests = [DraftRequest(sequence, 31, 8) for sequence in sequences]
    assert drafter.propose(requests) == [drafter.propose([request])[0] for request in requests]


def test_a_chain_ends_where_nothing_can_be_drawn(target: TargetModel) -> None:
    sequence = new_sequence(target, "T=1, min-p 0.1, penalty", 60)
    drawing = create_batch_sampler(target.vocab_size, target.device)
    cache = everything_of(target.cache_shape, target.new_cache(10))
    chain = Chain(sequence, drawing.sampler(sequence), cache, None, RoundPlan(9, 9, 9, 9), 31, 20)
    rows, tree = torch.zeros(3, target.vocab_size), DraftTree.chain([5, 6])
    rows[0, 5], rows[1] = 1e4, torch.nan
    [walk] = drawing.walks([chain.sampler], [tree], [rows])
    assert chain.wants_round
    chain.advance(walk, RowOutputs(torch.zeros(3, target.hidden_size), rows))
    assert chain.drawn == [5]
    assert not chain.wants_round
    assert chain.depth_left == 0


ENGINES_RUN = """
import sys
from swiftbatch.jobs.sampling_params import SamplingParams
from tests.worker.drafters.drafter_parts import free_rows, run_to_ends
from swiftbatch.worker.kv import sparse_cache
from swiftbatch.worker.drafters.engine_options import TokenSwiftOptions, TriForceOptions
from swiftbatch.worker.drafters.tokenswift.tokenswift import tokenswift
from swiftbatch.worker.drafters.triforce import triforce
from swiftbatch.worker.engine.engine import Engine
from swiftbatch.worker.model.model_files import locate_model
from swiftbatch.worker.sampling.sequence import Sequence
from swiftbatch.worker.forward.target_model import TargetModel

sparse_cache.NUM_RECENT, sparse_cache.PERIOD = 48, 32
target = TargetModel.load(locate_model("embedded"), "bfloat16", "cpu")
for drafter in (
    triforce(target, free_rows, None, TriForceOptions(budget=64, at_every_step=True)),
    tokenswift(target, free_rows, None, TokenSwiftOptions(budget=64, rounds=2)),
):
    sequence = Sequence("a", [7] * 250, SamplingParams(max_tokens=20, seed=1, ignore_eos=True), target.vocab_size)
    run_to_ends(Engine(target, drafter), sequence)
    print("rounds", drafter.counters.num_rounds > 0)
    print("summaries", drafter._tracked["a"].partial.bias is not None)
print("transformers", "transformers" in vars(target), "transformers.modeling_utils" in sys.modules)
"""


@pytest.mark.long
@needs_kernels
def test_rounds_on_the_kernels_load_no_second_copy_of_the_model() -> None:
    process = subprocess.run([sys.executable, "-c", ENGINES_RUN], cwd=ROOT, capture_output=True, text=True, check=True)
    assert process.stdout == 2 * "rounds True\nsummaries True\n" + "transformers False False\n"


def first_tree(target: TargetModel, parts: Path | None = None) -> DraftTree:
    drafter = tokenswift(target, free_rows, parts, changed(TOKENSWIFT_PAPER, {"num_ngrams": 0}))
    sequence = new_sequence(target, "T=0", 50)
    engine = Engine(target, drafter)
    engine.start(sequence)
    engine.step()
    return proposed(drafter, sequence, 127, 20)


def test_the_papers_step_is_one_row_then_one_tree(target: TargetModel, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = []
    check = target.check
    monkeypatch.setattr(target, "check", lambda groups: rows.append(len(groups[0])) or check(groups))
    depths = first_tree(target).depths()
    assert rows == [1, 1]
    assert [depths.count(depth) for depth in (1, 2, 3, 4, 5)] == [1, 3, 9, 27, 0]


@pytest.mark.parametrize("num_heads", [1, 5])
def test_trees_are_as_deep_as_there_are_heads(target: TargetModel, tmp_path: Path, num_heads: int) -> None:
    save_heads(tmp_path, torch.zeros(num_heads, target.hidden_size, target.hidden_size), target.files.fingerprint)
    assert max(first_tree(target, tmp_path).depths()) == num_heads + 1


def test_more_digits_than_heads_are_refused(target: TargetModel) -> None:
    with pytest.raises(ModelError, match=r"tree 3,3,3,3: the heads in .* are 3, expected one"):
        tokenswift(target, free_rows, None, TokenSwiftOptions(tree=(3, 3, 3, 3)))
