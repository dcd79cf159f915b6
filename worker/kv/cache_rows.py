"""The shape of a model's caches, and rows of keys and values in one buffer, where a cache on a CPU has them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from swiftbatch.jobs.run.compute_options import KVDtype
from swiftbatch.worker.kernels.decoder_weights import DecoderWeights
from swiftbatch.worker.kernels.kernel_sizes import KV_SCALE_BYTES
from swiftbatch.worker.kernels.kv_quantization import CODES, coded, numbers_of
from swiftbatch.worker.kernels.layer_specs import RecurrentSizes
from swiftbatch.worker.kv.huge_pages import FilledPages
from swiftbatch.worker.kv.kv_capacity import (
    MAX_TREE_NODES,
    NUM_UNWRITTEN,
    HeldPositions,
    held_positions,
    state_bytes_of,
)
from swiftbatch.worker.model.architectures.attention_layers import Windows
from swiftbatch.worker.model.architectures.recurrent_layers import RecurrentShape

if TYPE_CHECKING:
    from swiftbatch.worker.kernels.cuda.cuda_row_table import PageTable

NO_SLOT = -1
NO_PAGE = -1  # in a sequence's list, where it has given one back whose positions it has forgotten
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

    def new_buffer(self, max_length: int) -> torch.Tensor:
        """Memory for rows of `max_length` positions and a tree behind them."""
        size = (self.num_layers, self.num_parts, self.num_kv_heads, max_length + MAX_TREE_NODES, self.row_width)
        return torch.empty(size, dtype=self.row_dtype, device=self.device)

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


class CacheRows:
    """Keys and values of some layers, `buffer [num_layers, num_parts, num_kv_heads, capacity, row_width]`.

    Entries are absolute positions. Untouched pages of a buffer on a CPU cost no memory.
    """

    comes_by_layer = False  # whether `layer` gives memory that holds other layers later
    holds_all = False  # whether the layers of all slots lie on the device, so that rows may move from one to another
    slot = NO_SLOT  # of the buffer that all slots share
    pages: Sequence[int] = ()  # that entries lie in, where these are a pool's
    page = 0  # positions of a page
    page_table: PageTable | None = None  # of a slot on the device; None where rows are in order

    def __init__(self, shape: CacheShape, buffer: torch.Tensor, is_own: bool = False) -> None:
        """Rows of an `is_own` buffer are the only ones there, and come from the first position on."""
        self.shape, self.buffer = shape, buffer
        self._filled = FilledPages(buffer) if is_own else None

    @property
    def capacity(self) -> int:
        """Entries that there is room for."""
        return int(self.buffer.shape[-2])

    def reserve(self, end: int) -> None:
        """Have room for the entries below `end`. Raises PagesError where there is none."""

    def fill(self, length: int) -> None:
        """Take note that so many first positions are committed."""
        if self._filled is not None:
            self._filled.fill(length)

    def cut(self, length: int) -> int:
        """Forget all entries behind some first ones; returns how many of these are left."""
        return length

    def give_back(self, start: int, end: int, first: int) -> None:
        """Give back the memory of positions `[start, end)` that no row sees; those from `first` on are lost, too."""
        raise NotImplementedError("rows of layers that see all are never lost")

    def layer(self, index: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of one layer on the device, of which `length` positions are committed."""
        return self.stored(index, length)

    def stored(self, index: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The layer where it is kept; here it is the device as well."""
        return self.buffer[index, 0], self.buffer[index, -1]

    def stored_between(self, index: int, positions: slice, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The stored keys and values of some consecutive positions."""
        keys, values = self.stored(index, length)
        return keys[:, positions], values[:, positions]

    def between(self, positions: slice) -> torch.Tensor:
        """Rows of all layers at consecutive positions, in order."""
        return self.buffer[..., positions, :]

    def write(
        self, layer: int, first_entry: int, key: torch.Tensor, value: torch.Tensor, length: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keep rows as `FullKVCache.write` does, behind `length` committed positions or among them."""
        self._put(layer, first_entry, key, value)
        return self.layer(layer, length)

    def keep(self, layer: int, first_entry: int, end: int, length: int) -> None:
        """Keep the rows that were written to these entries of what `layer` gave, wherever they lie."""

    def move(self, root: int, path: list[int]) -> None:
        """Bring the entries of the nodes `path` of a tree next to its root's."""
        keep_path(self.buffer, root, path)

    def kv(self, start: int, end: int) -> NDArray[Any]:
        """Return what `FullKVCache.kv` does."""
        parts = [
            self.to_host(rows).reshape(rows.shape[:-2].numel(), *rows.shape[-2:]) for _, rows in self.parts(start, end)
        ]
        bits = parts[0] if len(parts) == 1 else np.concatenate(parts, axis=1)
        return bits.view(np.uint16) if bits.dtype == np.int16 else bits

    def load(self, start: int, kv: NDArray[Any]) -> None:
        """Fill entries from position `start` on with what `kv` returned."""
        bits = kv.view(np.int16) if kv.dtype == np.uint16 else kv
        for number, rows in self.parts(start, start + kv.shape[1]):
            self.from_host(rows, bits[:, number].reshape(rows.shape))

    def share(self, theirs: CacheRows, start: int, end: int) -> int:
        """Have whole pages of `[start, end)` together with who has the same tokens there; returns the end of these."""
        return start

    def copy(self, theirs: CacheRows, start: int, end: int) -> None:
        """Copy positions of who lies on the same device."""
        for number, own in self._pieces(start, end):
            self.buffer[..., own, :] = theirs.between(slice(start + number.start, start + number.stop))

    @contextlib.contextmanager
    def restored(self, start: int, end: int) -> Iterator[None]:
        """Give entries their rows back at the end, whatever was written there meanwhile."""
        again = [rows for _, rows in self.parts(start, end)]
        before = [rows.clone() for rows in again]
        yield
        for rows, kept in zip(again, before, strict=True):
            rows.copy_(kept)

    def clear(self) -> None:
        """Make all of it zero (and so touch its memory)."""
        self.buffer.zero_()

    def to_host(self, rows: torch.Tensor) -> NDArray[Any]:
        """Copy rows to the host."""
        host: NDArray[Any] = rows.cpu().numpy()
        return host

    def from_host(self, rows: torch.Tensor, kv: NDArray[Any]) -> None:
        """Fill rows from the host."""
        rows.copy_(torch.from_numpy(kv if kv.flags.writeable else kv.copy()))

    def parts(self, start: int, end: int) -> Iterator[tuple[slice, torch.Tensor]]:
        """Yield the bits of entries `[start, end)` by parts that lie side by side: which of them, and their rows."""
        bits = bits_of(self.buffer)
        for number, own in self._pieces(start, end):
            yield number, bits[..., own, :]

    def _pieces(self, start: int, end: int) -> Iterator[tuple[slice, slice]]:
        """Yield entries `[start, end)` by parts that lie side by side: which of them, and where they lie."""
        yield slice(0, end - start), slice(start, end)

    def _put(self, layer: int, first_entry: int, key: torch.Tensor, value: torch.Tensor) -> None:
        for number, own in self._pieces(first_entry, first_entry + key.shape[1]):
            for part, rows in enumerate((key, value)[: self.shape.num_parts]):
                self.buffer[layer, part, :, own] = self.shape.kept(rows[:, number])


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
    entries = bits_of(buffer).numpy()
    for old, new in zip(source, target, strict=True):  # no entry is overwritten before it was moved: old >= new
        if old != new:
            entries[..., new, :] = entries[..., old, :]
    return end


def bits_of(buffer: torch.Tensor) -> torch.Tensor:
    """A buffer, whatever its strides, in numbers that numpy knows."""
    return buffer.view(torch.int16) if buffer.element_size() == 2 else buffer
