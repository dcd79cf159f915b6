"""Checked tables of a forward's rows, and addresses of arrays, for C."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from swiftbatch.worker.kernels.kernel_sizes import BLOCK, KV_SCALE_BYTES
from swiftbatch.worker.kernels.kv_codes import KV_CODES

MOST_POSITIONS = 2**21


class CodedKeys(Protocol):
    """Keys of a cache that a call selects by scores of their codes."""

    @property
    def address(self) -> int:
        """Return the address of their struct."""


class RowCache(Protocol):
    """Keys and values of rows, by layer."""

    adapter: int  # the number of the LoRA adapter that they were computed with; 0: none

    def layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values `[num_kv_heads, capacity, row_width]` of a layer, as numbers or codes."""


class Rows(Protocol):
    """Consecutive rows of one sequence after a cache."""

    @property
    def cache(self) -> RowCache: ...
    @property
    def token_ids(self) -> list[int]: ...  # [num_rows]
    @property
    def positions(self) -> list[int]: ...  # [num_rows] rows of the table of angles
    @property
    def first_entry(self) -> int: ...  # the cache entry of the first row; the others follow
    @property
    def boundary(self) -> int: ...  # the end of the prefix that all rows see
    @property
    def tail_entries(self) -> np.ndarray: ...  # [num_rows, BLOCK] cache entries from the boundary on that each row sees
    @property
    def tail_lengths(self) -> list[int]: ...  # [num_rows] tail entries without padding
    @property
    def biases(self) -> np.ndarray | None: ...  # [boundary] float32, added to the prefix's scores; None: all are 0
    @property
    def scanned(self) -> CodedKeys | None: ...  # keys that rows see in addition to the cache's entries
    @property
    def is_partial(self) -> bool: ...  # entries are not positions, so windows do not apply
    def __len__(self) -> int: ...


class CRowGroup(ctypes.Structure):
    """`row_group` of source/api.h."""

    _fields_ = (
        ("cache", ctypes.c_void_p),
        ("layer_stride", ctypes.c_int64),
        ("value_stride", ctypes.c_int64),
        ("head_stride", ctypes.c_int64),
        ("tail_slots", ctypes.c_void_p),
        ("tail_lengths", ctypes.c_void_p),
        ("biases", ctypes.c_void_p),
        ("scanned", ctypes.c_void_p),
        ("num_rows", ctypes.c_int32),
        ("first_slot", ctypes.c_int32),
        ("boundary", ctypes.c_int32),
        ("capacity", ctypes.c_int32),
        ("is_partial", ctypes.c_int32),
        ("kv_code", ctypes.c_int32),
        ("adapter", ctypes.c_int32),
    )


@dataclass(frozen=True)
class LayerCacheShape:
    """Sizes that all caches of a call share."""

    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    stripes: tuple[int, ...] = ()  # by layer, where each takes its own number of a cache's heads


@dataclass(frozen=True)
class CachePlace:
    """Address of a cache's keys, starting at some layer, and strides in elements."""

    address: int
    layer_stride: int
    value_stride: int
    head_stride: int
    capacity: int
    kv_code: int  # as in source/api.h

    @classmethod
    def of(cls, layers: Sequence[tuple[torch.Tensor, torch.Tensor]], shape: LayerCacheShape) -> CachePlace:
        """Find keys and values `[num_kv_heads, capacity, row_width]` of consecutive layers. Raises ValueError."""
        (keys, values), last = layers[0], layers[-1]
        is_coded = keys.dtype in KV_CODES
        dtype, width = (keys.dtype, shape.head_dim + KV_SCALE_BYTES) if is_coded else (shape.dtype, shape.head_dim)
        stripes = shape.stripes or (shape.num_kv_heads,) * len(layers)
        strides = (keys.stride(0), width, 1)
        itemsize = dtype.itemsize
        firsts = [0, *itertools.accumulate(shape.stripes or (1,) * len(layers))]  # in strides
        layer_stride = (last[0].data_ptr() - keys.data_ptr()) // itemsize // max(firsts[-2], 1)
        value_stride = (values.data_ptr() - keys.data_ptr()) // itemsize
        for first, count, pair in zip(firsts, stripes, layers, strict=False):
            expected = (count, keys.shape[1], width)
            for which, tensor in enumerate(pair):
                if tensor.shape != expected or tensor.dtype != dtype or tensor.device.type != "cpu":
                    raise ValueError(
                        f"found a cache of {tensor.dtype} {list(tensor.shape)} on {tensor.device}, expected "
                        f"{dtype} {list(expected)} on cpu"
                    )
                place = keys.data_ptr() + (first * layer_stride + which * value_stride) * itemsize
                if tensor.stride() != strides or tensor.data_ptr() != place:
                    raise ValueError(f"found a cache with strides {tensor.stride()}, expected slots side by side")
        found = (keys.data_ptr(), layer_stride, value_stride, keys.stride(0), keys.shape[1])
        return cls(*found, KV_CODES.get(keys.dtype, 0))


NOWHERE = CachePlace(0, 0, 0, 0, 2**31 - 1, 0)
"""Stands for a cache in a call over layers that do not attend."""


@dataclass(frozen=True)
class RowTable:
    """Rows of a call by group, and the arrays that hold them."""

    groups: Any  # array of CRowGroup
    num_groups: int
    num_rows: int
    token_ids: NDArray[np.int32]  # [num_rows]
    positions: NDArray[np.int32]  # [num_rows]
    arrays: tuple[NDArray[Any] | None, ...]  # `groups` points into these: tail slots, tail lengths, then biases

    @classmethod
    def of(cls, library: ctypes.CDLL, groups: Sequence[Rows], places: Sequence[CachePlace], vocab: int) -> RowTable:
        """Lay out rows whose caches are at `places`. Raises ValueError for entries beyond a cache."""
        if not groups:
            raise ValueError("found no rows")
        sizes = [_num_rows(group) for group in groups]
        biases = [_checked_biases(group) for group in groups]
        slots = _narrowed(np.concatenate([group.tail_entries for group in groups]))
        lengths = _int32(group.tail_lengths for group in groups)
        token_ids = _int32(group.token_ids for group in groups)
        positions = _int32(group.positions for group in groups)
        table = (CRowGroup * len(groups))()
        slot_address, length_address = slots.ctypes.data, lengths.ctypes.data
        for group, place, entry, size, added in zip(groups, places, table, sizes, biases, strict=True):
            entry.cache, entry.layer_stride = place.address, place.layer_stride
            entry.value_stride, entry.head_stride = place.value_stride, place.head_stride
            entry.tail_slots, entry.tail_lengths = slot_address, length_address
            entry.biases = None if added is None else added.ctypes.data
            entry.scanned = None if group.scanned is None else group.scanned.address
            entry.num_rows, entry.capacity, entry.is_partial = size, place.capacity, group.is_partial
            entry.kv_code = place.kv_code
            entry.first_slot, entry.boundary = _narrow(group.first_entry), _narrow(group.boundary)
            slot_address += size * BLOCK * 4
            length_address += size * 4
        numbers = token_ids.ctypes.data, positions.ctypes.data
        if not library.rows_fit(table, len(groups), *numbers, vocab, MOST_POSITIONS):
            _check_range("token", token_ids, vocab)
            _check_range("position", positions, MOST_POSITIONS)
            _refuse(groups, places, slots, lengths)
        return cls(table, len(groups), len(token_ids), token_ids, positions, (slots, lengths, *biases))


def _int32(lists: Iterable[Sequence[int]]) -> NDArray[np.int32]:
    return _narrowed(np.array(list(itertools.chain.from_iterable(lists))))


def _narrow(number: int) -> int:
    if not -(2**31) <= number < 2**31:
        raise ValueError(f"found {number}, expected a number of 32 bits")
    return number


def _narrowed(numbers: NDArray[Any]) -> NDArray[np.int32]:
    if numbers.dtype.kind not in "iu":
        raise ValueError(f"found numbers of {numbers.dtype}, expected whole ones")
    narrowed = np.ascontiguousarray(numbers, dtype=np.int32)
    if not (narrowed == numbers).all():
        raise ValueError(f"found numbers up to {numbers.max()}, expected 32 bits")
    return narrowed


def _refuse(
    groups: Sequence[Rows], places: Sequence[CachePlace], slots: NDArray[np.int32], lengths: NDArray[np.int32]
) -> NoReturn:
    sizes = [len(group.token_ids) for group in groups]
    _check_tails(slots, lengths, np.repeat([place.capacity for place in places], sizes))
    for group, place, size in zip(groups, places, sizes, strict=True):
        _check_group(group, size, place.capacity)
    raise ValueError("found rows that do not fit their caches")


def _checked_biases(group: Rows) -> NDArray[np.float32] | None:
    biases = group.biases
    if biases is None:
        return None
    if biases.shape != (group.boundary,) or biases.dtype != np.float32 or not biases.flags.c_contiguous:
        raise ValueError(
            f"found biases of {biases.dtype} {list(biases.shape)}, expected float32 [{group.boundary}] side by side"
        )
    return biases


def _num_rows(group: Rows) -> int:
    size = len(group.token_ids)
    found = (len(group.positions), len(group.tail_lengths), tuple(group.tail_entries.shape))
    if size < 1 or found != (size, size, (size, BLOCK)):
        raise ValueError(f"found {size} tokens with positions, tail lengths and tail slots {found}")
    return size


def _check_group(group: Rows, size: int, capacity: int) -> None:
    if group.boundary % BLOCK or not 0 <= group.boundary <= min(capacity, MOST_POSITIONS):
        raise ValueError(
            f"found a boundary at {group.boundary}, expected a multiple of {BLOCK} within {capacity} slots"
        )
    if not 0 <= group.first_entry <= capacity - size:
        raise ValueError(f"found {size} rows from slot {group.first_entry} on, expected them within {capacity} slots")


def _check_tails(slots: NDArray[np.int32], lengths: NDArray[np.int32], capacities: NDArray[Any]) -> None:
    if lengths.min() < 1 or lengths.max() > BLOCK:
        raise ValueError(f"found tails of {lengths.min()} to {lengths.max()} keys, expected 1 to {BLOCK}")
    is_real = np.arange(BLOCK) < lengths[:, None]
    if (is_real & ((slots < 0) | (slots >= capacities[:, None]))).any():
        raise ValueError("found a tail slot outside its cache")


def _check_range(name: str, values: NDArray[np.int32], end: int) -> None:
    if values.min() < 0 or values.max() >= end:
        raise ValueError(f"found {name}s from {values.min()} to {values.max()}, expected them from 0 to {end - 1}")


# Addresses of arrays, for C.


def address_of(array: np.ndarray | None) -> int | None:
    """Return the address of an array's first element.

    numpy's own interface takes four times as long.
    """
    if array is None:
        return None
    try:
        return ctypes.addressof(ctypes.c_char.from_buffer(array))  # type: ignore[arg-type]
    except (TypeError, ValueError):  # the array is read-only, not contiguous, or empty
        address: int = array.__array_interface__["data"][0]
        return address
