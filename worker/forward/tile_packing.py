"""Rows of a forward: roots and draft nodes of sequences, packed into tiles.

Three rules make rows exact. Tiles have at most `TILE_ROWS` rows. Attention is split at the last `BLOCK` boundary at or
below the query's position. Later keys are gathered per row into a window of fixed width.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from collections.abc import Sequence as Many
from dataclasses import dataclass
from itertools import chain
from typing import ClassVar

import numpy as np
import torch

from swiftbatch.worker.kernels.kernel_sizes import BLOCK, FEWEST_COLUMNS, MIN_ROWS, TILE_ROWS
from swiftbatch.worker.kernels.native_library import chosen_library
from swiftbatch.worker.kernels.row_tables import address_of
from swiftbatch.worker.kv.full_cache import FullKVCache
from swiftbatch.worker.sampling.draft_tree import ROOT, DraftTree

PLACES = np.arange(BLOCK)
TAILS = np.tril(np.broadcast_to(PLACES, (BLOCK + 1, BLOCK)), -1)  # tails by length; padding repeats the first entry


@dataclass(slots=True)
class SequenceRows:
    """Consecutive rows of one sequence within one block of positions.

    The class is not frozen: that would double its creation time, and forwards wait for it.
    """

    cache: FullKVCache
    token_ids: list[int]  # [num_rows]
    positions: list[int]  # [num_rows] in the table of angles, from the cache's `first_angle` on
    first_entry: int  # cache entry of the first row; the others follow
    boundary: int  # positions below it are the prefix of all rows
    tail_entries: np.ndarray  # [num_rows, BLOCK] cache entries of the keys from the boundary on, in position order
    tail_lengths: list[int]  # [num_rows] how many of them are real
    biases: ClassVar[None] = None  # a full cache adds nothing to scores
    scanned: ClassVar[None] = None  # a full cache is read exactly
    is_partial: ClassVar[bool] = False

    def __len__(self) -> int:
        return len(self.token_ids)

    def part(self, start: int, end: int) -> SequenceRows:
        """Return rows `start` to `end`."""
        return SequenceRows(
            self.cache,
            self.token_ids[start:end],
            self.positions[start:end],
            self.first_entry + start,
            self.boundary,
            self.tail_entries[start:end],
            self.tail_lengths[start:end],
        )


def max_tree_depth(root_position: int) -> int:
    """Return the depth of the next boundary; deeper nodes would have another prefix than their root."""
    return BLOCK - 1 - root_position % BLOCK


def tree_rows(cache: FullKVCache, root_id: int, tree: DraftTree) -> SequenceRows:
    """Return rows that verify `tree` below the last committed token."""
    return rows_of_trees([cache], [root_id], [tree])[0]


def rows_of_trees(
    caches: Many[FullKVCache], root_ids: Many[int], trees: Many[DraftTree], num_ahead: int = 0
) -> list[SequenceRows]:
    """Return rows as `tree_rows` does, for several sequences, `num_ahead` positions after each."""
    roots = [cache.length + num_ahead for cache in caches]
    starts = [root // BLOCK * BLOCK for root in roots]
    entries, lengths = tails(starts, roots, trees)
    made, row = list[SequenceRows](), 0
    for cache, root_id, tree, root, start in zip(caches, root_ids, trees, roots, starts, strict=True):
        end = row + 1 + len(tree.token_ids)
        own, before = lengths[row:end], cache.first_angle + start - 1
        positions = [before + length for length in own] if tree.token_ids else [before + own[0]]
        made.append(SequenceRows(cache, [root_id, *tree.token_ids], positions, root, start, entries[row:end], own))
        row = end
    return made


def tails(starts: Many[int], roots: Many[int], trees: Many[DraftTree]) -> tuple[np.ndarray, list[int]]:
    """Return entries `[num_rows, BLOCK]` from each `start` to each row of a tree, and their number without padding.

    A tree's root is entry `root`, and its nodes follow. A row sees its ancestors; padding repeats `start`. The compiled
    kernels raise ValueError if a parent follows its node or a path is too long.
    """
    if (library := chosen_library()) is None:
        return tails_in_python(starts, roots, trees)
    all_parents = [tree.parents for tree in trees]
    given = array("q", [*starts, *roots, *map(len, all_parents), *chain.from_iterable(all_parents)])
    num_trees, num_rows = len(trees), len(given) - 2 * len(trees)
    entries, lengths = np.empty((num_rows, BLOCK), dtype=np.int64), array("q", bytes(8 * num_rows))
    numbers = [given.buffer_info()[0] + 8 * num_trees * part for part in range(4)]
    if not library.tree_tails(*numbers, num_trees, address_of(entries), lengths.buffer_info()[0]):
        raise ValueError(f"found trees with nodes in front of their parents, or paths that {BLOCK} entries do not hold")
    return entries, lengths.tolist()


def tails_in_python(starts: Many[int], roots: Many[int], trees: Many[DraftTree]) -> tuple[np.ndarray, list[int]]:
    """Return what `tails` does, without compiled kernels."""
    befores, lengths = list[int](), list[int]()
    places, nodes = list[int](), list[int]()
    for start, root, tree in zip(starts, roots, trees, strict=True):
        before, row = root - start + 1, len(lengths)
        befores.append(before)
        lengths.append(before)
        if not tree.parents:
            continue
        paths = {ROOT: list[int]()}
        for node, parent in enumerate(tree.parents):
            paths[node] = path = [*paths[parent], root + 1 + node]
            lengths.append(before + len(path))
            place = (row + 1 + node) * BLOCK + before
            places += range(place, place + len(path))
            nodes += path
    entries: np.ndarray = TAILS[befores] + np.array(starts)[:, None]
    entries = entries.repeat([1 + len(tree.parents) for tree in trees], axis=0)
    if places:
        entries.reshape(-1)[places] = nodes
    return entries, lengths


def row_ahead(cache: FullKVCache, token_id: int) -> SequenceRows:
    """Return the row of one token, whose tail also has the entries of later rows."""
    root, start = cache.length, cache.length // BLOCK * BLOCK
    positions, tail = [cache.first_angle + root], start + PLACES[None]
    return SequenceRows(cache, [token_id], positions, root, start, tail, [root - start + 1])


def chain_rows(cache: FullKVCache, token_ids: list[int]) -> SequenceRows:
    """Return rows of known tokens, at most up to the end of the tile."""
    num_rows = min(len(token_ids), TILE_ROWS - cache.length % TILE_ROWS)
    return tree_rows(cache, token_ids[0], DraftTree.chain(token_ids[1:num_rows]))


def known_rows(cache: FullKVCache, token_ids: list[int]) -> list[SequenceRows]:
    """Return rows of known tokens after a cache, one group per block of positions."""
    groups, start, end = [], cache.length, cache.length + len(token_ids)
    while start < end:
        boundary = start // BLOCK * BLOCK
        stop = min(end, boundary + BLOCK)
        positions = list(range(start, stop))
        lengths = [position - boundary + 1 for position in positions]
        entries = boundary + np.where(np.array(lengths)[:, None] > PLACES, PLACES, 0)  # as in `tails`
        ids = token_ids[start - cache.length : stop - cache.length]
        angles = [cache.first_angle + position for position in positions]
        groups.append(SequenceRows(cache, ids, angles, start, boundary, entries, lengths))
        start = stop
    return groups


@dataclass(frozen=True)
class Tile:
    """Up to `TILE_ROWS` rows of one forward."""

    parts: list[SequenceRows]
    num_rows: int
    num_padded_rows: int

    def token_ids(self) -> list[int]:
        ids = [token_id for part in self.parts for token_id in part.token_ids]
        return ids + [0] * (self.num_padded_rows - self.num_rows)

    def positions(self) -> list[int]:
        positions = [position for part in self.parts for position in part.positions]
        return positions + [0] * (self.num_padded_rows - self.num_rows)


def needs_whole_tiles(device_type: str, dtype: torch.dtype, num_columns: int = FEWEST_COLUMNS) -> bool:
    """Return whether a row's bits in linear layers depend on the number of rows (measured).

    On CPUs, bf16 layers of up to `TILE_ROWS` rows do not depend on it if every layer has at least `FEWEST_COLUMNS`
    columns.
    """
    return dtype == torch.float32 or device_type != "cpu" or num_columns < FEWEST_COLUMNS


def pack_tiles(groups: list[SequenceRows], pad_rows: bool, tile_rows: int = TILE_ROWS) -> Iterator[Tile]:
    """Fill tiles with all rows in order. Tiles are padded to `tile_rows` if `pad_rows`, otherwise to `MIN_ROWS`."""
    parts: list[SequenceRows] = []
    num_rows = 0
    for group in groups:
        start = 0
        while start < len(group):
            end = min(len(group), start + tile_rows - num_rows)
            parts.append(group.part(start, end))
            num_rows += end - start
            start = end
            if num_rows == tile_rows:
                yield Tile(parts, num_rows, tile_rows)
                parts, num_rows = [], 0
    if parts:
        yield Tile(parts, num_rows, tile_rows if pad_rows else max(num_rows, MIN_ROWS))


def tail_mask(lengths: list[int], num_unseen: list[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return an additive mask `[num_rows, 1, 1, BLOCK]` of tails from `num_unseen` to their lengths."""
    places = torch.arange(BLOCK, device=device)
    ends, starts = (torch.tensor(each, device=device)[:, None] for each in (lengths, num_unseen))
    is_used = (starts <= places) & (places < ends)
    return torch.zeros_like(is_used, dtype=dtype).masked_fill_(~is_used, float("-inf"))[:, None, None]
