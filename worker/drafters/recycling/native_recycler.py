"""Token recycling in C (source/recycling.h), many times faster than in Python.

Results do not depend on the instruction set. Calls release the GIL.
"""

from __future__ import annotations

import ctypes
import struct
from array import array
from collections.abc import Sequence as Many
from ctypes import c_char, c_double, c_int64, c_void_p
from itertools import chain
from typing import NamedTuple

import numpy as np

from swiftbatch.worker.drafters.drafter_interface import WantedTree
from swiftbatch.worker.kernels.native_library import load_library
from swiftbatch.worker.kernels.row_tables import address_of
from swiftbatch.worker.sampling.draft_tree import TOP_K, DraftTree
from swiftbatch.worker.sampling.sequence import Sequence

MOST_NODES = 127  # as in source/recycling.h, like the next
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


TREE_GROWTH = struct.Struct("@Q3d5q")
"""`tree_growth` of source/recycling.h: noise key, scale; spread; floor; the last two tokens, length, nodes, depth."""


class TextCandidates(NamedTuple):
    """The target's candidates to follow rows of one text; if a token has several rows, the last row counts."""

    token_ids: Many[int] | np.ndarray  # [num_rows]
    top_ids: np.ndarray  # [num_rows, TOP_K] int64
    top_logprobs: np.ndarray  # [num_rows, TOP_K] float32
    text_rows: Many[int] | np.ndarray  # [num_text_rows] the rows that stand in the text
    previous_ids: Many[int] | np.ndarray  # [num_text_rows] the tokens in front of them, for pairs


class NativeRecycling:
    """Grows trees from the caller's arrays and writes to them, in C; the caller may change them in between."""

    def __init__(
        self,
        tokens: tuple[np.ndarray, np.ndarray],
        pairs: tuple[np.ndarray, np.ndarray],
        pair_keys: np.ndarray,
        shares: tuple[float, float],
        variant: str,
    ) -> None:
        """`tokens`, `pairs`: ids `[num_rows, width] int32` below the vocabulary size, and log-probabilities.

        `pair_keys [num_rows] int64`; `shares`: weight of new probabilities in an average, and of a pair's row. Raises
        ValueError for arrays that do not fit, KernelError if the library does not load.
        """
        rows = _candidate_rows("tokens", *tokens), _candidate_rows("pairs", *pairs)
        num_pairs = len(pairs[0])
        _check("pair keys", pair_keys, (num_pairs,), np.int64)
        if num_pairs & (num_pairs - 1) or num_pairs < 2:
            raise ValueError(f"{num_pairs} rows for pairs; expected a power of two")
        self._vocab_size = len(tokens[0])
        self._arrays = tokens, pairs, pair_keys  # C keeps pointers to them
        self._tables = CRecyclingTables(
            *rows, address_of(pair_keys), num_pairs.bit_length() - 1, self._vocab_size, *shares
        )
        self._address = ctypes.addressof(self._tables)
        self._library = load_library(variant)

    def grow(self, wanted: Many[WantedTree], rankings: Many[tuple[float, float, float]]) -> list[DraftTree]:
        """Grow one best-first tree after each sequence, of at most `MOST_NODES` nodes.

        `rankings`: noise factor, spread and floor, as in worker/drafters/ranking.py.
        """
        growths, most = bytearray(TREE_GROWTH.size * len(wanted)), list[int]()
        for number, ((sequence, max_nodes, max_depth), ranking) in enumerate(zip(wanted, rankings, strict=True)):
            room = max(0, min(max_nodes, MOST_NODES))
            ending = self._end_of(sequence)
            TREE_GROWTH.pack_into(
                growths, number * TREE_GROWTH.size, sequence.noise_key, *ranking, *ending, room, max_depth
            )
            most.append(room)
        num_nodes = sum(most)
        found = (c_int64 * (2 * num_nodes + len(most)))()  # tokens, parents, sizes; numpy arrays take longer to make
        parents = ctypes.addressof(found) + 8 * num_nodes
        self._library.recycling_grow(
            *(self._address, (c_char * len(growths)).from_buffer(growths), len(most)),
            *(found, parents, parents + 8 * num_nodes),
        )
        numbers, trees, first = found[:], list[DraftTree](), 0
        for count, room in zip(numbers[2 * num_nodes :], most, strict=True):
            behind = num_nodes + first
            trees.append(DraftTree(numbers[first : first + count], numbers[behind : behind + count]))
            first += room
        return trees

    def _end_of(self, sequence: Sequence) -> tuple[int, int, int]:
        """Return a sequence's last two tokens and its length; a single token is returned twice."""
        previous, token = sequence.last_token_ids
        if not (0 <= previous < self._vocab_size and 0 <= token < self._vocab_size):
            raise ValueError(f"sequence ends with {previous}, {token}; expected tokens below {self._vocab_size}")
        return previous, token, len(sequence)

    def write(self, texts: Many[TextCandidates]) -> None:
        """Write the candidates that a step or a prefill found for some texts, in order.

        Raises ValueError for arrays that do not fit; texts before the faulty one are already written.
        """
        all_ids, all_top, all_logprobs, all_text_rows, all_previous = zip(*texts, strict=True)
        num_rows, num_text_rows = list(map(len, all_ids)), list(map(len, all_text_rows))
        shape, num_in_texts = (sum(num_rows), TOP_K), sum(num_text_rows)
        tokens = _longs("tokens", all_ids, shape[0])
        ids = _fitting("candidates", all_top, shape, np.int64)
        logprobs = _fitting("log-probabilities", all_logprobs, shape, np.float32)
        rows = _longs("rows of a text", all_text_rows, num_in_texts)
        previous = _longs("previous tokens", all_previous, num_in_texts)
        sizes = array("q", chain.from_iterable(zip(num_rows, num_text_rows, strict=True)))
        room = array("q", bytes(8 * num_in_texts))
        num_written = self._library.recycling_write(
            *(self._address, tokens.buffer_info()[0], address_of(ids), address_of(logprobs)),
            *(each.buffer_info()[0] for each in (rows, previous, sizes)),
            *(len(texts), room.buffer_info()[0]),
        )
        if num_written < len(texts):
            of_text = num_rows[num_written]
            raise ValueError(f"candidates name tokens outside the {self._vocab_size}, or rows outside the {of_text}")


def _longs(name: str, parts: Many[Many[int] | np.ndarray], count: int) -> array[int]:
    """Join the integers of several texts for C. Numpy would take longer to convert lists."""
    if isinstance(parts[0], np.ndarray):  # then all parts are arrays
        return array("q", _fitting(name, [np.asarray(part) for part in parts], (count,), np.int64).tobytes())
    numbers = array("q", [*chain.from_iterable(parts)])
    if len(numbers) != count:
        raise ValueError(f"{name} are {len(numbers)}; expected {count}")
    return numbers


def _candidate_rows(name: str, ids: np.ndarray, logprobs: np.ndarray) -> CCandidateRows:
    width = ids.shape[-1]
    _check(f"{name}' ids", ids, (len(ids), width), np.int32)
    _check(f"{name}' log-probabilities", logprobs, ids.shape, np.float32)
    if not TOP_K <= width <= MOST_CANDIDATES:
        raise ValueError(f"{name}' rows hold {width} candidates; expected {TOP_K} to {MOST_CANDIDATES}")
    return CCandidateRows(address_of(ids), address_of(logprobs), width)


def _fitting(name: str, parts: Many[np.ndarray], shape: tuple[int, ...], dtype: type) -> np.ndarray:
    """Join the texts' arrays as `dtype`; a single one is not copied."""
    joined = parts[0] if len(parts) == 1 else np.concatenate(parts)
    made: np.ndarray = np.ascontiguousarray(joined, dtype=dtype)
    _check(name, made, shape, dtype)
    return made


def _check(name: str, array: np.ndarray, shape: tuple[int, ...], dtype: type) -> None:
    if array.shape != shape or array.dtype != dtype or not array.flags.c_contiguous:
        found = f"{array.dtype} {list(array.shape)}"
        raise ValueError(f"{name} are {found}; expected {np.dtype(dtype)} {list(shape)} side by side")
