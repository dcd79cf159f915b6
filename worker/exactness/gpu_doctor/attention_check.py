"""Checks of attention over an arena of noise: rows' bits are their own and right, and reading is fast."""

from __future__ import annotations

import random
from dataclasses import replace

import torch
from torch import Tensor

from swiftbatch.worker.exactness.forward_comparisons import random_tree
from swiftbatch.worker.exactness.gpu_doctor.findings import Finding, Row, differing_bits
from swiftbatch.worker.exactness.gpu_doctor.model_under_test import Parts
from swiftbatch.worker.forward.tile_packing import SequenceRows, max_tree_depth, tree_rows
from swiftbatch.worker.kernels.cuda.attention_backends import ATTENTION_KERNELS, new_attention, shape_of
from swiftbatch.worker.kernels.cuda.cuda_graph import Upload
from swiftbatch.worker.kernels.cuda.cuda_row_table import TableLayout
from swiftbatch.worker.kernels.cuda.mla_kernels import MLAShape
from swiftbatch.worker.kernels.cuda.tree_attention import KeptLayer
from swiftbatch.worker.kernels.gpu_kernel_choice import DEFAULT_KERNELS
from swiftbatch.worker.kernels.kernel_sizes import BLOCK, NUM_ROWS, ROW_CHOICES
from swiftbatch.worker.kv.full_cache import FullKVCache
from swiftbatch.worker.sampling.draft_tree import DraftTree

MOST_ERROR = {torch.bfloat16: 0.02, torch.float32: 1e-5}  # relative to the greatest number of a row
TIMED_ROWS = (1, 4, 16)
Placed = tuple[SequenceRows, int]
SHORTER = 37  # positions from one slot's cache to the next


def check_attention(parts: Parts) -> Finding:
    """Compare trees after prefixes of all lengths, over one and several slots, with each row alone."""
    lengths = attended_lengths(parts)
    layer = OneLayer(parts, max(parts.extent.slot_counts), lengths[-1])
    rng = random.Random(0)
    rows = [_compared(parts, layer, rng, length) for length in lengths]
    differing, tried = (sum(int(row[name]) for row in rows) for name in ("differing", "tried"))
    error = max(float(row["error"]) for row in rows)
    bound = MOST_ERROR[parts.dtype]
    words = f"{differing_bits(differing, tried, 'rows')} from the row alone; error {error:.2g}, {bound:g} is allowed"
    return Finding(passed=differing == 0 and error <= bound, words=words, rows=rows)


def check_attention_speed(parts: Parts) -> Finding:
    """Time the reading of keys and values, of few long jobs and of many mixed ones; slowness is not a failure.

    Where flash-attn is tested, Triton's attention is timed beside it.
    """
    rows, words = list[Row](), list[str]()
    for name in dict.fromkeys((parts.kernels.attention, DEFAULT_KERNELS.attention)):
        few, many = _speeds(parts.with_kernels(replace(parts.kernels, attention=name)))
        best, of_many = (max(float(row["GB/s"]) for row in part) for part in (few, many))
        words.append(f"{name} reads keys and values at up to {best:,.1f} GB/s, of many mixed jobs at {of_many:,.1f}")
        rows += [{"attention": name} | row for row in (*few, *many)]
    return Finding(passed=True, words="; ".join(words), rows=rows)


def _speeds(parts: Parts) -> tuple[list[Row], list[Row]]:
    """Time few long jobs, then many mixed ones."""
    rng, longest, extent = random.Random(1), attended_lengths(parts)[-1], parts.extent
    layer = OneLayer(parts, max(extent.slot_counts), longest)
    few = [
        _timed(parts, layer, layer.placed(rng, longest, num_slots, num_slots * num_rows))
        for num_slots in extent.slot_counts
        for num_rows in TIMED_ROWS
    ]
    many, mixed = list[Row](), min(longest, extent.mixed_length)
    for num_slots in extent.many_slots:
        wide = parts.with_rows(next(number for number in ROW_CHOICES if number >= num_slots))
        layer = OneLayer(wide, num_slots, mixed)
        many.append(_timed(wide, layer, layer.placed(rng, mixed, num_slots, num_slots, shorter=mixed // num_slots)))
    return few, many


def _timed(parts: Parts, layer: OneLayer, placed: list[Placed]) -> Row:
    num_rows = sum(len(rows) for rows, _ in placed)
    layer.attended(layer.random_query(1)[:num_rows], placed)
    seconds, num_bytes = parts.seconds(layer.attend), prefix_bytes(parts, placed)
    longest = max(rows.cache.length for rows, _ in placed)
    row: Row = {"length": longest, "slots": len(placed), "rows": num_rows}
    return row | {"ms": 1000 * seconds, "GB/s": num_bytes / seconds / 1e9}


def attended_lengths(parts: Parts) -> list[int]:
    longest = parts.files.max_positions
    return sorted({min(length, longest) for length in parts.extent.lengths})


def _compared(parts: Parts, layer: OneLayer, rng: random.Random, length: int) -> Row:
    differing, tried, error = 0, 0, 0.0
    for num_slots in parts.extent.slot_counts:
        for num_rows in _row_counts(parts):
            if num_rows < num_slots:
                continue
            placed = layer.placed(rng, length, num_slots, num_rows)
            found, among, worst = _against_alone(layer, placed, rng.randrange(2**31))
            differing, tried, error = differing + found, tried + among, max(error, worst)
    return {"length": length, "tried": tried, "differing": differing, "error": error}


def _row_counts(parts: Parts) -> tuple[int, ...]:
    counts, most = parts.extent.row_counts, parts.kernels.num_rows
    return counts if most == NUM_ROWS else (*counts, most)


def _against_alone(layer: OneLayer, placed: list[Placed], seed: int) -> tuple[int, int, float]:
    """Return differing rows, all rows, and the greatest relative error of last rows."""
    num_rows = sum(len(rows) for rows, _ in placed)
    query = layer.random_query(seed)[:num_rows]
    together = layer.attended(query, placed)
    differing, error, start = 0, 0.0, 0
    for rows, slot in placed:
        for row in range(len(rows)):
            alone = layer.attended(query[start + row : start + row + 1], [(rows.part(row, row + 1), slot)])
            differing += not torch.equal(alone[0], together[start + row])  # NaN differs from itself
        exact = layer.exact(query[start + row], rows, row)
        distance = (together[start + row].double() - exact).abs().max() / exact.abs().max()
        error = max(error, float(distance.nan_to_num(torch.inf)))
        start += len(rows)
    return differing, num_rows, error


def prefix_bytes(parts: Parts, placed: list[Placed]) -> int:
    return sum(rows.boundary for rows, _ in placed) * parts.cache_shape(num_layers=1).bytes_per_position()


class OneLayer:
    """Kernels, buffers and caches as in a whole model."""

    def __init__(self, parts: Parts, num_slots: int, longest: int) -> None:
        self._parts, sizes = parts, parts.sizes
        self.arena = parts.arena(num_slots, longest, num_layers=1)
        self.arena.buffer.normal_(generator=parts.generator(4))
        num_rows = parts.kernels.num_rows
        shape = shape_of(sizes, num_rows)
        shape = shape.seeing_all() if isinstance(shape, MLAShape) else shape
        capacity, pages = self.arena.capacity, self.arena.pages
        table = (num_slots, capacity, shape.rows_per_group, capacity, sizes.vocab)
        self._layout = TableLayout(*table, page=None if pages is None else pages.page, num_rows=num_rows)
        self._buffer = torch.zeros(self._layout.size, dtype=torch.int32, device=parts.device)
        self._upload = Upload(self._buffer)
        self._table = self._layout.table(self._buffer)
        kernel = ATTENTION_KERNELS[parts.kernels.attention]
        self.attention = new_attention(kernel, shape, self._layout, sizes.scale, parts.device)
        self._value_dim = (sizes.value_dim or sizes.head_dim) if sizes.latent is None else sizes.latent.rank
        self._mixed = self._rows(self._value_dim)
        self._caches = [self.arena.new_cache(longest) for _ in range(num_slots)]
        for end in range(BLOCK, longest, BLOCK):
            for cache in self._caches:  # in turn, so that pages of a slot are not contiguous
                cache.reserve(end)

    def placed(
        self, rng: random.Random, length: int, num_slots: int, num_rows: int, shorter: int = SHORTER
    ) -> list[Placed]:
        """Return trees over `num_slots` slots, each `shorter` than the last, with up to `num_rows` rows in all."""
        found = []
        for number, cache in enumerate(self._caches[:num_slots]):
            rows = self._tree(rng, cache, max(0, length - number * shorter), min(num_rows // num_slots, BLOCK))
            found.append((rows, cache.slot))
        return found

    def random_query(self, seed: int) -> Tensor:
        query = self._rows(self.attention.query.shape[-1]).float().normal_(generator=self._parts.generator(seed))
        return query.to(self._parts.dtype)

    def attended(self, query: Tensor, placed: list[Placed]) -> Tensor:
        """Attend with rows `query [num_rows, num_heads, head_dim]`; return the same shape, with NaN in unused
        memory.
        """
        self.upload(placed)
        self._mixed.fill_(torch.nan)
        self.attention.put(query, self._table)
        self.attend()
        return self._mixed[: len(query)].clone()

    def upload(self, placed: list[Placed]) -> None:
        for rows, _ in placed:
            rows.cache.reserve(rows.first_entry + len(rows))
        pages = [rows.cache.pages for rows, _ in placed]
        self._layout.fill(self._upload.buffer(), placed, pages)
        self._upload.send()

    def attend(self) -> None:
        kept = self.arena.buffer[0].expand(-1, len(self._caches), -1, -1, -1)
        self.attention.attend(0, KeptLayer(kept[0], kept[-1], pages=self.arena.pages), self._table, self._mixed)

    def exact(self, query: Tensor, rows: SequenceRows, row: int) -> Tensor:
        """Return one row's exact result `[num_heads, value_dim]` in float64."""
        length = rows.tail_lengths[row]
        tail = torch.from_numpy(rows.tail_entries[row][:length].copy()).to(query.device)
        kept = rows.cache.stored_between(0, slice(0, rows.first_entry + len(rows)))
        found = []
        for kv_head, heads in enumerate(query.double().chunk(self._parts.sizes.num_kv_heads)):
            keys, values = (torch.cat([part[kv_head, : rows.boundary], part[kv_head, tail]]).double() for part in kept)
            weights = torch.softmax(heads @ keys[:, : heads.shape[1]].t() * self._parts.sizes.scale, dim=-1)
            found.append(weights @ values[:, : self._value_dim])
        return torch.cat(found)

    def _tree(self, rng: random.Random, cache: FullKVCache, length: int, num_rows: int) -> SequenceRows:
        cache.length = length
        vocab = self._parts.sizes.vocab
        tree = random_tree(rng, num_rows - 1, max_tree_depth(length), vocab) if num_rows > 1 else DraftTree()
        return tree_rows(cache, rng.randrange(vocab), tree)

    def _rows(self, width: int) -> Tensor:
        sizes = self._parts.sizes
        heads = (self._layout.num_rows, sizes.num_heads, width)
        return torch.zeros(heads, dtype=sizes.dtype, device=self._parts.device)
