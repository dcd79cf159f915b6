"""Token recycling (Luo et al. 2024): candidates of verified rows are kept in tables and drafted again."""

from __future__ import annotations

import ctypes
import math
import struct
from array import array
from collections.abc import Sequence as Many
from ctypes import c_char, c_double, c_int64, c_void_p
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import numpy as np

from swiftbatch.worker.drafters.choice.choosing_drafter import ChoosingDrafter, with_trees
from swiftbatch.worker.drafters.drafter_interface import TreeDrafter, Verified, WantedTree
from swiftbatch.worker.drafters.ranking import CandidateRanker, grow_best_first, ranking_rule
from swiftbatch.worker.forward.step_costs import Costs
from swiftbatch.worker.forward.target_model import TargetModel
from swiftbatch.worker.kernels.native_library import chosen_variant, load_library
from swiftbatch.worker.kernels.row_tables import address_of
from swiftbatch.worker.kv.full_cache import FullKVCache
from swiftbatch.worker.sampling.draft_tree import TOP_K, DraftTree, Verification
from swiftbatch.worker.sampling.sequence import Sequence

MOST_ROUNDED = 1e-3  # rounding may bring averaged log-probabilities so far above 0
UNKNOWN = -np.inf  # log-probabilities of a row that was never written


class RecyclingMatrix:
    """Candidates `ids [num_rows, width] int32` and `logprobs [num_rows, width] float32`, best first.

    Rewriting a row averages: the new probabilities have weight `new_share`.
    """

    def __init__(self, num_rows: int, width: int, new_share: float) -> None:
        self._new_share = np.float32(new_share)
        self.ids = np.zeros((num_rows, width), dtype=np.int32)
        self.logprobs = np.full((num_rows, width), UNKNOWN, dtype=np.float32)

    def row(self, index: int) -> tuple[list[int], list[float]]:
        """Return a row's candidates and log-probabilities, or empty lists if the row was never written."""
        logprobs: list[float] = self.logprobs[index].tolist()
        if logprobs[0] == UNKNOWN:
            return [], []
        num_known = len(logprobs) - logprobs.count(UNKNOWN)
        return self.ids[index].tolist()[:num_known], logprobs[:num_known]

    def write(self, rows: np.ndarray, ids: np.ndarray, logprobs: np.ndarray) -> None:
        """Write candidates `[num_rows, TOP_K]` of rows `[num_rows]`; if a row is repeated, its last entry counts."""
        old_ids, old = self.ids[rows], np.exp(self.logprobs[rows])
        share = np.where(old[:, :1] > 0, self._new_share, np.float32(1))
        same = ids[:, :, None] == old_ids[:, None, :]  # [num_rows, new, old]
        new = share * np.exp(logprobs) + (1 - share) * (same * old[:, None, :]).sum(axis=2)
        old = np.where(same.any(axis=1), np.float32(0), (1 - share) * old)  # candidates found again count above
        probabilities = np.concatenate([new, old], axis=1)
        best = np.argsort(-probabilities, axis=1, kind="stable")[:, : self.ids.shape[1]]
        with np.errstate(divide="ignore"):  # places without a candidate become -inf
            self.logprobs[rows] = np.log(np.take_along_axis(probabilities, best, axis=1))
        self.ids[rows] = np.take_along_axis(np.concatenate([ids, old_ids], axis=1), best, axis=1)

    def forget(self, rows: np.ndarray) -> None:
        self.logprobs[rows] = UNKNOWN

    def check(self, ids: np.ndarray, logprobs: np.ndarray, vocab_size: int) -> None:
        """Raise ValueError if another matrix does not fit this one."""
        for name, found, own in (("ids", ids, self.ids), ("logprobs", logprobs, self.logprobs)):
            if found.shape != own.shape or found.dtype != own.dtype:
                raise ValueError(
                    f"recycling matrix: {name} is {found.dtype} {found.shape}, expected {own.dtype} {own.shape}"
                )
        if ids.min() < 0 or ids.max() >= vocab_size:
            raise ValueError(f"recycling matrix: ids outside the vocabulary of {vocab_size} tokens")
        if np.isnan(logprobs).any() or logprobs.max() > MOST_ROUNDED or (logprobs[:, 1:] > logprobs[:, :-1]).any():
            raise ValueError("recycling matrix: found log-probabilities that are none, or not the best first")

    def load(self, ids: np.ndarray, logprobs: np.ndarray) -> np.ndarray:
        """Take over another matrix's known rows; return which were known, `[num_rows] bool`."""
        known: np.ndarray = logprobs[:, 0] > UNKNOWN
        self.ids[known] = ids[known]
        self.logprobs[known] = logprobs[known]
        return known


class PairTable:
    """Candidates to follow pairs of tokens, in a fixed number of hashed rows."""

    NUM_BITS = 15

    def __init__(self, width: int, new_share: float) -> None:
        self.matrix = RecyclingMatrix(1 << self.NUM_BITS, width, new_share)
        self.keys = np.full(1 << self.NUM_BITS, -1, dtype=np.int64)  # each row's pair

    def row(self, key: int) -> tuple[list[int], list[float]]:
        index = self._index(key)
        return self.matrix.row(index) if self.keys[index] == key else ([], [])

    def write(self, keys: list[int], ids: np.ndarray, logprobs: np.ndarray) -> None:
        """Write the candidates `[num_keys, TOP_K]` to follow some pairs."""
        # Two pairs of one call may share a row: the later takes it, so only one row may reach the matrix.
        last = {self._index(key): place for place, key in enumerate(keys)}
        rows = np.fromiter(last.keys(), dtype=np.int64, count=len(last))
        places = np.fromiter(last.values(), dtype=np.int64, count=len(last))
        new_keys = np.array(keys, dtype=np.int64)[places]
        self.matrix.forget(rows[self.keys[rows] != new_keys])
        self.keys[rows] = new_keys
        self.matrix.write(rows, ids[places], logprobs[places])

    def _index(self, key: int) -> int:
        """Hash by Fibonacci: the high bits of the product with 2^64 / golden ratio."""
        return (key * 0x9E3779B97F4A7C15 & 0xFFFFFFFFFFFFFFFF) >> (64 - self.NUM_BITS)


WIDTH = 2 * TOP_K  # candidates of an averaged row
NEW_SHARE = 0.3
PAIR_SHARE = 0.5  # weight of a pair's row beside the last token's


class RecyclingTables:
    """Rows of all tokens and some pairs; a pair is `previous * vocab_size + token`."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.tokens = RecyclingMatrix(vocab_size, WIDTH, NEW_SHARE)
        self.pairs = PairTable(TOP_K, NEW_SHARE)

    def newest_pair(self, sequence: Sequence) -> int:
        """Return the pair of a sequence's last two tokens; a single token is paired with itself."""
        token_ids = sequence.token_ids
        return int(token_ids[max(len(token_ids) - 2, 0)]) * self.vocab_size + int(token_ids[-1])

    def next_pair(self, pair: int, token_id: int) -> int:
        return pair % self.vocab_size * self.vocab_size + token_id

    def candidates(self, pair: int) -> tuple[list[int], list[float]]:
        """Return the candidates to follow a pair: ids and log-probabilities, best first."""
        return mixed(self.tokens.row(pair % self.vocab_size), self.pairs.row(pair))

    def state(self) -> dict[str, np.ndarray]:
        return {
            "recycling_ids": self.tokens.ids.copy(),
            "recycling_logprobs": self.tokens.logprobs.copy(),
            "recycling_pair_keys": self.pairs.keys.copy(),
            "recycling_pair_ids": self.pairs.matrix.ids.copy(),
            "recycling_pair_logprobs": self.pairs.matrix.logprobs.copy(),
        }

    def restore(self, state: dict[str, np.ndarray]) -> None:
        """Take over a state's known rows. Raises ValueError for arrays that do not fit."""
        missing = self.state().keys() - state.keys()
        if missing:
            raise ValueError(f"recycling matrix: the state lacks {', '.join(sorted(missing))}")
        tokens = state["recycling_ids"], state["recycling_logprobs"]
        pairs = state["recycling_pair_ids"], state["recycling_pair_logprobs"]
        keys = state["recycling_pair_keys"]
        if keys.shape != self.pairs.keys.shape or keys.dtype != self.pairs.keys.dtype:
            raise ValueError(f"recycling matrix: pair keys are {keys.dtype} {keys.shape}, expected int64")
        self.tokens.check(*tokens, self.vocab_size)
        self.pairs.matrix.check(*pairs, self.vocab_size)
        self.tokens.load(*tokens)
        known = self.pairs.matrix.load(*pairs)
        self.pairs.keys[known] = keys[known]


def mixed(
    token_row: tuple[list[int], list[float]], pair_row: tuple[list[int], list[float]]
) -> tuple[list[int], list[float]]:
    """Average a token's and a pair's candidates: ids and log-probabilities, best first."""
    if not token_row[0] or not pair_row[0]:
        return token_row if token_row[0] else pair_row
    probabilities = {token: (1 - PAIR_SHARE) * math.exp(logprob) for token, logprob in zip(*token_row, strict=True)}
    for token, logprob in zip(*pair_row, strict=True):
        probabilities[token] = probabilities.get(token, 0.0) + PAIR_SHARE * math.exp(logprob)
    best = sorted(probabilities, key=probabilities.__getitem__, reverse=True)[:TOP_K]
    return best, [math.log(probabilities[token]) for token in best]


TEXT_LOGPROB = math.log(0.6)  # of a text's own token behind those before it
MOST_READ = 256  # tokens of a text that are written at once: of those alike only the last counts
MOST_NODES = 127  # as in source/recycling.h
ROOT_ALONE = [0]  # rows in the text


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


class NativeRecycler:
    """Grows trees from tables and writes to them in C (source/recycling.h), many times faster than in Python.

    Results do not depend on the instruction set. Calls release the GIL.
    """

    def __init__(self, tables: RecyclingTables, with_noise: bool, variant: str) -> None:
        """Raise KernelError if the library does not load."""
        self._vocab_size, self._with_noise = tables.vocab_size, with_noise
        self._tables = tables  # C keeps pointers to its arrays
        self._in_c = CRecyclingTables(
            *(_rows_in_c(tables.tokens), _rows_in_c(tables.pairs.matrix), address_of(tables.pairs.keys)),
            *(PairTable.NUM_BITS, tables.vocab_size, NEW_SHARE, PAIR_SHARE),
        )
        self._address = ctypes.addressof(self._in_c)
        self._library = load_library(variant)

    def trees(self, wanted: Many[WantedTree]) -> list[DraftTree]:
        """Grow one best-first tree after each sequence, of at most `MOST_NODES` nodes."""
        growths, most = bytearray(TREE_GROWTH.size * len(wanted)), list[int]()
        for number, (sequence, max_nodes, max_depth) in enumerate(wanted):
            ranking = ranking_rule(sequence.sampling, self._with_noise)
            most.append(max(0, min(max_nodes, MOST_NODES)))
            fields = *ranking, *self._end_of(sequence), most[-1], max_depth
            TREE_GROWTH.pack_into(growths, number * TREE_GROWTH.size, sequence.noise_key, *fields)
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


def _rows_in_c(matrix: RecyclingMatrix) -> CCandidateRows:
    return CCandidateRows(address_of(matrix.ids), address_of(matrix.logprobs), matrix.ids.shape[1])


def _fitting(name: str, parts: Many[np.ndarray], shape: tuple[int, ...], dtype: type) -> np.ndarray:
    """Join the texts' arrays as `dtype`; a single one is not copied."""
    joined = parts[0] if len(parts) == 1 else np.concatenate(parts)
    made: np.ndarray = np.ascontiguousarray(joined, dtype=dtype)
    if made.shape != shape:
        raise ValueError(f"{name} are {list(made.shape)}; expected {list(shape)}")
    return made


class PythonRecycler:
    """Recycles in Python: the reference for the native one."""

    def __init__(self, tables: RecyclingTables, with_noise: bool) -> None:
        self._tables = tables
        self._with_noise = with_noise

    def trees(self, wanted: Many[WantedTree]) -> list[DraftTree]:
        return [self._tree(*each) for each in wanted]

    def _tree(self, sequence: Sequence, max_nodes: int, max_depth: int) -> DraftTree:
        ranker = CandidateRanker(sequence, self._with_noise)

        def expand(pair: int, depth: int) -> list[tuple[float, int, int]]:
            ranked = ranker.rank(depth, *self._tables.candidates(pair))
            return [(confidence, child, self._tables.next_pair(pair, child)) for confidence, child in ranked]

        return grow_best_first(self._tables.newest_pair(sequence), expand, max_nodes, max_depth)

    def write(self, texts: Many[TextCandidates]) -> None:
        for text in texts:
            token_ids, text_rows = np.asarray(text.token_ids), np.asarray(text.text_rows, dtype=np.int64)
            self._tables.tokens.write(token_ids, text.top_ids, text.top_logprobs)
            pairs = np.asarray(text.previous_ids, dtype=np.int64) * self._tables.vocab_size + token_ids[text_rows]
            self._tables.pairs.write(pairs.tolist(), text.top_ids[text_rows], text.top_logprobs[text_rows])


def create_recycler(tables: RecyclingTables, with_noise: bool) -> PythonRecycler | NativeRecycler:
    """Make the fastest recycler here. Raises KernelError for instructions that this machine lacks."""
    variant = chosen_variant()
    return PythonRecycler(tables, with_noise) if variant is None else NativeRecycler(tables, with_noise, variant)


def token_recycling(
    target: TargetModel, costs: Costs, parts_folder: Path | None, with_noise: bool = True
) -> ChoosingDrafter:
    return with_trees(TokenRecyclingDrafter(target, with_noise), costs)


class TokenRecyclingDrafter(TreeDrafter):
    """Best-first trees over averaged rows, ranked with the noise."""

    needs_top_k = True

    def __init__(self, target: TargetModel, with_noise: bool = True) -> None:
        self.tables = RecyclingTables(target.vocab_size)
        self._recycler = create_recycler(self.tables, with_noise)

    def tree(self, sequence: Sequence, max_nodes: int, max_depth: int) -> DraftTree:
        return self.trees([(sequence, max_nodes, max_depth)])[0]

    def trees(self, wanted: Many[WantedTree]) -> list[DraftTree]:
        return self._recycler.trees(wanted)

    def start(self, sequence: Sequence, cache: FullKVCache) -> None:
        self.read_text(sequence.token_ids[: sequence.num_prompt_tokens])
        vocab_size = self.tables.vocab_size
        known = [word for word in sequence.spellings if word.max() < vocab_size]  # a tokenizer may know more
        if known:
            self._recycler.write([_text_of(np.insert(word, 0, word[0]), vocab_size) for word in known])

    def read_text(self, token_ids: np.ndarray) -> None:
        """Learn the tokens of a text as candidates to follow those before them.

        The target's own candidates there would cost a prompt's logits, a quarter of its prefill, and bring no more.
        """
        for start in range(0, len(token_ids) - 2, MOST_READ):
            self._recycler.write([_text_of(token_ids[start : start + MOST_READ + 2], self.tables.vocab_size)])

    def update(self, sequence: Sequence, verification: Verification) -> None:
        self.update_all([(sequence, verification)])

    def update_all(self, verified: Many[Verified]) -> None:
        if texts := [_candidates_of(*each) for each in verified if each[1].top_ids is not None]:
            self._recycler.write(texts)
        for sequence, verification in verified:
            if verification.top_ids is None:
                self.read_text(sequence.token_ids[-len(verification.committed_ids) - 2 :])

    def state(self, sequence: Sequence) -> dict[str, np.ndarray]:
        return self.tables.state()

    def restore(self, sequence: Sequence, state: dict[str, np.ndarray]) -> None:
        self.tables.restore(state)


def _text_of(token_ids: np.ndarray, vocab_size: int) -> TextCandidates:
    """Return the token behind each pair of a text as its only known candidate."""
    top_ids = (token_ids[2:, None] + np.arange(TOP_K)) % vocab_size  # distinct; all but the first are impossible
    top_logprobs = np.full(top_ids.shape, UNKNOWN, dtype=np.float32)
    top_logprobs[:, 0] = TEXT_LOGPROB
    return TextCandidates(token_ids[1:-1], top_ids, top_logprobs, np.arange(len(top_ids)), token_ids[:-2])


def _candidates_of(sequence: Sequence, verification: Verification) -> TextCandidates:
    path, token_ids, committed = verification.path, verification.row_token_ids, verification.committed_ids
    top_ids, top_logprobs = verification.top_ids, verification.top_logprobs
    assert top_ids is not None
    assert top_logprobs is not None
    before = len(sequence) - len(committed) - 2  # tokens in front of the root
    previous = [sequence.token_id(before if before > 0 else 0)]
    if not path:
        return TextCandidates(token_ids, top_ids, top_logprobs, ROOT_ALONE, previous)
    text_rows = [0, *[node + 1 for node in path]]  # rows of tokens that stand in the text now
    previous_ids = [*previous, token_ids[0], *committed][: len(text_rows)]
    return TextCandidates(token_ids, top_ids, top_logprobs, text_rows, previous_ids)
