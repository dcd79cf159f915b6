"""Shape of a model's caches, and their rows of keys and values in one buffer."""

from __future__ import annotations

import contextlib
import ctypes
import math
import mmap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from swiftbatch.jobs.run.run_records import KVDtype
from swiftbatch.worker.kernels.cuda.cuda_row_table import PageTable
from swiftbatch.worker.kernels.decoder_weights import DecoderWeights, cache_stripes, kept_by
from swiftbatch.worker.kernels.kernel_sizes import KV_SCALE_BYTES
from swiftbatch.worker.kernels.kv_codes import CODES, coded, numbers_of
from swiftbatch.worker.kernels.layer_specs import RecurrentSizes
from swiftbatch.worker.kv.kv_capacity import (
    MAX_TREE_NODES,
    NUM_UNWRITTEN,
    HeldPositions,
    held_positions,
    state_bytes_of,
)
from swiftbatch.worker.model.architectures.attention_layers import Windows
from swiftbatch.worker.model.architectures.recurrent_layers import RecurrentShape

HUGE = 1 << 21  # size in bytes
COLLAPSE = 25  # MADV_COLLAPSE, since Linux 6.1


def ask_for_huge_pages(buffer: torch.Tensor) -> None:
    """Ask for 2 MB pages, which the system may refuse."""
    _advise_within(buffer, _huge_advice(buffer))


def ask_for_small_pages(buffer: torch.Tensor) -> None:
    """Ask for small pages, so that parts of the memory can be returned."""
    _advise_within(buffer, getattr(mmap, "MADV_NOHUGEPAGE", None))


def give_back(buffer: torch.Tensor) -> None:
    """Return the buffer's whole pages to the system; the returned memory reads as zeros."""
    _advise_within(buffer, getattr(mmap, "MADV_DONTNEED", None))


class FilledPages:
    """Merges small pages into huge ones where a buffer `[..., capacity, head_dim]` is filled."""

    def __init__(self, buffer: torch.Tensor) -> None:
        self._row_bytes = buffer.shape[-1] * buffer.element_size()
        self._stripe_bytes = buffer.shape[-2] * self._row_bytes
        self._first, self._end = buffer.data_ptr(), buffer.data_ptr() + buffer.nbytes
        self._advice = _huge_advice(buffer)
        self._num_filled = 0

    def fill(self, num_positions: int) -> None:
        """Note that the first `num_positions` are filled."""
        if self._advice is None or (num_positions - self._num_filled) * self._row_bytes < HUGE:
            return
        for stripe in range(self._first, self._end, self._stripe_bytes):
            start = max(-(-stripe // HUGE), (stripe + self._num_filled * self._row_bytes) // HUGE) * HUGE
            size = (stripe + num_positions * self._row_bytes - start) // HUGE * HUGE
            if size > 0 and not _advise(start, size, COLLAPSE):
                _advise(start, size, self._advice)  # older systems merge them later
        self._num_filled = num_positions


def _huge_advice(buffer: torch.Tensor) -> int | None:
    return getattr(mmap, "MADV_HUGEPAGE", None) if buffer.device.type == "cpu" else None


def _advise_within(buffer: torch.Tensor, advice: int | None) -> None:
    """Advise on whole pages within a tensor."""
    start = -(-buffer.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    size = (buffer.data_ptr() + buffer.nbytes - start) // mmap.PAGESIZE * mmap.PAGESIZE
    if advice is not None and size > 0:
        _advise(start, size, advice)


def _advise(start: int, size: int, advice: int) -> bool:
    return bool(ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(size), advice) == 0)


NO_SLOT = -1
NO_PAGE = -1  # a sequence's list has it in place of a page whose positions are forgotten
NUMPY_DTYPES = {  # `kv` returns these for dtypes of bits
    torch.int16: np.uint16,
    torch.float32: np.float32,
    torch.int8: np.int8,
    torch.uint8: np.uint8,
}


@dataclass(frozen=True)
class CacheShape:
    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device
    recurrent: RecurrentShape | None = None  # None: no layer has a state
    short_length: int | None = None  # longer sequences use other rotary angles; None: all use the same
    kv_dtype: KVDtype | None = None  # full caches store rows in it; None: in `dtype`
    kv_scale_bytes: int = KV_SCALE_BYTES  # a scale follows the codes of each row
    num_parts: int = 2  # a key and a value, or 1 if the value is the beginning of the key
    windows: Windows = ()  # () where no layer forgets
    stripes: tuple[int, ...] = ()  # by layer, the heads that its keys take; () if each takes `num_kv_heads`

    @classmethod
    def of(cls, weights: DecoderWeights, device: torch.device, kv_dtype: KVDtype | None = None) -> CacheShape:
        """Return the shape of a dense decoder's caches."""
        sizes, length = weights.sizes, weights.rotary.short_length
        windows = tuple(kept.window for kept in kept_by(sizes, weights.layers))
        counts = (len(windows), sizes.num_kv_heads, sizes.head_dim)
        states = states_of([layer.mixer.sizes for layer in weights.layers if layer.mixer is not None])
        forgets = any(windows) and states is None and device.type == "cpu"
        num_parts = 2 if sizes.latent is None else 1
        shape = cls(*counts, sizes.dtype, device, states, length, kv_dtype, num_parts=num_parts)
        return replace(shape, windows=windows if forgets else (), stripes=cache_stripes(sizes, weights.layers))

    @property
    def rows_size(self) -> tuple[int, int, int]:
        """Return the first sizes of a buffer. Layers with heads of their own lie side by side, as if they were one."""
        if self.stripes:
            return 1, self.num_parts, sum(self.stripes)
        return self.num_layers, self.num_parts, self.num_kv_heads

    def place(self, layer: int) -> tuple[int, slice]:
        """Return where a layer lies in a buffer: the index, and its heads."""
        if not self.stripes:
            return layer, slice(None)
        first = sum(self.stripes[:layer])
        return 0, slice(first, first + self.stripes[layer])

    def of_layers(self, layers: Sequence[int]) -> CacheShape:
        """Return the shape of caches of some layers."""
        stripes = tuple(self.stripes[each] for each in layers) if self.stripes else ()
        return replace(self, num_layers=len(layers), stripes=stripes)

    def rows_of(self, layers: Sequence[int]) -> NDArray[np.int64]:
        """Return which rows of a result of `FullKVCache.kv` are those of layers, in the order of their own buffer."""
        numbers = np.arange(math.prod(self.rows_size)).reshape(self.rows_size)
        if not self.stripes:
            return numbers[list(layers)].reshape(-1)
        heads = [numbers[index, :, heads] for index, heads in map(self.place, layers)]
        return np.concatenate(heads, axis=1).reshape(-1)

    @property
    def row_dtype(self) -> torch.dtype:
        return self.dtype if self.kv_dtype is None else CODES[self.kv_dtype]

    @property
    def row_width(self) -> int:
        return self.head_dim if self.kv_dtype is None else self.head_dim + self.kv_scale_bytes

    def kept(self, rows: torch.Tensor) -> torch.Tensor:
        """Return rows `[..., head_dim]` as full caches store them."""
        return rows if self.kv_dtype is None else coded(rows, self.row_dtype, self.kv_scale_bytes)

    def numbers(self, rows: torch.Tensor) -> torch.Tensor:
        return numbers_of(rows, self.dtype, self.head_dim)

    def first_angle(self, max_length: int) -> int:
        """Return the index of a sequence's first row in the table of rotary angles."""
        return self.short_length if self.short_length is not None and max_length > self.short_length else 0

    def state_bytes(self) -> int:
        return 0 if self.recurrent is None else state_bytes_of(self.recurrent, self.dtype.itemsize)

    def checkpointed_state_bytes(self) -> int:
        if self.recurrent is None:
            return 0
        return self.recurrent.checkpoint_bytes(self.dtype.itemsize)

    def held_positions(self, num_unwritten: int = NUM_UNWRITTEN) -> HeldPositions | None:
        """Return the positions that caches keep if checkpoints lag by `num_unwritten`, or None if they keep all."""
        return held_positions(self.windows, num_unwritten, self.stripes)

    def new_buffer(self, max_length: int) -> torch.Tensor:
        size = (*self.rows_size, max_length + MAX_TREE_NODES, self.row_width)
        return torch.empty(size, dtype=self.row_dtype, device=self.device)

    def bytes_per_position(self) -> int:
        return math.prod(self.rows_size) * self.row_width * self.row_dtype.itemsize


def states_of(layers: Sequence[RecurrentSizes]) -> RecurrentShape | None:
    """Return the common sizes of recurrent layers, or None for a model without recurrent layers."""
    if not layers:
        return None
    sizes = layers[0]
    heads = (sizes.num_heads, sizes.num_key_heads, sizes.key_dim, sizes.value_dim)
    return RecurrentShape(len(layers), *heads, sizes.num_channels, sizes.conv_width)


class CacheRows:
    """Keys and values of some layers, `buffer [*rows_size, capacity, row_width]`."""

    comes_by_layer = False  # True: memory from `layer` later holds other layers
    holds_all = False  # True: a GPU has all layers, so rows can move between entries
    slot = NO_SLOT  # number in the shared buffer
    page = 0  # positions per page; 0: rows lie in order, without pages
    pages: Sequence[int] = ()  # their numbers, in order
    page_table: PageTable | None = None  # `pages` on the device
    ranks: Sequence[CacheRows] = ()  # by GPU, if several share the heads

    def __init__(self, shape: CacheShape, buffer: torch.Tensor, is_own: bool = False) -> None:
        """`is_own`: the buffer has no other rows, and they are filled in order."""
        self.shape, self.buffer = shape, buffer
        self._filled = FilledPages(buffer) if is_own else None

    @property
    def capacity(self) -> int:
        return int(self.buffer.shape[-2])

    def reserve(self, end: int) -> None:
        """Have room for entries below `end`. Raises PagesError if the pool has no free page."""

    def cut(self, length: int) -> int:
        """Forget entries from `length` on, perhaps earlier ones as well; return how many are left."""
        return length

    def share(self, theirs: CacheRows, start: int, end: int) -> int:
        """Share whole pages with a sequence of the same tokens; return the end of the shared entries."""
        return start

    def give_back(self, start: int, end: int, first: int) -> None:
        """Free entries `[start, end)`, which no row sees; those from `first` on are lost as well."""

    def fill(self, length: int) -> None:
        if self._filled is not None:
            self._filled.fill(length)

    def layer(self, index: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.stored(index, length)

    def stored(self, index: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        number, heads = self.shape.place(index)
        return self.buffer[number, 0, heads], self.buffer[number, -1, heads]

    def stored_between(self, index: int, positions: slice, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = self.stored(index, length)
        return keys[:, positions], values[:, positions]

    def between(self, positions: slice) -> torch.Tensor:
        return self.buffer[..., positions, :]

    def write(
        self, layer: int, first_entry: int, key: torch.Tensor, value: torch.Tensor, length: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store rows as `FullKVCache.write` does."""
        self._put(layer, first_entry, key, value)
        return self.layer(layer, length)

    def move(self, root: int, path: list[int]) -> None:
        """Move the entries of a tree's nodes `path` next to its root."""
        keep_path(self.buffer, root, path)

    def kv(self, start: int, end: int) -> NDArray[Any]:
        parts = [
            self.to_host(rows).reshape(rows.shape[:-2].numel(), *rows.shape[-2:]) for _, rows in self.parts(start, end)
        ]
        bits = parts[0] if len(parts) == 1 else np.concatenate(parts, axis=1)
        return bits.view(np.uint16) if bits.dtype == np.int16 else bits

    def load(self, start: int, kv: NDArray[Any]) -> None:
        bits = kv.view(np.int16) if kv.dtype == np.uint16 else kv
        for number, rows in self.parts(start, start + kv.shape[1]):
            self.from_host(rows, bits[:, number].reshape(rows.shape))

    def copy(self, theirs: CacheRows, start: int, end: int) -> None:
        for number, own in self._pieces(start, end):
            self.buffer[..., own, :] = theirs.between(slice(start + number.start, start + number.stop))

    @contextlib.contextmanager
    def restored(self, start: int, end: int) -> Iterator[None]:
        """Restore the rows of these entries on exit."""
        again = [rows for _, rows in self.parts(start, end)]
        before = [rows.clone() for rows in again]
        try:
            yield
        finally:
            for rows, kept in zip(again, before, strict=True):
                rows.copy_(kept)

    def clear(self) -> None:
        self.buffer.zero_()

    def to_host(self, rows: torch.Tensor) -> NDArray[Any]:
        host: NDArray[Any] = rows.cpu().numpy()
        return host

    def from_host(self, rows: torch.Tensor, kv: NDArray[Any]) -> None:
        rows.copy_(torch.from_numpy(kv if kv.flags.writeable else kv.copy()))

    def parts(self, start: int, end: int) -> Iterator[tuple[slice, torch.Tensor]]:
        """Yield contiguous pieces of entries: their indices, and the bits of their rows."""
        bits = bits_of(self.buffer)
        for number, own in self._pieces(start, end):
            yield number, bits[..., own, :]

    def _pieces(self, start: int, end: int) -> Iterator[tuple[slice, slice]]:
        """Yield contiguous pieces of entries: their indices, and their offsets in the buffer."""
        yield slice(0, end - start), slice(start, end)

    def _put(self, layer: int, first_entry: int, key: torch.Tensor, value: torch.Tensor) -> None:
        index, heads = self.shape.place(layer)
        for number, own in self._pieces(first_entry, first_entry + key.shape[1]):
            for part, rows in enumerate((key, value)[: self.shape.num_parts]):
                self.buffer[index, part, heads, own] = self.shape.kept(rows[:, number])


def keep_path(buffer: torch.Tensor, root: int, path: list[int]) -> int:
    """Move the entries of a tree's nodes `path` next to its root; return the end of the kept entries.

    On a CPU numpy does it, because torch's threads would spin on cores that the next forward needs.
    """
    end = root + 1 + len(path)
    source, target = [root + 1 + node for node in path], list(range(root + 1, end))
    if source == target:
        return end
    if buffer.device.type != "cpu":
        buffer[..., target, :] = buffer[..., source, :]
        return end
    entries = bits_of(buffer).numpy()
    for old, new in zip(source, target, strict=True):  # old >= new, so each entry is moved before it is overwritten
        if old != new:
            entries[..., new, :] = entries[..., old, :]
    return end


def bits_of(buffer: torch.Tensor) -> torch.Tensor:
    return buffer.view(torch.int16) if buffer.element_size() == 2 else buffer
