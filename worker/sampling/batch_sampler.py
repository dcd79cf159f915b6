"""Sampling of a whole batch: walks down draft trees and top candidates, in C or torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Many
from itertools import accumulate
from typing import Any, Protocol, Self, overload

import numpy as np
import torch

from swiftbatch.jobs.logprobs import NO_TOKEN, TokenLogprobs
from swiftbatch.jobs.run.run_records import LogprobsMode
from swiftbatch.worker.kernels.native_library import chosen_variant
from swiftbatch.worker.sampling import native_sampler as native
from swiftbatch.worker.sampling.draft_tree import TOP_K, DraftTree, Walk, walk
from swiftbatch.worker.sampling.logits_processors import Context, adjusted, only_allowed
from swiftbatch.worker.sampling.sampler import TokenSampler, is_drawable, process
from swiftbatch.worker.sampling.sequence import Sequence


class SplitRows(Many[torch.Tensor]):
    """Rows of each sequence, `[num_rows, width]`, sliced only on demand because views are slow."""

    def __init__(self, rows: torch.Tensor, sizes: Iterable[int]) -> None:
        """Take `rows [num_rows, width]` of all sequences in order."""
        self._rows = rows
        self._starts = list(accumulate(sizes, initial=0))

    @property
    def together(self) -> torch.Tensor:
        return self._rows[self._starts[0] : self._starts[-1]]

    def __len__(self) -> int:
        return len(self._starts) - 1

    @overload
    def __getitem__(self, index: int) -> torch.Tensor: ...

    @overload
    def __getitem__(self, index: slice) -> SplitRows: ...

    def __getitem__(self, index: int | slice) -> torch.Tensor | SplitRows:
        if isinstance(index, int):
            index = range(len(self))[index]
            return self._rows[self._starts[index] : self._starts[index + 1]]
        start, stop, step = index.indices(len(self))
        if step != 1:
            raise ValueError(f"found every {step}th sequence, expected consecutive ones")
        part = SplitRows(self._rows, ())
        part._starts = self._starts[start : max(start, stop) + 1]
        return part

    def __iter__(self) -> Iterator[torch.Tensor]:
        return (self[index] for index in range(len(self)))


def together(rows: Many[torch.Tensor]) -> torch.Tensor:
    return rows.together if isinstance(rows, SplitRows) else torch.cat(list(rows))


# Sampling of the engine's tokens: one native call per step on a CPU, row by row in torch elsewhere.


UNLIKELY = -1e4  # a very low log-probability


Masks = Many[np.ndarray | None]
"""Per tree, the allowed tokens after each row, `[1 + num_nodes, num_mask_words] uint32`; None: all."""

NO_MASKS: Masks = ()


class Sampler(Protocol):
    """Sampling state of one sequence, which follows its tokens."""

    sequence: Sequence

    def fork(self, sequence: Sequence) -> Self:
        """Return a sampler for a draft's fork of the sequence."""

    def context(self) -> Context:
        """Return everything except logits that the next token depends on."""


def penalised(sampler: Sampler, logits: torch.Tensor) -> torch.Tensor:
    """Return logits `[..., vocab]` before the temperature."""
    return adjusted(logits, sampler.sequence.sampling, sampler.context())


class BatchSampler(Protocol):
    """Samples the next tokens of sequences from the target's logits."""

    def sampler(self, sequence: Sequence) -> Any:
        """Return a sequence's `Sampler`, of the class that belongs to this one."""

    def walks(
        self,
        samplers: Many[Any],
        trees: Many[DraftTree],
        logits: Many[torch.Tensor],
        with_candidates: bool = False,
        masks: Masks = NO_MASKS,
        logprobs_mode: LogprobsMode | None = None,
    ) -> list[Walk]:
        """Walk from every root on: `logits[i] [1 + num_nodes, vocab] float32`; masks apply first.

        With a mode, walks of sequences that ask for log-probabilities have them.
        """

    def top_candidates(self, logits: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
        """Return ids and log-probabilities `[num_rows, TOP_K]` of the best tokens of `[num_rows, vocab]` logits.

        In a row with NaN, all candidates have the same very low log-probability.
        """

    def logprobs(
        self,
        sampler: Any,
        tree: DraftTree,
        logits: torch.Tensor,
        walked: Walk,
        mode: LogprobsMode,
        mask: np.ndarray | None = None,
    ) -> TokenLogprobs:
        """Return the log-probabilities of known tokens along a walk, before these are appended to the sequence."""


class NativeBatchSampler:
    """Samples in C."""

    def sampler(self, sequence: Sequence) -> native.NativeSampler:
        return native.NativeSampler(sequence)

    def walks(
        self,
        samplers: Many[native.NativeSampler],
        trees: Many[DraftTree],
        logits: Many[torch.Tensor],
        with_candidates: bool = False,
        masks: Masks = NO_MASKS,
        logprobs_mode: LogprobsMode | None = None,
    ) -> list[Walk]:
        walks = native.walk(samplers, trees, logits, masks)
        walks = _with_logprobs(self, walks, samplers, trees, logits, masks, logprobs_mode)
        return _with_candidates(self, walks, trees, logits) if with_candidates else walks

    def top_candidates(self, logits: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
        return native.top_candidates(logits)

    def logprobs(
        self,
        sampler: native.NativeSampler,
        tree: DraftTree,
        logits: torch.Tensor,
        walked: Walk,
        mode: LogprobsMode,
        mask: np.ndarray | None = None,
    ) -> TokenLogprobs:
        return native.logprobs(sampler, tree, logits, walked, num_top_of(sampler.sequence), mode, mask)


class TorchSampler:
    """`TokenSampler` that follows its sequence."""

    def __init__(self, sequence: Sequence, sampler: TokenSampler) -> None:
        self.sequence = sequence
        self._sampler = sampler

    def fork(self, sequence: Sequence) -> TorchSampler:
        return TorchSampler(sequence, self.behind_the_sequence())

    def context(self) -> Context:
        return self.behind_the_sequence().context()

    def behind_the_sequence(self) -> TokenSampler:
        for token_id in self.sequence.token_ids[self._sampler.position :].tolist():
            self._sampler.push(token_id)
        return self._sampler.fork()


class TorchBatchSampler:
    """Samples in torch, on any device."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device

    def sampler(self, sequence: Sequence) -> TorchSampler:
        return TorchSampler(sequence, TokenSampler(sequence, self._vocab_size, self._device))

    def walks(
        self,
        samplers: Many[TorchSampler],
        trees: Many[DraftTree],
        logits: Many[torch.Tensor],
        with_candidates: bool = False,
        masks: Masks = NO_MASKS,
        logprobs_mode: LogprobsMode | None = None,
    ) -> list[Walk]:
        walks = [
            walk(tree, rows, sampler.behind_the_sequence().draw, is_drawable, masked_by(words))
            for sampler, tree, rows, words in zip(samplers, trees, logits, masks or [None] * len(trees), strict=True)
        ]
        walks = _with_logprobs(self, walks, samplers, trees, logits, masks, logprobs_mode)
        return _with_candidates(self, walks, trees, logits) if with_candidates else walks

    def top_candidates(self, logits: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
        top = torch.topk(logits, TOP_K)
        logprobs = top.values - torch.logsumexp(logits, dim=-1, keepdim=True)
        logprobs = logprobs.nan_to_num(nan=UNLIKELY, neginf=-math.inf)
        return top.indices.cpu().numpy(), logprobs.cpu().numpy()

    def logprobs(
        self,
        sampler: TorchSampler,
        tree: DraftTree,
        logits: torch.Tensor,
        walked: Walk,
        mode: LogprobsMode,
        mask: np.ndarray | None = None,
    ) -> TokenLogprobs:
        return logprobs_by(sampler.behind_the_sequence(), sampler.sequence, logits, walked, mode, mask)


def logprobs_by(
    sampler: TokenSampler,
    sequence: Sequence,
    logits: torch.Tensor,
    walked: Walk,
    mode: LogprobsMode,
    mask: np.ndarray | None,
) -> TokenLogprobs:
    """Return log-probabilities of a walk's tokens, computed in torch in float64, pushing to `sampler`."""
    num_top = num_top_of(sequence)
    found = TokenLogprobs.empty(len(walked.drawn), num_top)
    for i, (row, token_id) in enumerate(zip([0, *(node + 1 for node in walked.path)], walked.drawn, strict=False)):
        scores = logits[row]
        if mode == "processed_logprobs":
            scores = sampler.penalised(scores if mask is None else only_allowed(scores, mask[row]))
            sampler.push(token_id)
            if sequence.sampling.temperature > 0.0:
                scores = process(scores, sequence.sampling)
        found.logprobs[i], found.top_ids[i], found.top_logprobs[i] = row_logprobs(scores, token_id, num_top)
    return found


def row_logprobs(scores: torch.Tensor, token_id: int, num_top: int) -> tuple[float, np.ndarray, np.ndarray]:
    """Return a token's log-probability by scores `[vocab]`, and ids and log-probabilities of the best `[num_top]`.

    Equal scores are ordered by id; missing ids are NO_TOKEN.
    """
    logprobs = torch.log_softmax(scores.double(), dim=-1).nan_to_num(nan=-torch.inf, neginf=-torch.inf)
    ids, top = np.full(num_top, NO_TOKEN, np.int32), np.full(num_top, -np.inf, np.float32)
    if num_top:
        best = torch.sort(scores, descending=True, stable=True).indices[:num_top]
        values = logprobs[best].float().cpu().numpy()
        count = int(np.isfinite(values).sum())
        ids[:count], top[:count] = best[:count].cpu().numpy(), values[:count]
    return float(logprobs[token_id].float()), ids, top


def num_top_of(sequence: Sequence) -> int:
    """Return how many top candidates have log-probabilities. Raises ValueError if the sequence requests none."""
    if sequence.logprobs is None:
        raise ValueError(f"sequence {sequence.sequence_id} asks for no log-probabilities")
    return sequence.logprobs.num_top


def masked_by(words: np.ndarray | None) -> Callable[[torch.Tensor, int], torch.Tensor]:
    return lambda logits, row: logits if words is None else only_allowed(logits, words[row])


def _with_logprobs(
    drawing: BatchSampler,
    walks: list[Walk],
    samplers: Many[Sampler],
    trees: Many[DraftTree],
    logits: Many[torch.Tensor],
    masks: Masks,
    mode: LogprobsMode | None,
) -> list[Walk]:
    if mode is None or all(sampler.sequence.logprobs is None for sampler in samplers):
        return walks
    found = zip(walks, samplers, trees, logits, masks or [None] * len(trees), strict=True)
    return [
        walk._replace(logprobs=drawing.logprobs(sampler, tree, rows, walk, mode, words))
        if sampler.sequence.logprobs is not None
        else walk
        for walk, sampler, tree, rows, words in found
    ]


def _with_candidates(
    drawing: BatchSampler, walks: list[Walk], trees: Many[DraftTree], logits: Many[torch.Tensor]
) -> list[Walk]:
    ids, logprobs = drawing.top_candidates(together(logits))
    found, start = list[Walk](), 0
    for walked, tree in zip(walks, trees, strict=True):
        end = start + 1 + len(tree)
        found.append(walked._replace(candidates=(ids[start:end], logprobs[start:end])))
        start = end
    return found


def create_batch_sampler(vocab_size: int, device: torch.device) -> BatchSampler:
    """Return the fastest sampler. Raises KernelError if the requested instruction set cannot run here."""
    if device.type == "cpu" and chosen_variant() is not None and vocab_size >= TOP_K:
        return NativeBatchSampler()
    return TorchBatchSampler(vocab_size, device)
