"""TriForce (Sun et al. 2024), tuned and as published: a small draft model proposes chains."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from swiftbatch.jobs.errors import ModelError
from swiftbatch.worker.drafters.catalogue import DRAFT_MODEL
from swiftbatch.worker.drafters.choice.choosing_drafter import with_rounds
from swiftbatch.worker.drafters.drafter_interface import Drafter
from swiftbatch.worker.drafters.engine_options import NUM_SINKS, WINDOW, TriForceOptions
from swiftbatch.worker.drafters.ranking import CandidateRanker
from swiftbatch.worker.drafters.self_speculation import (
    Chain,
    Proposer,
    RoundPlan,
    SelfSpeculationDrafter,
    partial_cache,
)
from swiftbatch.worker.forward.step_costs import Costs
from swiftbatch.worker.forward.target_model import TargetModel
from swiftbatch.worker.forward.tile_packing import SequenceRows, chain_rows
from swiftbatch.worker.kv.full_cache import FullKVCache
from swiftbatch.worker.kv.sparse_cache import SparseCacheFactory
from swiftbatch.worker.model.model_files import locate_model
from swiftbatch.worker.sampling.batch_sampler import BatchSampler, penalised
from swiftbatch.worker.sampling.draft_tree import ROOT, DraftTree
from swiftbatch.worker.sampling.sequence import Sequence


@dataclass
class _Context:
    cache: FullKVCache
    token_ids: np.ndarray  # [cache.length]


class DraftModel:
    """Causal language model with a short cache per sequence."""

    def __init__(self, model: TargetModel, options: TriForceOptions) -> None:
        self._model, self._options = model, options
        self._contexts: dict[str, _Context] = {}

    @classmethod
    def load(cls, parts_folder: Path | None, target: TargetModel, options: TriForceOptions) -> DraftModel:
        """Load the target's draft model from `draft` in a folder (None: the target's own) or from the folder.

        Raises ModelError if it does not fit.
        """
        folder = DRAFT_MODEL.find(target.files.name, target.files.path, target.files.fingerprint, parts_folder)
        files = locate_model(str(folder))
        longest = options.draft_length
        if files.max_positions < longest:
            raise ModelError(f"draft model {folder}: it has {files.max_positions} positions; {longest} are needed")
        return cls(target.load_beside(files, longest), options)

    def start(self, sequence_id: str) -> None:
        cache = self._model.new_cache(self._options.draft_length)
        self._contexts[sequence_id] = _Context(cache, np.zeros(0, dtype=np.int64))

    def stop(self, sequence_id: str) -> None:
        del self._contexts[sequence_id]

    def window_of(self, token_ids: np.ndarray, num_committed: int) -> np.ndarray:
        return window_of(token_ids, num_committed, self._options.window)

    def logits(self, requests: dict[str, np.ndarray]) -> list[torch.Tensor]:
        """Return the logits `[vocab] float32` after each sequence's `window_of` tokens, in shared forwards."""
        for sequence_id, token_ids in requests.items():
            self._roll_back(self._contexts[sequence_id], token_ids)
        found: dict[str, torch.Tensor] = {}
        while waiting := [name for name in requests if name not in found]:
            rows = [self._missing_rows(name, requests[name]) for name in waiting]
            for name, part, outputs in zip(waiting, rows, self._model.verify(rows), strict=True):
                context = self._contexts[name]
                context.cache.advance(len(part))
                if context.cache.length == len(requests[name]):
                    context.token_ids = requests[name]
                    found[name] = outputs.logits[-1].clone()  # the next forward overwrites a forward's logits
        return [found[name] for name in requests]

    def _missing_rows(self, sequence_id: str, token_ids: np.ndarray) -> SequenceRows:
        cache = self._contexts[sequence_id].cache
        return chain_rows(cache, token_ids[cache.length :].tolist())

    @staticmethod
    def _roll_back(context: _Context, token_ids: np.ndarray) -> None:
        """Forget cached tokens after the common prefix with `token_ids`; the last token's row is always run again."""
        num_common = min(len(context.token_ids), len(token_ids) - 1)
        differs = np.nonzero(context.token_ids[:num_common] != token_ids[:num_common])[0]
        context.cache.roll_back(int(differs[0]) if len(differs) else num_common)
        context.token_ids = token_ids[: context.cache.length]


def window_of(token_ids: np.ndarray, num_committed: int, window: int = WINDOW) -> np.ndarray:
    """Return the tokens of a sequence and its chain that the draft model reads."""
    start = max(NUM_SINKS, (num_committed // window - 1) * window)
    return np.concatenate([token_ids[:NUM_SINKS], token_ids[start:]])


# TriForce (Sun et al. 2024): a small draft model proposes, the target with a summarised cache checks.


def triforce(
    target: TargetModel,
    costs: Costs,
    parts_folder: Path | None,
    options: TriForceOptions,
    new_cache: SparseCacheFactory | None = None,
) -> Drafter:
    """Make TriForce's drafter; `new_cache` None means the options' cache.

    Raises ModelError without a draft model for this target.
    """
    draft_model = DraftModel.load(parts_folder, target, options)
    proposer = DraftModelProposer(draft_model, target.forwards.new_batch_sampler(), options.width)
    plan = hierarchy(options.gamma_1, options.gamma_2, options.width)
    cache = new_cache or partial_cache(options)
    drafter = SelfSpeculationDrafter(target, proposer, cache, options.partial_budget, plan, options.budget_of)
    return drafter if options.at_every_step else with_rounds(drafter, plan, costs)


def hierarchy(gamma_1: int, gamma_2: int, width: int = 1) -> RoundPlan:
    """Plan as in algorithm 1: `gamma_1` draft tokens per middle verification, until the chain has `gamma_2` or more.

    gamma_1 = 0 is self-speculation with the partial cache alone. Each draft token has `width` candidates.
    """
    return RoundPlan(gamma_2, gamma_1 * width, gamma_2, gamma_2 * width)


class DraftModelProposer(Proposer):
    """Draws with the target's coupled noise, in shared forwards."""

    def __init__(self, draft_model: DraftModel, drawing: BatchSampler, width: int = 1) -> None:
        """`drawing` makes the chains' samplers; each drawn token comes with its `width - 1` best alternatives."""
        self._draft_model = draft_model
        self._batch_sampler = drawing
        self._width = width

    def start(self, sequence: Sequence) -> None:
        self._draft_model.start(sequence.sequence_id)

    def propose(self, chains: list[Chain], limits: list[tuple[int, int]]) -> list[DraftTree]:
        trees = [_Growing(chain, *limit, self._width) for chain, limit in zip(chains, limits, strict=True)]
        while growing := {tree.sequence_id: tree for tree in trees if tree.wants_more}:
            windows = {name: self._draft_model.window_of(*tree.read()) for name, tree in growing.items()}
            found = self._draft_model.logits(windows)
            roots, samplers = [DraftTree()] * len(found), [tree.sampler for tree in growing.values()]
            walks = self._batch_sampler.walks(samplers, roots, [logits[None] for logits in found])
            for tree, walk, logits in zip(growing.values(), walks, found, strict=True):
                tree.grow(walk.drawn[0] if walk.drawn else 0, logits)  # a damaged draft model ends no job
        return [each.tree for each in trees]

    def stop(self, sequence: Sequence) -> None:
        self._draft_model.stop(sequence.sequence_id)


class _Growing:
    """Tree below a chain's newest token, while it grows: each level's first node has the next level below it."""

    def __init__(self, chain: Chain, max_nodes: int, max_depth: int, width: int) -> None:
        self.tree, self._parent = DraftTree(), ROOT
        self.sequence_id = chain.sequence.sequence_id
        self._max_nodes, self._max_depth, self._width = max_nodes, max_depth, width
        self._sequence, self.sampler = chain.sequence, chain.sampler
        self._depth = 0
        if self.wants_more:
            self._sequence = chain.sequence.fork()
            self.sampler = chain.sampler.fork(self._sequence)
        self._num_committed = len(chain.sequence) - chain.num_tokens

    @property
    def wants_more(self) -> bool:
        return len(self.tree) < self._max_nodes and self._depth < self._max_depth

    def read(self) -> tuple[np.ndarray, int]:
        return self._sequence.token_ids, self._num_committed

    def grow(self, token_id: int, logits: torch.Tensor) -> None:
        """Add a drawn token and its best alternatives by the draft model's `logits [vocab]`."""
        level = [token_id, *self._alternatives(token_id, logits)][: self._max_nodes - len(self.tree)]
        first, self._depth = len(self.tree), self._depth + 1
        self.tree.token_ids += level
        self.tree.parents += [self._parent] * len(level)
        self._parent = first
        self._sequence.extend([token_id])

    def _alternatives(self, token_id: int, logits: torch.Tensor) -> list[int]:
        if self._width == 1:
            return []
        guessed = penalised(self.sampler, logits[None])
        ranked = CandidateRanker(self._sequence).rank_logits(guessed, [1], self._width)[0]
        return [candidate for _, candidate in ranked if candidate != token_id][: self._width - 1]
