"""On a GPU auto draws chains behind scanned texts, and the tokens are those of plain decoding all the same."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from swiftbatch.jobs.sampling_params import SamplingParams
from swiftbatch.worker.drafters import auto as auto_module
from swiftbatch.worker.drafters.auto import auto
from swiftbatch.worker.drafters.choice import policy, ways
from swiftbatch.worker.drafters.choice import rounds as plan_module
from swiftbatch.worker.drafters.choice.ways import ChainWay
from swiftbatch.worker.drafters.drafter_interface import AutoregressiveDrafter, Drafter
from swiftbatch.worker.engine.engine import Engine
from swiftbatch.worker.forward.forward_interface import partial_rows
from swiftbatch.worker.forward.step_costs import ROW_COUNTS, StepCosts
from swiftbatch.worker.forward.target_model import TargetModel
from swiftbatch.worker.forward.tile_packing import tree_rows
from swiftbatch.worker.kernels import kv_codes as coding
from swiftbatch.worker.kernels.cuda import scan_attention as scan_module
from swiftbatch.worker.kernels.cuda import scanned_texts as texts_module
from swiftbatch.worker.kv import scan_cache, sparse_arena
from swiftbatch.worker.kv.scan_cache import ScanKVCache
from swiftbatch.worker.kv.sparse_arena import SparseArena
from swiftbatch.worker.model.model_files import ModelFiles, locate_model
from swiftbatch.worker.sampling.draft_tree import DraftTree
from swiftbatch.worker.sampling.sequence import Sequence
from tests.worker.drafters.drafter_parts import free_rows, run_together
from tests.worker.forward.cuda.checked_graph import CheckedGraph
from tests.worker.forward.cuda.cuda_parts import cuda_target, offloaded_target

pytestmark = pytest.mark.long

CHUNK, NUM_RECENT, NUM_TOKENS, LONGEST = 64, 16, 4, 192
SHORTEST = 16 + NUM_RECENT + CHUNK
LENGTHS = (110, 20)  # of prompts: a chunk of one is scanned, the other is too short
MakeTarget = Callable[..., TargetModel]
PLACES = ((cuda_target, "on the device"), (offloaded_target, "on the host"))
PENALISED = {"temperature": 0.9, "repetition_penalty": 1.2, "penalty_window": 20}


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten chunks, so that short texts are scanned."""
    for module in (coding, sparse_arena, scan_cache, texts_module):
        monkeypatch.setattr(module, "SCAN_CHUNK", CHUNK)
    monkeypatch.setattr(scan_cache, "NUM_RECENT", NUM_RECENT)
    monkeypatch.setattr(scan_cache, "MOST_ENTRIES", SHORTEST)
    for module in (auto_module, ways):
        monkeypatch.setattr(module, "SHORTEST_SCANNED", SHORTEST)
    monkeypatch.setattr(plan_module, "MOST_ENTRIES", 32)
    monkeypatch.setattr(plan_module, "CHAIN_LENGTHS", (3,))
    for module in (texts_module, scan_module):  # a program for each pair
        monkeypatch.setattr(module, "MOST_SAMPLED", 4)
        monkeypatch.setattr(module, "SAMPLED_PER_PROGRAM", 4)
    monkeypatch.setattr(auto_module, "NUM_BEST", 20)
    monkeypatch.setattr(policy, "SURELY_BETTER", 1.0)  # chains of three tokens bring little more than trees


@pytest.fixture(scope="module")
def files(one_layer_model: Path) -> ModelFiles:
    return locate_model(str(one_layer_model))


def rounds_always_pay() -> StepCosts:
    """Return costs by which reading a cache takes so long that a row of it is worth any number of scans."""
    rows = 0.001 * np.array(ROW_COUNTS)
    return StepCosts((16, 32, 1000), np.array([0 * rows + 0.001, 0 * rows + 0.001, 10.0 + rows]), 64)


def sequences(target: TargetModel) -> list[Sequence]:
    made = []
    for number, fields in enumerate(({"temperature": 0.0}, PENALISED)):
        prompt = np.random.default_rng(number).integers(5, 60, LENGTHS[number]).tolist()
        params = SamplingParams(max_tokens=NUM_TOKENS, seed=number, ignore_eos=True, **fields)  # type: ignore[arg-type]
        made.append(Sequence(str(number), prompt, params, target.vocab_size))
    return made


def run(target: TargetModel, drafter: Drafter, together: list[Sequence]) -> list[list[int]]:
    run_together(Engine(target, drafter), together)
    return [sequence.output_ids.tolist() for sequence in together]


@pytest.mark.parametrize(
    "make",
    [pytest.param(make, id=name, marks=pytest.mark.slow if make == offloaded_target else ()) for make, name in PLACES],
)
def test_chains_behind_scanned_texts_give_the_reference_s_tokens(
    files: ModelFiles, make: MakeTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    for taking_in in ("LAUNCHES_IN_ROWS", "CROSSINGS_IN_ROWS"):
        monkeypatch.setattr(plan_module, taking_in, 0)  # few tokens as there are
    reference = TargetModel.load(files, "float32", "cpu")
    plain = run(reference, AutoregressiveDrafter(reference, free_rows, None), sequences(reference))
    target = make(files, torch.float32, 2, LONGEST, linear="cublas")
    drafter = auto(target, rounds_always_pay, None)
    chains = drafter.ways["chain"]
    assert isinstance(chains, ChainWay)
    arena = chains.chains._new_entries.__self__  # type: ignore[attr-defined]
    assert isinstance(arena, SparseArena)
    assert arena.texts is not None
    for tensor in arena.texts.tensors():
        if tensor.is_floating_point():
            tensor.fill_(torch.nan)
    assert run(target, drafter, sequences(target)) == plain
    assert drafter.counters.num_rounds > 2
    assert sorted(arena.texts.num_chunks.tolist()) == [0, 1]  # that were scanned
    assert len(arena.leases.free) == 2


@pytest.mark.slow
def test_rounds_rest_while_more_jobs_run_than_have_room_for_their_texts(
    files: ModelFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan_module, "LAUNCHES_IN_ROWS", 0)
    target = cuda_target(files, torch.float32, 2, LONGEST, linear="cublas")
    assert target.forwards.arena is not None
    target.forwards.arena.num_drafted = 1
    drafter = auto(target, rounds_always_pay, None)
    alone, both = sequences(target)[:1], sequences(target)
    together = run(target, drafter, both)
    assert drafter.counters.num_rounds == 0
    drafter = auto(target, rounds_always_pay, None)
    assert run(target, drafter, alone) == together[:1]
    assert drafter.counters.num_rounds > 0


@pytest.mark.parametrize(
    ("make", "num_best", "away"),
    [
        pytest.param(cuda_target, 1, 0.6, id="on the device, by a cloud", marks=pytest.mark.slow),
        pytest.param(cuda_target, CHUNK, 0.05, id="on the device, exactly", marks=pytest.mark.slow),
        pytest.param(offloaded_target, 1, 0.6, id="on the host, by a cloud"),
        pytest.param(offloaded_target, CHUNK, 0.05, id="on the host, exactly", marks=pytest.mark.slow),
    ],
)
def test_a_round_says_nearly_what_the_target_says(
    files: ModelFiles, make: MakeTarget, num_best: int, away: float
) -> None:
    """Every layer reads its own scanned keys: without them a round says something else."""
    target = make(files, torch.float32, 1, LONGEST, linear="cublas")
    new_entries = target.forwards.room_for(ScanKVCache, num_best)
    sequence = sequences(target)[0]
    full, prompt = target.new_cache(LONGEST), sequence.token_ids.tolist()
    while full.length < len(prompt) - 1:
        target.read(full, prompt[full.length : -1])
    partial = ScanKVCache(target.cache_shape, num_best, sequence, new_entries)
    partial.follow(full, lambda position: torch.empty(0))
    [exact] = target.verify([tree_rows(full, prompt[-1], DraftTree())])
    expected, found = exact.logits[0].clone(), []
    texts = partial.entries.arena.texts  # type: ignore[attr-defined]
    for num_chunks in (1, 0):
        texts.num_chunks.fill_(num_chunks)
        [rows] = target.check([partial_rows(partial, prompt[-1], full.length, DraftTree())])
        found.append(float((rows.logits[0] - expected).norm() / expected.norm()))
    assert found[0] < away * found[1]


def test_a_round_is_fifteen_launches_a_layer_in_one_graph(files: ModelFiles) -> None:
    target = cuda_target(files, torch.float32, 1, LONGEST)
    drafter = auto(target, rounds_always_pay, None)
    assert "chain" in drafter.ways
    [rounds] = target.forwards._rounds.values()  # type: ignore[attr-defined]
    assert isinstance(rounds._graph, CheckedGraph)
    assert len(rounds._graph.launches) == target.cache_shape.num_layers * 15 + 3


def test_where_nothing_can_be_scanned_there_are_trees_and_repeats_alone(files: ModelFiles) -> None:
    for make in (cuda_target, offloaded_target):
        assert set(auto(make(files, torch.float32, 1, 16), rounds_always_pay, None).ways) == {"plain", "tree"}
