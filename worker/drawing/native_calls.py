"""The functions of source/sampling.h as Python calls them: their structs and arguments, and what is checked first."""

from __future__ import annotations

import copy
import ctypes
import functools
import threading
from ctypes import c_bool, c_float, c_int64, c_uint64, c_void_p
from typing import TYPE_CHECKING

import numpy as np
import torch

from swiftbatch.jobs.sampling import SamplingParams
from swiftbatch.worker.drawing.adjustments import (
    bias_pairs,
    bias_row,
    counts_output,
    ending_tokens,
    long_words,
    output_penalties,
)
from swiftbatch.worker.drawing.filters.filter_list import NUMBERS, filter_numbers
from swiftbatch.worker.drawing.token_rules import num_mask_words
from swiftbatch.worker.kernels.addresses import address_of
from swiftbatch.worker.kernels.instruction_sets import KernelError, chosen_variant, load_library

if TYPE_CHECKING:
    from swiftbatch.worker.drawing.sequence import Sequence

SIGNATURES = {
    "sampling_scratch_size": (c_int64, (c_int64,)),
    "sampling_walk": (None, (c_void_p, c_int64, c_int64, c_void_p)),
    "sampling_logprobs": (None, (c_void_p, c_int64, c_bool, c_int64, c_void_p, c_void_p, c_void_p, c_void_p)),
    "sampling_draw": (c_int64, (c_void_p, c_int64, c_int64, c_void_p, c_void_p, c_void_p, c_void_p)),
    "sampling_follow": (None, (c_void_p, c_void_p, c_int64)),
    "sampling_noise": (None, (c_uint64, c_void_p, c_void_p, c_int64, c_void_p)),
    "sampling_noise_row": (None, (c_uint64, c_int64, c_int64, c_void_p)),
    "sampling_top_candidates": (None, (c_void_p, c_int64, c_int64, c_int64, c_void_p, c_void_p)),
}
ALL_TOKENS = 2**62  # as a window
MAX_VOCAB = 2**24  # counts of tokens are compared as float32


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
    """One sequence's `adjustments`, and the memory that they point into."""

    def __init__(self, sequence: Sequence) -> None:
        """Allocate for a sequence. Raises ValueError for a bias of a token that the model does not have."""
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
        """The same with counts of its own."""
        fork = copy.copy(self)
        fork.call = CAdjustments.from_buffer_copy(self.call)
        fork._banned_ids = self._banned_ids.copy()
        fork.call.banned_ids = address_of(fork._banned_ids)
        if self.counts is not None:
            fork.counts = self.counts.copy()
            fork.call.output.counts = address_of(fork.counts)
        return fork

    def follow(self, token_ids: np.ndarray) -> None:
        """Count what has come to the sequence."""
        kernels().sampling_follow(ctypes.addressof(self.call.output), address_of(token_ids), len(token_ids))


def sampling_params(params: SamplingParams, noise_key: int) -> CSamplingParams:
    """Parameters as C wants them."""
    filters = CFilterParams(*filter_numbers(params))
    return CSamplingParams(noise_key, params.temperature, params.repetition_penalty, filters)


def check_logits(logits: torch.Tensor, shape: tuple[int, ...]) -> None:
    """Raise ValueError where C would read something else than `shape`, tokens last."""
    if tuple(logits.shape) != shape or not 0 < shape[-1] <= MAX_VOCAB:
        raise ValueError(f"logits {list(logits.shape)}; expected {list(shape)}, of 1 to {MAX_VOCAB} tokens")
    if logits.dtype != torch.float32 or logits.device.type != "cpu" or (shape[-1] > 1 and logits.stride(-1) != 1):
        found = f"{logits.dtype} on {logits.device}, in steps of {list(logits.stride())}"
        raise ValueError(f"logits are {found}; expected float32 on the CPU, tokens side by side")


def check_counts(counts: np.ndarray, vocab_size: int) -> None:
    """Raise ValueError for counts that are not `[vocab] int32` side by side."""
    if counts.shape != (vocab_size,) or counts.dtype != np.int32 or not counts.flags.c_contiguous:
        raise ValueError(f"counts {list(counts.shape)} are {counts.dtype}; expected [{vocab_size}] int32 side by side")


def check_masks(masks: np.ndarray, num_rows: int, vocab_size: int) -> None:
    """Raise ValueError for masks that are not `[num_rows, num_mask_words] uint32` side by side."""
    shape = (num_rows, num_mask_words(vocab_size))
    if masks.shape != shape or masks.dtype != np.uint32 or not masks.flags.c_contiguous:
        raise ValueError(f"masks {list(masks.shape)} are {masks.dtype}; expected {list(shape)} uint32 side by side")


_of_thread = threading.local()


def scratch(vocab_size: int) -> int | None:
    """Address of room to draw from one row: this thread's own, since several may draw at once."""
    rooms: dict[int, np.ndarray] = _of_thread.__dict__.setdefault("rooms", {})
    if vocab_size not in rooms:
        rooms[vocab_size] = np.empty(kernels().sampling_scratch_size(vocab_size), dtype=np.uint8)
    return address_of(rooms[vocab_size])


@functools.cache
def kernels() -> ctypes.CDLL:
    """The compiled kernels in use. Raises KernelError where there are none."""
    if (variant := chosen_variant()) is None:
        raise KernelError("no kernels were compiled here; install swiftbatch anew, with a C compiler")
    library = load_library(variant)
    for name, (result, arguments) in SIGNATURES.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library
