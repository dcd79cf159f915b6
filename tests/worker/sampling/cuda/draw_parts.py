"""Steps of sequences with draft trees for the device, and `sampler.py`'s draws."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from swiftbatch.jobs.sampling_params import SamplingParams
from swiftbatch.worker.sampling.cuda.cuda_sampler import SamplingBuffers
from swiftbatch.worker.sampling.cuda.sampling_rows import (
    NUM_DRAFTED,
    NUM_MASKED,
    PADDING,
    ROW,
    SlotBuffers,
    fill_row,
    leaving_tokens,
)
from swiftbatch.worker.sampling.draft_tree import ROOT, DraftTree
from swiftbatch.worker.sampling.filters import FILTERS as FILTER_LIST
from swiftbatch.worker.sampling.logits_processors import bias_row, masked_behind, only_allowed, output_counts
from swiftbatch.worker.sampling.sampler import TokenSampler
from swiftbatch.worker.sampling.sequence import Sequence
from swiftbatch.worker.sampling.token_masks import mask_of, num_mask_words
from tests.worker.sampling.native.sampling_parts import any_mask, any_row, any_words

NAN = float("nan")
UNSEEN_COUNT = 2**30
UNSEEN_TOKEN = 0  # a real one, so that any read counts it
VOCAB = 300
NO_FILTERS = {each.field: each.off for each in FILTER_LIST if each.is_searched}
FILTERS = {"top_k": 40, "top_p": 0.95, "min_p": 0.01, "eta": 0.01}


def padding_rows(num_rows: int) -> NDArray[Any]:
    """Return an empty table `[num_rows] ROW`."""
    rows = np.zeros(num_rows, dtype=ROW)
    rows["slot"] = PADDING
    return rows


@dataclass
class Branch:
    """A sequence, drafted tokens after it, and their logits."""

    sequence: Sequence
    path_ids: list[int]
    logits: torch.Tensor  # [vocab]
    allowed: np.ndarray | None = None  # [num_mask_words] uint32

    def expected(self) -> int:
        sampler = TokenSampler(self.sequence, len(self.logits))
        for token_id in self.path_ids:
            sampler.push(token_id)
        return sampler.draw(self.logits if self.allowed is None else only_allowed(self.logits, self.allowed))


def sequence_of(
    token_ids: list[int],
    params: SamplingParams,
    vocab_size: int,
    num_output: int = 0,
    bad_word_ids: tuple[tuple[int, ...], ...] = (),
) -> Sequence:
    """The last `num_output` tokens are output."""
    num_prompt = max(1, len(token_ids) - num_output)
    params = params.model_copy(update={"max_tokens": 1 + num_output})
    sequence = Sequence("s", token_ids[:num_prompt], params, vocab_size, bad_word_ids=bad_word_ids)
    sequence.extend(token_ids[num_prompt:])
    return sequence


def plain(**settings: float) -> SamplingParams:
    return SamplingParams(max_tokens=1, **{"repetition_penalty": 1.0, **NO_FILTERS, "seed": 7} | settings)  # type: ignore[arg-type]


def any_branch(chance: random.Random, params: SamplingParams, vocab_size: int = VOCAB) -> Branch:
    params = params.model_copy(update={"penalty_window": chance.choice([1, 3, 40, 1024])})
    token_ids = [chance.randrange(vocab_size) for _ in range(chance.choice([1, 20, 70]))]
    path_ids = [chance.randrange(vocab_size) for _ in range(chance.choice([0, 1, 5, 63]))]
    words = any_words(chance, params, vocab_size)
    sequence = sequence_of(token_ids, params, vocab_size, chance.choice([0, 5, 60]), words)
    sequence.eos_token_ids = frozenset({vocab_size - 1})
    branch = Branch(sequence, path_ids, any_row(chance, vocab_size))
    if chance.random() < 0.3:
        allowed = any_mask(chance, vocab_size)
        banned = (*masked_behind(sequence, path_ids), *(word[0] for word in words if len(word) == 1))
        if (allowed & ~mask_of(banned, vocab_size)).any():  # otherwise nothing could be drawn
            branch.allowed = allowed
    return branch


def branches_of(sequence: Sequence, tree: DraftTree, logits: torch.Tensor) -> list[Branch]:
    """Return rows, root first; `logits [1 + num_nodes, vocab]`."""
    paths: dict[int, list[int]] = {ROOT: []}
    for node, (token_id, parent) in enumerate(zip(tree.token_ids, tree.parents, strict=True)):
        paths[node] = [*paths[parent], token_id]
    return [Branch(sequence, paths[i - 1], row) for i, row in enumerate(logits)]


def any_tree(chance: random.Random, num_nodes: int, vocab_size: int) -> DraftTree:
    parents = [max(ROOT, node - chance.randrange(1, 4)) for node in range(num_nodes)]
    return DraftTree([chance.randrange(vocab_size) for _ in parents], parents)


def step_of(branches: list[Branch | None], num_slots: int = 0) -> SamplingBuffers:
    """Put each sequence in its own slot; None pads.

    Unused values are wrong on purpose.
    """
    vocab_size = next(len(branch.logits) for branch in branches if branch)
    found = {id(branch.sequence): branch.sequence for branch in branches if branch}
    slots = {name: len(found) - 1 - i for i, name in enumerate(found)}  # the last row's sequence is in slot 0
    rows, logits = padding_rows(len(branches)), torch.full((len(branches), vocab_size), NAN)
    ancestors = torch.full((len(branches), NUM_DRAFTED), UNSEEN_TOKEN, dtype=torch.int32)
    slot_buffers = SlotBuffers(
        counts=torch.full((len(found) + num_slots, vocab_size), UNSEEN_COUNT, dtype=torch.int32),
        output=torch.full((len(found) + num_slots, vocab_size), UNSEEN_COUNT, dtype=torch.int32),
        bias=torch.full((len(found) + num_slots, vocab_size), NAN),
        masked=torch.full((len(branches), NUM_MASKED), UNSEEN_TOKEN, dtype=torch.int32),
        allowed=torch.zeros(len(branches), num_mask_words(vocab_size), dtype=torch.int32),
    )
    counts = slot_buffers.counts
    leaving = torch.full((len(counts), NUM_DRAFTED), UNSEEN_TOKEN, dtype=torch.int32)
    for i, branch in enumerate(branches):
        if branch:
            sequence, depth = branch.sequence, len(branch.path_ids)
            position = len(sequence) + depth
            masked = masked_behind(sequence, branch.path_ids)
            is_restricted = branch.allowed is not None
            fill_row(rows, i, sequence, slots[id(sequence)], position, depth, len(masked), is_restricted)
            if branch.allowed is not None:
                slot_buffers.allowed[i] = torch.from_numpy(branch.allowed.view(np.int32))
            slot_buffers.masked[i, : len(masked)] = torch.tensor(masked, dtype=torch.int32)
            logits[i] = branch.logits
            ancestors[i, :depth] = torch.tensor(branch.path_ids, dtype=torch.int32)
    for name, sequence in found.items():
        if (window := sequence.sampling.penalty_window) and sequence.sampling.repetition_penalty != 1.0:
            recent = np.bincount(sequence.token_ids[-window:], minlength=vocab_size)
            counts[slots[name]] = torch.from_numpy(recent)
            leaving[slots[name]] = torch.from_numpy(leaving_tokens(sequence.token_ids, window))
        if (output := output_counts(sequence, vocab_size, "cpu")) is not None:
            slot_buffers.output[slots[name]] = output
        if (bias := bias_row(sequence, "cpu")) is not None:
            slot_buffers.bias[slots[name]] = bias
    return SamplingBuffers(
        logits=logits,
        rows=torch.from_numpy(rows.view(np.int32).reshape(len(rows), -1)),
        ancestors=ancestors,
        slots=slot_buffers,
        leaving=leaving,
        tokens=torch.full((len(branches),), 12345, dtype=torch.int32),
        highest=torch.full((len(branches),), 12345.0),
    )
