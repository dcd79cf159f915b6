"""The contract of every drafter, on a small real model."""

from __future__ import annotations

import itertools
import time
from typing import Any

import numpy as np
import pytest
import torch

from bench.variants import BENCH_ENGINES, VARIANTS, create_bench_drafter
from swiftbatch.jobs.errors import ModelError
from swiftbatch.jobs.sampling_params import SamplingParams
from swiftbatch.worker.drafters.catalogue import DEFAULT_ENGINE, ENGINES, create_drafter
from swiftbatch.worker.drafters.choice.choosing_drafter import TREE
from swiftbatch.worker.drafters.choice.policy import Policy
from swiftbatch.worker.drafters.drafter_interface import Drafter
from swiftbatch.worker.forward.target_model import TargetModel
from swiftbatch.worker.forward.tile_packing import max_tree_depth, tree_rows
from swiftbatch.worker.sampling.draft_tree import ROOT, TOP_K, DraftTree, Verification, walk
from swiftbatch.worker.sampling.sampler import TokenSampler
from swiftbatch.worker.sampling.sequence import Sequence
from tests.tiny_targets import target as target
from tests.worker.drafters.drafter_parts import free_rows, proposed

pytestmark = pytest.mark.long

PARAMS = SamplingParams(max_tokens=4000, temperature=1.0, min_p=0.1, seed=7)
GREEDY = SamplingParams(max_tokens=4000, temperature=0.0, seed=7)
MANIFOLD = "auto"  # it drafts in most of the others' ways
NO_TARGET: Any = None


def check_structure(tree: DraftTree, max_nodes: int, max_depth: int, vocab_size: int) -> None:
    assert len(tree.token_ids) == len(tree.parents) <= max_nodes
    assert all(ROOT <= parent < node for node, parent in enumerate(tree.parents))
    assert all(0 <= token < vocab_size for token in tree.token_ids)
    assert max(tree.depths(), default=0) <= max_depth
    assert sum(map(len, tree.children().values())) == len(tree), "two siblings carry the same token"


class Generation:
    def __init__(
        self, target: TargetModel, drafter: Drafter, prompt: list[int], params: SamplingParams, name: str = "a"
    ) -> None:
        self._target = target
        self.sequence = Sequence(name, prompt, params, target.vocab_size)
        self.cache = target.new_cache(self.sequence.max_length)
        while self.cache.length < len(prompt) - 1:
            target.read(self.cache, prompt[self.cache.length : -1])
        self._sampler = TokenSampler(self.sequence, target.vocab_size)
        drafter.start(self.sequence, self.cache)

    def step(self, drafter: Drafter, max_nodes: int = 8) -> Verification:
        tree = proposed(drafter, self.sequence, max_nodes, max_tree_depth(self.cache.length))
        rows = tree_rows(self.cache, int(self.sequence.token_ids[-1]), tree)
        [outputs] = self._target.verify([rows])
        walked = walk(tree, outputs.logits, self._sampler.draw)
        self.cache.commit(walked.path)
        self.sequence.extend(walked.drawn)
        top = torch.log_softmax(outputs.logits, dim=-1).topk(TOP_K)
        verification = Verification(
            tree,
            walked.path,
            walked.drawn,
            np.array(rows.token_ids),
            top.indices.numpy(),
            top.values.numpy(),
            outputs.hidden[[0, *(node + 1 for node in walked.path)]],
        )
        drafter.update(self.sequence, verification)
        return verification


PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]


@pytest.mark.parametrize(
    ("name", "params"),
    [
        *(
            pytest.param(name, PARAMS, id=f"{name}, T=1", marks=pytest.mark.slow if name in VARIANTS else ())
            for name in BENCH_ENGINES
        ),
        *(
            pytest.param(name, GREEDY, id=f"{name}, T=0", marks=() if name == MANIFOLD else pytest.mark.slow)
            for name in ENGINES
        ),
    ],
)
class TestEveryDrafter:
    """The contract of worker/drafters/drafter_interface.py."""

    def warm(self, target: TargetModel, name: str, params: SamplingParams) -> tuple[Drafter, Generation]:
        drafter = create_bench_drafter(name, target, free_rows)
        generation = Generation(target, drafter, PROMPT, params)
        for _ in range(30):
            generation.step(drafter)
        return drafter, generation

    def test_trees_are_well_formed_and_within_bounds(
        self, target: TargetModel, name: str, params: SamplingParams
    ) -> None:
        drafter, generation = self.warm(target, name, params)
        for max_nodes in (0, 1, 2, 7, 31, 79):
            for max_depth in (0, 1, 2, 5, 63):
                tree = proposed(drafter, generation.sequence, max_nodes, max_depth)
                check_structure(tree, max_nodes, max_depth, target.vocab_size)

    def test_proposing_changes_nothing(self, target: TargetModel, name: str, params: SamplingParams) -> None:
        drafter, generation = self.warm(target, name, params)
        before = {key: array.copy() for key, array in drafter.state(generation.sequence).items()}
        first = proposed(drafter, generation.sequence, 12, 6)
        proposed(drafter, generation.sequence, 3, 2)
        assert proposed(drafter, generation.sequence, 12, 6) == first
        after = drafter.state(generation.sequence)
        assert before.keys() == after.keys()
        assert all(np.array_equal(before[key], after[key]) for key in before)

    @pytest.mark.parametrize(
        "prompt",
        [
            pytest.param([0], id="one token"),
            pytest.param([250], id="a high token", marks=pytest.mark.slow),
            pytest.param([5] * 50, id="all equal"),
        ],
    )
    def test_degenerate_prompts(
        self, target: TargetModel, name: str, params: SamplingParams, prompt: list[int]
    ) -> None:
        drafter = create_bench_drafter(name, target, free_rows)
        generation = Generation(target, drafter, prompt, params)
        for _ in range(20):
            check_structure(proposed(drafter, generation.sequence, 8, 4), 8, 4, target.vocab_size)
            generation.step(drafter)

    def test_state_goes_into_a_fresh_drafter(
        self, target: TargetModel, name: str, params: SamplingParams, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        ticks = itertools.count(step=0.001)  # plans follow measured times, which are all equal here
        monkeypatch.setattr(time, "perf_counter", lambda: next(ticks))
        monkeypatch.setattr(Policy, "choose", lambda *_: TREE)  # what ways brought is measured anew by each drafter
        drafter, generation = self.warm(target, name, params)
        fresh = create_bench_drafter(name, target, free_rows)
        fresh.start(generation.sequence, generation.cache)
        state = drafter.state(generation.sequence)
        fresh.restore(generation.sequence, {key: array.copy() for key, array in state.items()})
        for _ in range(5):
            assert proposed(fresh, generation.sequence, 8, 6) == proposed(drafter, generation.sequence, 8, 6)
            # both must propose what is verified, because they learn from the outcome
            proposed(fresh, generation.sequence, 8, max_tree_depth(generation.cache.length))
            fresh.update(generation.sequence, generation.step(drafter))

    def test_state_is_a_copy(self, target: TargetModel, name: str, params: SamplingParams) -> None:
        drafter, generation = self.warm(target, name, params)
        expected = proposed(drafter, generation.sequence, 15, 6)
        for array in drafter.state(generation.sequence).values():
            array[:] = 0
        assert proposed(drafter, generation.sequence, 15, 6) == expected

    def test_sequences_do_not_mix(self, target: TargetModel, name: str, params: SamplingParams) -> None:
        drafter = create_bench_drafter(name, target, free_rows)
        prompts = {"one": [1, 2, 3], "two": [4, 5, 6]}
        generations = [Generation(target, drafter, prompt, params, n) for n, prompt in prompts.items()]
        for _ in range(15):
            for generation in generations:
                generation.step(drafter, 6)
        drafter.stop(generations[0].sequence)
        check_structure(proposed(drafter, generations[1].sequence, 6, 5), 6, 5, target.vocab_size)

    def test_a_sequence_may_come_back_after_it_was_stopped(
        self, target: TargetModel, name: str, params: SamplingParams
    ) -> None:
        drafter, generation = self.warm(target, name, params)
        expected = proposed(drafter, generation.sequence, 8, 5)
        drafter.stop(generation.sequence)
        drafter.start(generation.sequence, generation.cache)
        assert proposed(drafter, generation.sequence, 8, 5) == expected

    def test_the_text_is_the_same_as_without_drafts(
        self, target: TargetModel, name: str, params: SamplingParams
    ) -> None:
        _, generation = self.warm(target, name, params)
        plain_drafter = create_drafter("autoregressive", target, free_rows)
        plain = Generation(target, plain_drafter, PROMPT, params)
        for _ in range(60):
            plain.step(plain_drafter)
        num_common = min(len(plain.sequence), len(generation.sequence))
        assert generation.sequence.token_ids[:num_common].tolist() == plain.sequence.token_ids[:num_common].tolist()


def test_users_choose_from_few_engines_and_variants_are_no_choice() -> None:
    assert DEFAULT_ENGINE in ENGINES
    assert len(ENGINES) <= 8
    assert not ENGINES.keys() & VARIANTS.keys()


@pytest.mark.parametrize("name", ENGINES)
def test_a_drafter_reads_caches_if_its_entry_says_so(target: TargetModel, name: str) -> None:
    assert create_drafter(name, target, free_rows).reads_caches == ENGINES[name].reads_caches


def test_an_unknown_engine_names_the_known_ones() -> None:
    with pytest.raises(ModelError, match="unknown engine 'medusa'; expected one of: auto, autoregressive"):
        create_drafter("medusa", NO_TARGET, free_rows)
