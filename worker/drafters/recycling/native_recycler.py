"""Token recycling in C (source/recycling.h): the trees and the rows of worker/drafters/recycling, many times sooner.

Their bits depend on no instruction set. Other threads run while a call does.
"""

from __future__ import annotations

import ctypes
from ctypes import c_double, c_int64, c_uint64, c_void_p

import numpy as np

from swiftbatch.worker.drawing.native_calls import address_of
from swiftbatch.worker.drawing.sequence import Sequence
from swiftbatch.worker.drawing.tree import DraftTree
from swiftbatch.worker.drawing.verification import TOP_K
from swiftbatch.worker.kernels.instruction_sets import load_library

MOST_NODES = 127  # as source/recycling.h has it, and the next as well
MOST_CANDIDATES = 16


class CCandidateRows(ctypes.Structure):
    """`candidate_rows` of source/recycling.h."""

    _fields_ = (("ids", c_void_p), ("logprobs", c_void_p), ("width", c_int64))


class CRecyclingTables(ctypes.Structure):
    """`recycling_tables` of source/recycling.h."""

    _fields_ = (
        ("tokens", CCandidateRows),
        ("pairs", CCandidateRows),
        ("pair_keys", c_void_p),
        ("pair_bits", c_int64),
        ("vocab", c_int64),
        ("new_share", c_double),
        ("pair_share", c_double),
    )


class CCandidateRanking(ctypes.Structure):
    """`candidate_ranking` of source/recycling.h."""

    _fields_ = (("seed", c_uint64), *((name, c_double) for name in ("noise_scale", "spread", "floor")))


class NativeRecycling:
    """Grows trees from arrays of candidates and writes to them. The arrays stay the caller's, who may change them."""

    def __init__(
        self,
        tokens: tuple[np.ndarray, np.ndarray],
        pairs: tuple[np.ndarray, np.ndarray],
        pair_keys: np.ndarray,
        shares: tuple[float, float],
        variant: str,
    ) -> None:
        """`tokens`, `pairs`: ids `[num_rows, width] int32`, from 0 to below the vocabulary, and log-probabilities.

        `pair_keys [num_rows] int64`; `shares` of the new probabilities in an average, and of a pair's row. Raises
        ValueError for arrays that do not fit, KernelError where the library does not load.
        """
        rows = _candidate_rows("tokens", *tokens), _candidate_rows("pairs", *pairs)
        num_pairs = len(pairs[0])
        _check("pair keys", pair_keys, (num_pairs,), np.int64)
        if num_pairs & (num_pairs - 1) or num_pairs < 2:
            raise ValueError(f"{num_pairs} rows for pairs; expected a power of two")
        self._vocab_size = len(tokens[0])
        self._arrays = tokens, pairs, pair_keys  # as long as C knows where they lie
        self._tables = CRecyclingTables(
            *rows, address_of(pair_keys), num_pairs.bit_length() - 1, self._vocab_size, *shares
        )
        self._address = ctypes.addressof(self._tables)
        self._library = load_library(variant)

    def grow(
        self, sequence: Sequence, ranking: tuple[float, float, float], max_nodes: int, max_depth: int
    ) -> DraftTree:
        """The best-first tree behind a sequence, of at most `MOST_NODES` nodes.

        `ranking`: what noise is multiplied with, the spread of the guesses and the floor below the best of them, as in
        worker/drafters/ranking.py.
        """
        length, token_ids = len(sequence), sequence.token_ids
        previous, token = int(token_ids[max(length - 2, 0)]), int(token_ids[-1])
        if not (0 <= previous < self._vocab_size and 0 <= token < self._vocab_size):
            raise ValueError(f"sequence ends with {previous}, {token}; expected tokens below {self._vocab_size}")
        most = max(0, min(max_nodes, MOST_NODES))
        room = np.empty((2, most), dtype=np.int64)
        start, how = address_of(room) or 0, CCandidateRanking(sequence.sampling.seed or 0, *ranking)
        num_nodes = self._library.recycling_grow(
            *(self._address, ctypes.addressof(how), previous, token, length),
            *(most, max_depth, start, start + room.strides[0]),
        )
        return DraftTree(*room[:, :num_nodes].tolist())

    def write(
        self,
        token_ids: np.ndarray,
        top_ids: np.ndarray,
        top_logprobs: np.ndarray,
        text_rows: np.ndarray,
        previous_ids: np.ndarray,
    ) -> None:
        """Take in candidates `[num_rows, TOP_K]` behind tokens `[num_rows]`; where one comes twice, the last counts.

        Those of `text_rows` stand behind `previous_ids` in a text. Raises ValueError for arrays that do not fit.
        """
        num_rows, num_text_rows = len(token_ids), len(text_rows)
        tokens = _fitting("tokens", token_ids, (num_rows,), np.int64)
        ids = _fitting("candidates", top_ids, (num_rows, TOP_K), np.int64)
        logprobs = _fitting("log-probabilities", top_logprobs, (num_rows, TOP_K), np.float32)
        rows = _fitting("rows of a text", text_rows, (num_text_rows,), np.int64)
        previous = _fitting("previous tokens", previous_ids, (num_text_rows,), np.int64)
        places = np.empty(num_text_rows, dtype=np.int64)
        has_written = self._library.recycling_write(
            *(self._address, address_of(tokens), address_of(ids), address_of(logprobs), num_rows),
            *(address_of(rows), address_of(previous), num_text_rows, address_of(places)),
        )
        if not has_written:
            raise ValueError(f"candidates name tokens outside the {self._vocab_size}, or rows outside the {num_rows}")


def _candidate_rows(name: str, ids: np.ndarray, logprobs: np.ndarray) -> CCandidateRows:
    width = ids.shape[-1]
    _check(f"{name}' ids", ids, (len(ids), width), np.int32)
    _check(f"{name}' log-probabilities", logprobs, ids.shape, np.float32)
    if not TOP_K <= width <= MOST_CANDIDATES:
        raise ValueError(f"{name}' rows hold {width} candidates; expected {TOP_K} to {MOST_CANDIDATES}")
    return CCandidateRows(address_of(ids), address_of(logprobs), width)


def _fitting(name: str, array: np.ndarray, shape: tuple[int, ...], dtype: type) -> np.ndarray:
    """An array with its numbers side by side, as `dtype`."""
    made: np.ndarray = np.ascontiguousarray(array, dtype=dtype)
    _check(name, made, shape, dtype)
    return made


def _check(name: str, array: np.ndarray, shape: tuple[int, ...], dtype: type) -> None:
    if array.shape != shape or array.dtype != dtype or not array.flags.c_contiguous:
        found = f"{array.dtype} {list(array.shape)}"
        raise ValueError(f"{name} are {found}; expected {np.dtype(dtype)} {list(shape)} side by side")
