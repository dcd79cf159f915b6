"""Table of each row's sampling parameters on a GPU, and the buffers of counts, biases and masks."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Many
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from swiftbatch.jobs.sampling_params import SamplingParams
from swiftbatch.worker.kernels.kernel_sizes import NUM_ROWS
from swiftbatch.worker.sampling.draft_tree import ROOT, DraftTree
from swiftbatch.worker.sampling.filters import NUMBERS, filter_numbers
from swiftbatch.worker.sampling.logits_processors import counts_output, has_bias, masked_behind
from swiftbatch.worker.sampling.sequence import Sequence
from swiftbatch.worker.sampling.token_masks import num_mask_words

ROW = np.dtype(
    [
        ("noise_key", "<u8"),
        ("position", "<i8"),  # position of the token to draw
        ("slot", "<i4"),  # -1: a padding row, whose other words are not read
        ("depth", "<i4"),  # number of drafted tokens from the committed ones to this row
        ("window", "<i4"),
        ("temperature", "<f4"),  # 0: the best token, without noise
        ("penalty", "<f4"),  # 1: off
        *((number.name, "<i4" if number.is_whole else "<f4") for number in NUMBERS),
        ("frequency", "<f4"),  # 0: off
        ("presence", "<f4"),  # 0: off
        ("has_bias", "<i4"),  # 0: the bias is not read
        ("num_masked", "<i4"),  # number of the row's forbidden tokens
        ("is_restricted", "<i4"),  # 0: the mask is not read
        ("logprobs", "<i4"),  # NO_LOGPROBS, RAW, PROCESSED or FILTERED
        ("token", "<i4"),  # whose log-probability is asked for; DRAWN: the drawn one
    ]
)
NUM_WORDS = ROW.itemsize // 4
NUM_DRAFTED = 64  # longest path of a row
NUM_MASKED = 512  # most forbidden tokens of a row
PADDING = -1
DRAWN = -1
NO_LOGPROBS, RAW, PROCESSED, FILTERED = range(4)  # of unchanged logits, without a search for a cut, and with one


def column_of(name: str) -> int:
    fields: Mapping[str, Any] = ROW.fields or {}
    return int(fields[name][1]) // 4


def fill_row(
    rows: NDArray[Any],
    index: int,
    sequence: Sequence,
    slot: int,
    position: int,
    depth: int,
    num_masked: int = 0,
    is_restricted: bool = False,
    words: tuple[float, ...] | None = None,
    logprobs: int = NO_LOGPROBS,
    token: int = DRAWN,
) -> None:
    words = parameter_words(sequence.sampling) if words is None else words
    rows[index] = (sequence.noise_key, position, slot, depth, *words, num_masked, is_restricted, logprobs, token)


def parameter_words(params: SamplingParams) -> tuple[float, ...]:
    """Return the fields that depend only on sampling parameters: those from `window` to `has_bias`."""
    return (
        params.penalty_window,
        params.temperature,
        params.repetition_penalty,
        *filter_numbers(params),
        params.frequency_penalty,
        params.presence_penalty,
        has_bias(params),
    )


def needs_slot(params: SamplingParams) -> bool:
    return params.repetition_penalty != 1.0 or counts_output(params) or has_bias(params)


BLOCK = 1024  # a multiple of 4, because four tokens share a counter of the noise
MAX_VOCAB = 2**19 - 1  # weights of so many tokens, as multiples of 2^-44, have a sum below 2^63


def refuse_vocab(vocab_size: int, least: int = 1) -> None:
    """Raise ValueError for logits of fewer tokens than `least`, or of more than the kernels can sum."""
    if not least <= vocab_size <= MAX_VOCAB:
        raise ValueError(f"logits: found {vocab_size} tokens, expected {least} to {MAX_VOCAB}")


@dataclass(frozen=True)
class SlotBuffers:
    """Fixed device buffers of penalties and bias (by slots) and of masks (by rows)."""

    counts: torch.Tensor  # [num_slots, vocab] int32: committed tokens in the penalty window
    output: torch.Tensor  # [num_slots, vocab] int32: committed output tokens
    bias: torch.Tensor  # [num_slots, vocab] float32: added to the logits
    masked: torch.Tensor  # [num_rows, NUM_MASKED] int32: forbidden tokens
    allowed: torch.Tensor  # [num_rows, num_mask_words] int32: the only tokens allowed at a restricted row

    @classmethod
    def empty(cls, num_slots: int, num_rows: int, vocab_size: int, device: torch.device) -> SlotBuffers:
        by_slot = (num_slots, vocab_size)
        return cls(
            torch.zeros(by_slot, dtype=torch.int32, device=device),
            torch.zeros(by_slot, dtype=torch.int32, device=device),
            torch.zeros(by_slot, device=device),
            torch.zeros(num_rows, NUM_MASKED, dtype=torch.int32, device=device),
            torch.zeros(num_rows, num_mask_words(vocab_size), dtype=torch.int32, device=device),
        )


# Rows of a draw on a GPU.


@dataclass(frozen=True)
class SamplingRow:
    """Row of logits after a path of drafted tokens."""

    sequence: Sequence  # has the committed tokens, without the path
    slot: int  # has the token counts
    path: list[int]  # drafted tokens end with the row's own
    allowed: np.ndarray | None = None  # [num_mask_words] uint32; None if all tokens are allowed
    logprobs: int = NO_LOGPROBS
    token: int = DRAWN

    @property
    def position(self) -> int:
        return len(self.sequence) + len(self.path)

    @property
    def masked(self) -> tuple[int, ...]:
        return masked_behind(self.sequence, self.path)


def rows_of(
    committed: Sequence,
    slot: int,
    drafted: list[int],
    tree: DraftTree,
    masks: np.ndarray | None,
    logprobs: int = NO_LOGPROBS,
) -> Iterator[SamplingRow]:
    """Yield a tree's rows after `drafted` tokens, root first; `masks [1 + num_nodes, num_mask_words] uint32`."""
    allowed = [None] * (1 + len(tree)) if masks is None else list(masks)
    paths = {ROOT: drafted}
    yield SamplingRow(committed, slot, drafted, allowed[0], logprobs)
    for node, (token_id, parent) in enumerate(zip(tree.token_ids, tree.parents, strict=True)):
        paths[node] = [*paths[parent], token_id]
        yield SamplingRow(committed, slot, paths[node], allowed[node + 1], logprobs)


def mask_rows(slots: SlotBuffers, rows: Many[SamplingRow | None]) -> None:
    """Copy the rows' masks to the device, once earlier copies are done."""
    restricted = [(index, row.allowed) for index, row in enumerate(rows) if row is not None and row.allowed is not None]
    if restricted:
        words = np.zeros((len(rows), slots.allowed.shape[1]), dtype=np.uint32)
        for index, mask in restricted:
            words[index] = mask
        slots.allowed[: len(rows)] = torch.from_numpy(words.view(np.int32)).to(slots.allowed.device)
    masked = [(index, row.masked) for index, row in enumerate(rows) if row is not None and row.masked]
    if not masked:
        return
    lists = np.full((len(rows), NUM_MASKED), PADDING, dtype=np.int32)
    for index, token_ids in masked:
        lists[index, : len(token_ids)] = token_ids
    slots.masked[: len(rows)] = torch.from_numpy(lists).to(slots.masked.device)


@dataclass(frozen=True)
class SamplingRowLayout:
    """Layout of a draw's inputs in one int32 buffer."""

    num_slots: int
    num_rows: int = NUM_ROWS

    @property
    def size(self) -> int:
        return sum(math.prod(shape) for shape in self._shapes())

    def parts(self, buffer: Any) -> list[Any]:
        """Return views of rows, ancestors, leaving, arriving and gone tokens."""
        parts, start = [], 0
        for shape in self._shapes():
            end = start + math.prod(shape)
            parts.append(buffer[start:end].reshape(shape))
            start = end
        return parts

    def fill(self, buffer: NDArray[np.int32], rows: Many[SamplingRow | None], news: dict[int, tuple[Any, Any]]) -> None:
        """Fill a buffer with up to `num_rows` rows; `news` has tokens that entered and left windows, by slot."""
        words, ancestors, leaving, arriving, gone = self.parts(buffer)
        table = words.reshape(-1).view(ROW)
        table[:] = np.zeros((), dtype=ROW)
        table["slot"] = PADDING
        arriving[:] = gone[:] = PADDING
        windows = fill_rows(table, ancestors, rows)
        for slot, sequence in windows.items():
            leaving[slot] = leaving_tokens(sequence.token_ids, sequence.sampling.penalty_window)
        for slot, (came, went) in news.items():
            arriving[slot, : len(came)], gone[slot, : len(went)] = came, went

    def _shapes(self) -> tuple[tuple[int, int], ...]:
        by_slot = (self.num_slots, NUM_DRAFTED)
        return (self.num_rows, NUM_WORDS), (self.num_rows, NUM_DRAFTED), by_slot, by_slot, by_slot


def fill_rows(table: NDArray[Any], ancestors: NDArray[np.int32], rows: Many[SamplingRow | None]) -> dict[int, Sequence]:
    """Fill rows of `table [num_rows] ROW` and paths `[num_rows, NUM_DRAFTED]`; return the sequences by slot."""
    windows = dict[int, Sequence]()
    known: Sequence | None = None
    words: tuple[float, ...] = ()  # computed once for the rows of a tree
    for index, row in enumerate(rows):
        if row is None:
            continue
        sequence, path = row.sequence, row.path
        if sequence is not known:
            known, words = sequence, parameter_words(sequence.sampling)
            windows[row.slot] = sequence
        place = (row.slot, row.position, len(path))
        masks = (len(row.masked), row.allowed is not None)
        fill_row(table, index, sequence, *place, *masks, words, row.logprobs, row.token)
        if path:
            ancestors[index, : len(path)] = path
    return windows


def leaving_tokens(token_ids: NDArray[np.int64], window: int) -> NDArray[np.int32]:
    """Return the committed tokens that leave the window with each further token, `[NUM_DRAFTED]`, or -1."""
    leaving = np.full(NUM_DRAFTED, PADDING, dtype=np.int32)
    first = len(token_ids) - window  # index of the token that leaves with the next one
    tokens = token_ids[max(first, 0) : max(first + NUM_DRAFTED, 0)]
    start = max(-first, 0)
    leaving[start : start + len(tokens)] = tokens[: NUM_DRAFTED - start]
    return leaving


def committed_tokens(
    token_ids: NDArray[np.int64], num_new: int, window: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the last `num_new` tokens, and the tokens that these pushed out of the window."""
    length = len(token_ids)
    return token_ids[length - num_new :], token_ids[max(length - num_new - window, 0) : max(length - window, 0)]
