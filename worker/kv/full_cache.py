"""Key-value cache of one sequence: every committed position, and room behind them for one draft tree."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from swiftbatch.jobs.checkpoints.kv_segments import LayerStates
from swiftbatch.jobs.run.compute_options import KVDtype
from swiftbatch.worker.kernels.decoder_weights import DecoderWeights
from swiftbatch.worker.kernels.kernel_sizes import KV_SCALE_BYTES
from swiftbatch.worker.kernels.kv_quantization import CODES, coded, numbers_of
from swiftbatch.worker.kernels.layer_specs import RecurrentSizes
from swiftbatch.worker.kv.huge_pages import FilledPages
from swiftbatch.worker.kv.kv_capacity import MAX_TREE_NODES as MAX_TREE_NODES
from swiftbatch.worker.kv.kv_capacity import NUM_UNWRITTEN, HeldPositions, held_positions, state_bytes_of
from swiftbatch.worker.model.architectures.attention_layers import Windows
from swiftbatch.worker.model.layer_types import RecurrentShape

NUMPY_DTYPES = {  # of what `kv` gives, by that of the bits
    torch.int16: np.uint16,
    torch.float32: np.float32,
    torch.int8: np.int8,
    torch.uint8: np.uint8,
}


@dataclass(frozen=True)
class CacheShape:
    """Sizes of a target model's key-value cache."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device
    recurrent: RecurrentShape | None = None  # of layers with a state in place of keys and values
    short_length: int | None = None  # sequences of more positions turn by other angles; None where all turn alike
    kv_dtype: KVDtype | None = None  # of the rows that full caches keep; None: `dtype`
    kv_scale_bytes: int = KV_SCALE_BYTES  # behind the codes of these rows
    num_parts: int = 2  # rows of a position and a head: a key and a value; 1 where a value is the beginning of its key
    windows: Windows = ()  # of layers, which may forget what lies behind them; () where nothing is forgotten

    @classmethod
    def of(cls, weights: DecoderWeights, device: torch.device, kv_dtype: KVDtype | None = None) -> CacheShape:
        """The shape of a dense decoder's caches."""
        sizes, length = weights.sizes, weights.rotary.short_length
        windows = tuple(layer.window for layer in weights.layers if layer.attends)
        counts = (len(windows), sizes.num_kv_heads, sizes.head_dim)
        states = states_of(layer.mixer for layer in weights.layers)
        forgets = any(windows) and states is None and device.type == "cpu"
        num_parts = 2 if sizes.latent is None else 1
        shape = cls(*counts, sizes.dtype, device, states, length, kv_dtype, num_parts=num_parts)
        return replace(shape, windows=windows if forgets else ())

    @property
    def row_dtype(self) -> torch.dtype:
        """The dtype of the rows that full caches keep."""
        return self.dtype if self.kv_dtype is None else CODES[self.kv_dtype]

    @property
    def row_width(self) -> int:
        """The elements of such a row."""
        return self.head_dim if self.kv_dtype is None else self.head_dim + self.kv_scale_bytes

    def kept(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows `[..., head_dim]` as full caches keep them."""
        return rows if self.kv_dtype is None else coded(rows, self.row_dtype, self.kv_scale_bytes)

    def numbers(self, rows: torch.Tensor) -> torch.Tensor:
        """The numbers `[..., head_dim]` of kept rows."""
        return numbers_of(rows, self.dtype, self.head_dim)

    def first_angle(self, max_length: int) -> int:
        """The row of the model's table of angles where those of a sequence of at most so many positions begin."""
        return self.short_length if self.short_length is not None and max_length > self.short_length else 0

    def state_bytes(self) -> int:
        """The bytes of a sequence whatever its length: of layers that have a state in place of keys and values."""
        return 0 if self.recurrent is None else state_bytes_of(self.recurrent, self.dtype.itemsize)

    def checkpointed_state_bytes(self) -> int:
        """The bytes of the states that a checkpoint holds."""
        if self.recurrent is None:
            return 0
        return self.recurrent.checkpoint_bytes(self.dtype.itemsize)

    def held_positions(self, num_unwritten: int = NUM_UNWRITTEN) -> HeldPositions | None:
        """The part of a text that caches on the device hold, if checkpoints lag by so much; None for all of it."""
        return held_positions(self.windows, num_unwritten)

    def bytes_per_position(self) -> int:
        return self.num_parts * self.num_layers * self.num_kv_heads * self.row_width * self.row_dtype.itemsize


class HasRecurrentSizes(Protocol):
    """A layer's mixer: its weights, wherever they lie."""

    @property
    def sizes(self) -> RecurrentSizes:
        """The mixer's sizes."""


def states_of(mixers: Iterable[HasRecurrentSizes | None]) -> RecurrentShape | None:
    """The sizes of the mixers of a model's layers; None where no layer has one."""
    found = [mixer.sizes for mixer in mixers if mixer is not None]
    if not found:
        return None
    sizes = found[0]
    heads = (sizes.num_heads, sizes.num_key_heads, sizes.key_dim, sizes.value_dim)
    return RecurrentShape(len(found), *heads, sizes.num_channels, sizes.conv_width)


class CacheSource(Protocol):
    """The owner of keys and values of a text's first positions."""

    def kv(self, start: int, end: int) -> NDArray[Any]:
        """Return the keys and values of positions `[start, end)`, as `FullKVCache.kv` does."""

    def states_at(self, end: int) -> LayerStates | None:
        """Return the states of layers behind the first `end` positions, as `FullKVCache.states_at` does."""


class FullKVCache:
    """One preallocated buffer `[num_layers, num_parts, num_kv_heads, capacity, row_width]`; entry = absolute position.

    The first `length` entries are committed. A step writes the root's row to entry `length` and the draft tree's nodes
    behind it, in node order; `commit` moves the accepted path next to the root and forgets the rest.
    Untouched pages of the buffer cost no memory.
    """

    comes_by_layer = False  # whether `layer` gives memory that holds other layers later
    boundary = 0  # behind which positions `states` are, of layers that have some
    pages: Sequence[int] = ()  # that its entries lie in, where these are a pool's
    window_pages: Sequence[int] = ()  # the same of layers with a window, where these have a pool of their own
    num_window_pages = 0  # of those, that it has
    is_by_position = True  # whether `kv` tells all that the positions leave behind: else there are states, too

    def __init__(self, shape: CacheShape, max_length: int, buffer: torch.Tensor | None = None) -> None:
        """Make room for `max_length` positions and a tree: on the device, or in a `buffer` that lies elsewhere."""
        heads = (shape.num_layers, shape.num_parts, shape.num_kv_heads)
        size = (*heads, max_length + MAX_TREE_NODES, shape.row_width)
        self.shape = shape
        self.length = 0
        self.first_angle = shape.first_angle(max_length)  # the same for all of its positions, however many there are
        self.num_copied = 0  # first positions that another sequence with the same tokens had
        self._buffer = torch.empty(size, dtype=shape.row_dtype, device=shape.device) if buffer is None else buffer
        self._filled = FilledPages(self._buffer) if buffer is None else None

    def reserve(self, end: int) -> None:
        """Have room for the entries below `end`. Raises KVRoomError where there is none."""

    def layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of one layer on the device, each `[num_kv_heads, capacity, row_width]`."""
        return self.stored(index)

    def stored(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The layer where it is kept, for those who copy few and new positions; here it is the device as well."""
        return self._buffer[index, 0], self._buffer[index, -1]

    def stored_between(self, layer: int, positions: slice) -> tuple[torch.Tensor, torch.Tensor]:
        """The stored keys and values of some consecutive positions."""
        keys, values = self.stored(layer)
        return keys[:, positions], values[:, positions]

    def write(
        self, layer: int, first_entry: int, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keep rows `[num_kv_heads, num_rows, head_dim]`; returns the layer's keys and values, to attend to."""
        entries = slice(first_entry, first_entry + key.shape[1])
        for part, rows in enumerate((key, value)[: self.shape.num_parts]):
            self._buffer[layer, part, :, entries] = self.shape.kept(rows)
        return self.layer(layer)

    def keep(self, layer: int, first_entry: int, end: int) -> None:
        """Keep the rows that were written to these entries of what `layer` gave, wherever the cache lies."""

    def commit(self, path: list[int]) -> None:
        """Commit the root's row and the accepted nodes `path`; roll back all other nodes."""
        self._grow(keep_path(self._buffer, self.length, path))

    def advance(self, num_positions: int) -> None:
        """Commit rows of known tokens, which were written in place."""
        self._grow(self.length + num_positions)

    def kv(self, start: int, end: int) -> NDArray[Any]:
        """Keys and values of committed positions, `[num_rows, end - start, row_width]`; 16-bit floats as their bits.

        On a CPU a view: committed positions keep their bits, so another thread may read it while decoding goes on.
        """
        parts = [
            self._copied_out(rows).reshape(rows.shape[:-2].numel(), *rows.shape[-2:])
            for _, rows in self._parts(start, end)
        ]
        bits = parts[0] if len(parts) == 1 else np.concatenate(parts, axis=1)
        return bits.view(np.uint16) if bits.dtype == np.int16 else bits

    def load(self, kv: NDArray[Any]) -> None:
        """Commit the positions behind `length` from what `kv` returned. Raises ValueError where it does not fit."""
        rows = self._bits()
        num_rows, width, most = rows.shape[:-2].numel(), rows.shape[-1], self._capacity - MAX_TREE_NODES
        expected = np.dtype(NUMPY_DTYPES[rows.dtype])
        end = self.length + kv.shape[1]
        if (kv.shape[0], kv.shape[2], kv.dtype) != (num_rows, width, expected) or end > most:
            raise ValueError(
                f"found keys and values of {kv.dtype} {list(kv.shape)}, expected {expected} [{num_rows}, at most "
                f"{most - self.length}, {width}]"
            )
        bits = kv.view(np.int16) if kv.dtype == np.uint16 else kv
        for number, behind in self._parts(self.length, end):
            self._copy_in(behind, bits[:, number].reshape(behind.shape))
        self._grow(end)

    def num_readable(self, most: int) -> int:
        """The number of known tokens, `most` at most, that are best read in one call."""
        return most

    def states(self) -> LayerStates | None:
        """The newest states that a checkpoint can hold, of layers that have some; None where none has, or is due."""
        return None

    def states_at(self, end: int) -> LayerStates | None:
        """The states of layers behind the first `end` positions, which `copyable_end` has said; None without any."""
        return None

    def set_states(self, states: LayerStates) -> None:
        """Go on from the states of layers at their position, up to which keys and values are loaded.

        Raises ValueError where they do not fit.
        """
        raise ValueError("found states of layers, expected none: all layers of the model attend")

    def copyable_end(self, limit: int) -> int:
        """The last position, `limit` at most, up to which another sequence can copy what this one has."""
        return min(limit, self.length)

    def retain(self, from_: int, until: int | None = None) -> None:
        """Hold positions as a slice counts them, which else may be forgotten.

        The first ones, `until` some end, are for others that copy them; the newest, from `-n` on, for a way back; and
        those from a position on are for `kv`, up to `release`. Where some of these are forgotten, roll back to what is
        there.
        """

    def release(self, until: int | None = None) -> None:
        """Hold positions before `until` no more for `kv`; None, when memory has run out: hold none for others either.

        Nor for a way back.
        """

    def num_window_pages_for(self, end: int) -> int:
        """The pages of layers with a window that it has, and those that entries below `end` take beside them."""
        return 0

    @property
    def num_held(self) -> int:
        """The positions that would take as much memory in a cache that forgets nothing."""
        return self.length

    def copy_from(self, source: CacheSource, end: int) -> None:
        """Commit the positions behind `length` up to `end`, or a part, from who has the same tokens up to there."""
        self.load(source.kv(self.length, end))
        self.num_copied = end

    def prefix(self, length: int) -> FullKVCache:
        """View the same buffer as a cache of its first `length` committed positions, to run rows behind them again."""
        view = copy.copy(self)
        view.roll_back(length)
        return view

    @contextlib.contextmanager
    def replayed(self, length: int, num_positions: int = 1) -> Iterator[FullKVCache]:
        """Yield the cache as it was at `length`, to run its next tokens again; committed rows get their bits back."""
        again = [rows for _, rows in self._parts(length, length + num_positions)]
        committed = [rows.clone() for rows in again]
        yield self.prefix(length)
        for rows, kept in zip(again, committed, strict=True):
            rows.copy_(kept)

    def clear(self) -> None:
        """Make all of it zero (and so touch its memory)."""
        self._buffer.zero_()

    def roll_back(self, length: int) -> None:
        """Forget all positions from `length` on."""
        if not 0 <= length <= self.length:
            raise ValueError(f"cannot roll back to {length}: {self.length} positions are committed")
        self.length = length

    def _grow(self, length: int) -> None:
        self.length = length
        if self._filled is not None:
            self._filled.fill(length)

    def _copied_out(self, rows: torch.Tensor) -> NDArray[Any]:
        """Copy rows of `_bits` to the host."""
        host: NDArray[Any] = rows.cpu().numpy()
        return host

    def _copy_in(self, rows: torch.Tensor, kv: NDArray[Any]) -> None:
        """Fill rows of `_bits` from the host."""
        rows.copy_(torch.from_numpy(kv if kv.flags.writeable else kv.copy()))

    @property
    def _capacity(self) -> int:
        """Entries that there is room for."""
        return int(self._buffer.shape[-2])

    def _parts(self, start: int, end: int) -> Iterator[tuple[slice, torch.Tensor]]:
        """Yield the bits of entries `[start, end)` by parts that lie side by side: which of them, and their rows."""
        yield slice(0, end - start), self._bits()[..., start:end, :]

    def _bits(self) -> torch.Tensor:
        """The buffer, whatever its strides, in numbers that numpy knows."""
        return _bits_of(self._buffer)


def keep_path(buffer: torch.Tensor, root: int, path: list[int]) -> int:
    """Move the entries of the nodes `path` of a tree next to its root's entry; returns the end of what is kept.

    On a CPU numpy moves them, one after the other. torch would share so little work among its threads, and these would
    go on waiting for more on the cores that the next forward needs.
    """
    end = root + 1 + len(path)
    source, target = [root + 1 + node for node in path], list(range(root + 1, end))
    if source == target:
        return end
    if buffer.device.type != "cpu":
        buffer[..., target, :] = buffer[..., source, :]
        return end
    entries = _bits_of(buffer).numpy()
    for old, new in zip(source, target, strict=True):  # no entry is overwritten before it was moved: old >= new
        if old != new:
            entries[..., new, :] = entries[..., old, :]
    return end


def _bits_of(buffer: torch.Tensor) -> torch.Tensor:
    return buffer.view(torch.int16) if buffer.element_size() == 2 else buffer
