"""Sampling in C on a CPU (source/sampling.c): structs, checks and calls."""

from __future__ import annotations

import copy
import ctypes
import functools
import threading
from collections.abc import Sequence as Many
from ctypes import c_bool, c_float, c_int64, c_uint64, c_void_p
from typing import TYPE_CHECKING

import numpy as np
import torch

from swiftbatch.jobs.logprobs import TokenLogprobs
from swiftbatch.jobs.run.run_records import LogprobsMode
from swiftbatch.jobs.sampling_params import SamplingParams
from swiftbatch.worker.kernels.native_library import KernelError, chosen_variant, load_library
from swiftbatch.worker.kernels.row_tables import address_of
from swiftbatch.worker.sampling.draft_tree import TOP_K, DraftTree, Walk
from swiftbatch.worker.sampling.filters import NUMBERS, filter_numbers
from swiftbatch.worker.sampling.logits_processors import (
    Context,
    adjusts,
    bias_pairs,
    bias_row,
    counts_output,
    ending_tokens,
    long_words,
    masked_behind,
    output_penalties,
)
from swiftbatch.worker.sampling.token_masks import num_mask_words

if TYPE_CHECKING:
    from swiftbatch.worker.sampling.sequence import Sequence

SIGNATURES = {
    "sampling_scratch_size": (c_int64, (c_int64,)),
    "sampling_walk": (None, (c_void_p, c_int64, c_int64, c_void_p)),
    "sampling_logprobs": (None, (c_void_p, c_int64, c_bool, c_int64, c_void_p, c_void_p, c_void_p, c_void_p)),
    "sampling_follow": (None, (c_void_p, c_void_p, c_int64)),
    "sampling_top_candidates": (None, (c_void_p, c_int64, c_int64, c_int64, c_void_p, c_void_p)),
}
ALL_TOKENS = 2**62  # a window of any length
MAX_VOCAB = 2**24  # float32 counts exactly up to here


class CFilterParams(ctypes.Structure):
    """`filter_params` of source/filters.h."""

    _fields_ = tuple((number.name, c_int64 if number.is_whole else c_float) for number in NUMBERS)


class CSamplingParams(ctypes.Structure):
    """`sampling_params` of source/sampling.h."""

    _fields_ = (("noise_key", c_uint64), ("temperature", c_float), ("penalty", c_float), ("filters", CFilterParams))


class CPenaltyWindow(ctypes.Structure):
    """`penalty_window` of source/sampling.h."""

    _fields_ = (("counts", c_void_p), ("vocab", c_int64), ("window", c_int64), ("num_counted", c_int64))


class CAdjustments(ctypes.Structure):
    """`adjustments` of source/sampling.h."""

    _fields_ = (
        ("bias_ids", c_void_p),
        ("bias", c_void_p),
        ("num_biased", c_int64),
        ("masked_ids", c_void_p),
        ("num_masked", c_int64),
        ("first_unmasked", c_int64),
        ("word_ids", c_void_p),
        ("word_starts", c_void_p),
        ("num_words", c_int64),
        ("num_prompt", c_int64),
        ("banned_ids", c_void_p),
        ("num_banned", c_int64),
        ("output", CPenaltyWindow),
        ("frequency", c_float),
        ("presence", c_float),
    )


class CTreeWalk(ctypes.Structure):
    """`tree_walk` of source/sampling.h."""

    _fields_ = (
        ("params", c_void_p),
        ("penalties", c_void_p),
        ("adjusted", c_void_p),
        ("logits", c_void_p),
        ("row_stride", c_int64),
        ("node_ids", c_void_p),
        ("parents", c_void_p),
        ("num_nodes", c_int64),
        ("masks", c_void_p),
        ("token_ids", c_void_p),
        ("length", c_int64),
        ("drawn", c_void_p),
        ("path", c_void_p),
        ("num_drawn", c_int64),
        ("path_length", c_int64),
        ("failed_row", c_int64),
    )


class NativeAdjustments:
    """`adjustments` of one sequence, and the memory that they point to."""

    def __init__(self, sequence: Sequence) -> None:
        """Raise ValueError for a bias of a token outside the vocabulary."""
        params, vocab_size = sequence.sampling, sequence.vocab_size
        self.bias = bias_row(sequence, "cpu")
        self.counts = np.zeros(vocab_size, dtype=np.int32) if counts_output(params) else None
        pairs, words = bias_pairs(sequence), long_words(sequence)
        self._bias_ids = np.array([token_id for token_id, _ in pairs], dtype=np.int64)
        self._bias_values = np.array([bias for _, bias in pairs], dtype=np.float32)
        self._word_ids = np.array([token_id for word in words for token_id in word], dtype=np.int64)
        self._word_starts = np.cumsum([0, *map(len, words)], dtype=np.int64)
        self._banned_ids = np.empty(len(words), dtype=np.int64)
        self._masked_ids = np.array(ending_tokens(sequence), dtype=np.int64)
        output = CPenaltyWindow(address_of(self.counts), vocab_size, ALL_TOKENS, sequence.num_prompt_tokens)
        first_unmasked = sequence.num_prompt_tokens + params.min_tokens
        self.call = CAdjustments(
            *(address_of(self._bias_ids), address_of(self._bias_values), len(self._bias_ids)),
            *(address_of(self._masked_ids), len(self._masked_ids), first_unmasked),
            *(address_of(self._word_ids), address_of(self._word_starts), len(words)),
            *(sequence.num_prompt_tokens, address_of(self._banned_ids), 0),
            *(output, *output_penalties(params)),
        )

    def fork(self) -> NativeAdjustments:
        """Return a copy with its own counts."""
        fork = copy.copy(self)
        fork.call = CAdjustments.from_buffer_copy(self.call)
        fork._banned_ids = self._banned_ids.copy()
        fork.call.banned_ids = address_of(fork._banned_ids)
        if self.counts is not None:
            fork.counts = self.counts.copy()
            fork.call.output.counts = address_of(fork.counts)
        return fork

    def follow(self, token_ids: np.ndarray) -> None:
        kernels().sampling_follow(ctypes.addressof(self.call.output), address_of(token_ids), len(token_ids))


def sampling_params(params: SamplingParams, noise_key: int) -> CSamplingParams:
    filters = CFilterParams(*filter_numbers(params))
    return CSamplingParams(noise_key, params.temperature, params.repetition_penalty, filters)


def check_logits(logits: torch.Tensor, shape: tuple[int, ...]) -> None:
    """Raise ValueError unless the logits are `shape` float32 on the CPU, contiguous in tokens."""
    if tuple(logits.shape) != shape or not 0 < shape[-1] <= MAX_VOCAB:
        raise ValueError(f"logits {list(logits.shape)}; expected {list(shape)}, of 1 to {MAX_VOCAB} tokens")
    if logits.dtype != torch.float32 or logits.device.type != "cpu" or (shape[-1] > 1 and logits.stride(-1) != 1):
        found = f"{logits.dtype} on {logits.device}, in steps of {list(logits.stride())}"
        raise ValueError(f"logits are {found}; expected float32 on the CPU, tokens side by side")


def check_masks(masks: np.ndarray, num_rows: int, vocab_size: int) -> None:
    """Raise ValueError unless the masks are contiguous `[num_rows, num_mask_words] uint32`."""
    shape = (num_rows, num_mask_words(vocab_size))
    if masks.shape != shape or masks.dtype != np.uint32 or not masks.flags.c_contiguous:
        raise ValueError(f"masks {list(masks.shape)} are {masks.dtype}; expected {list(shape)} uint32 side by side")


_of_thread = threading.local()


def scratch(vocab_size: int) -> int | None:
    """Return the address of scratch memory for one row, per thread."""
    rooms: dict[int, np.ndarray] = _of_thread.__dict__.setdefault("rooms", {})
    if vocab_size not in rooms:
        rooms[vocab_size] = np.empty(kernels().sampling_scratch_size(vocab_size), dtype=np.uint8)
    return address_of(rooms[vocab_size])


@functools.cache
def kernels() -> ctypes.CDLL:
    """Return the compiled kernels. Raises KernelError if there are none."""
    if (variant := chosen_variant()) is None:
        raise KernelError("no kernels were compiled here; install swiftbatch anew, with a C compiler")
    library = load_library(variant)
    for name, (result, arguments) in SIGNATURES.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


# Walks and candidates in C (source/sampling.c), which sample the same tokens as worker/sampling/sampler.py.


class NativeSampler:
    """Samples one sequence's tokens; it reads earlier tokens from the sequence."""

    def __init__(self, sequence: Sequence, adjusted: NativeAdjustments | None = None) -> None:
        """For a fork, `adjusted` is that of the original sequence. Raises ValueError as `NativeAdjustments` does."""
        params = sequence.sampling
        self.sequence = sequence
        self._params = sampling_params(params, sequence.noise_key)
        self._counts = np.zeros(sequence.vocab_size, dtype=np.int32) if params.repetition_penalty != 1.0 else None
        self._window = CPenaltyWindow(address_of(self._counts), sequence.vocab_size, params.penalty_window, 0)
        self._adjusted = (adjusted or NativeAdjustments(sequence)) if adjusts(params) else None
        self._call = CTreeWalk(
            params=ctypes.addressof(self._params),
            penalties=ctypes.addressof(self._window),
            adjusted=ctypes.addressof(self._adjusted.call) if self._adjusted else None,
        )

    def fork(self, sequence: Sequence) -> NativeSampler:
        """Return a sampler for a draft's fork of the sequence."""
        counts = self.counts()  # counted once here, so that later forks need not count again
        fork = NativeSampler(sequence, self._adjusted.fork() if self._adjusted else None)
        if fork._counts is not None and counts is not None:
            fork._counts[:] = counts
            fork._window.num_counted = self._window.num_counted
        return fork

    def counts(self) -> np.ndarray | None:
        """Return each token's count in the penalty window, `[vocab] int32`, or None without a repetition penalty."""
        token_ids = self.sequence.token_ids
        self._check_grown()
        if self._counts is not None:
            kernels().sampling_follow(ctypes.addressof(self._window), address_of(token_ids), len(token_ids))
        if self._adjusted is not None:
            self._adjusted.follow(token_ids)
        return self._counts

    def context(self) -> Context:
        """Return what the next token depends on beside its logits; its tensors change with the sequence."""
        counts = self.counts()
        seen = None if counts is None else torch.from_numpy(counts > 0)
        if (adjusted := self._adjusted) is None:
            return Context(seen=seen)
        output = None if adjusted.counts is None else torch.from_numpy(adjusted.counts)
        return Context(adjusted.bias, masked_behind(self.sequence), seen, output)

    def _check_grown(self) -> None:
        num_counted = self._window.num_counted
        if self._adjusted is not None:
            num_counted = max(num_counted, self._adjusted.call.output.num_counted)
        if len(self.sequence) < num_counted:
            raise ValueError(
                f"sequence {self.sequence.sequence_id} has {len(self.sequence)} tokens; expected at least the "
                f"{num_counted} that its sampler has seen"
            )

    def walk_call(
        self, tree: DraftTree, logits: torch.Tensor, masks: np.ndarray | None = None
    ) -> tuple[CTreeWalk, np.ndarray]:
        """Return the struct of one tree's walk, and the array that holds its inputs and results."""
        self._check_grown()
        num_nodes, token_ids = len(tree), self.sequence.token_ids
        check_logits(logits, (num_nodes + 1, self.sequence.vocab_size))
        if masks is not None:
            check_masks(masks, num_nodes + 1, self.sequence.vocab_size)
        room = np.empty((4, num_nodes + 1), dtype=np.int64)
        room[:2, :num_nodes] = tree.token_ids, tree.parents
        walk, start, row_bytes = self._call, address_of(room) or 0, room.strides[0]
        walk.logits, walk.row_stride = logits.data_ptr(), logits.stride(0)
        walk.num_nodes, walk.node_ids, walk.parents = num_nodes, start, start + row_bytes
        walk.drawn, walk.path = start + 2 * row_bytes, start + 3 * row_bytes
        walk.token_ids, walk.length = address_of(token_ids), len(token_ids)
        walk.masks = address_of(masks)
        return walk, room


def walk(
    samplers: Many[NativeSampler],
    trees: Many[DraftTree],
    logits: Many[torch.Tensor],
    masks: Many[np.ndarray | None] = (),
) -> list[Walk]:
    """Walk each tree from its root along the drawn tokens, as `draft_tree.py` does.

    `logits[i] [1 + num_nodes, vocab] float32` on the CPU, row 0 the root's. A walk stops before a row from which
    nothing can be drawn. Raises ValueError for unfit shapes.
    """
    if not samplers:
        return []
    vocab_size = samplers[0].sequence.vocab_size
    if any(sampler.sequence.vocab_size != vocab_size for sampler in samplers):
        raise ValueError(f"sequences have different vocabularies; expected {vocab_size} tokens in all")
    given = zip(samplers, trees, logits, masks or [None] * len(trees), strict=True)
    made = [sampler.walk_call(tree, rows, words) for sampler, tree, rows, words in given]
    walks = (CTreeWalk * len(made))(*(walk for walk, _ in made))
    kernels().sampling_walk(walks, len(made), vocab_size, scratch(vocab_size))
    return [_outcome(walk, room) for walk, (_, room) in zip(walks, made, strict=True)]


def logprobs(
    sampler: NativeSampler,
    tree: DraftTree,
    logits: torch.Tensor,
    walked: Walk,
    num_top: int,
    mode: LogprobsMode,
    mask: np.ndarray | None = None,
) -> TokenLogprobs:
    """Return the log-probabilities of a walk's tokens, before the sequence has them."""
    call, room = sampler.walk_call(tree, logits, mask)
    call.num_drawn = len(walked.drawn)
    room[2, : len(walked.drawn)], room[3, : len(walked.path)] = walked.drawn, walked.path
    shape, vocab_size = (len(walked.drawn), num_top), sampler.sequence.vocab_size
    found = np.empty(shape[0], np.float32), np.empty(shape, np.int32), np.empty(shape, np.float32)
    is_processed = mode == "processed_logprobs"
    kernels().sampling_logprobs(
        *(ctypes.addressof(call), vocab_size, is_processed, num_top), *map(address_of, found), scratch(vocab_size)
    )
    return TokenLogprobs.of(*found)


def top_candidates(logits: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Return ids `[num_rows, TOP_K] int64` and float32 log-probabilities of the best of `[num_rows, vocab]` logits.

    Equal logits are ordered by id.
    """
    check_logits(logits, (len(logits), logits.shape[-1]))
    num_rows, vocab_size = logits.shape
    if vocab_size < TOP_K:
        raise ValueError(f"logits of {vocab_size} tokens; expected at least {TOP_K}")
    ids, logprobs = np.empty((num_rows, TOP_K), dtype=np.int64), np.empty((num_rows, TOP_K), dtype=np.float32)
    kernels().sampling_top_candidates(
        logits.data_ptr(), num_rows, logits.stride(0), vocab_size, address_of(ids), address_of(logprobs)
    )
    return ids, logprobs


def _outcome(walk: CTreeWalk, room: np.ndarray) -> Walk:
    failed_row = walk.failed_row if walk.failed_row >= 0 else None
    return Walk(room[3, : walk.path_length].tolist(), room[2, : walk.num_drawn].tolist(), failed_row)
