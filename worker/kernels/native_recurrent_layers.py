"""Layers with a state or a convolution in the compiled kernels: loading, and their rows."""

from __future__ import annotations

import ctypes
import dataclasses
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from swiftbatch.worker.kernels.layer_specs import MOST_ROWS, RecurrentWeights
from swiftbatch.worker.kernels.native_quantized_weights import quantized_rows
from swiftbatch.worker.kernels.quantized_weights import AnyLinear, PackedLinear, plain_linear
from swiftbatch.worker.kernels.row_tables import Rows

RECURRENT_ROLES = {  # `mixer_role` of source/api.h
    role: number
    for number, role in enumerate(
        (
            *("inputs", "gates", "betas", "steps", "output"),
            *("taps", "tap_bias", "rates", "step_bias", "skip", "norm", "scales"),
        )
    )
}


class CRecurrentSizes(ctypes.Structure):
    """`mixer_sizes` of source/api.h."""

    COUNTS = ("num_heads", "num_key_heads", "key_dim", "value_dim", "num_channels", "conv_width", "norm_width")
    _fields_ = (
        *((name, ctypes.c_int32) for name in ("form", *COUNTS)),
        *((name, ctypes.c_float) for name in ("epsilon", "least_step", "most_step", "in_scale", "out_scale")),
    )


class CSequenceSteps(ctypes.Structure):
    """`sequence_steps` of source/api.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("layers", "parents", "before")),
        *((name, ctypes.c_int32) for name in ("num_rows", "first_step")),
    )


def load_recurrent_layer(library: ctypes.CDLL, handle: int, layer: int, mixer: RecurrentWeights) -> None:
    """Load the mixer of a layer."""
    sizes = CRecurrentSizes(**dataclasses.asdict(mixer.sizes))
    library.decoder_mixer(handle, layer, ctypes.byref(sizes))
    for role, linear in mixer.linears.items():
        _load_linear(library, (handle, layer, RECURRENT_ROLES[role]), linear)
    for role, numbers in mixer.floats.items():
        held = numbers.detach().contiguous()
        library.decoder_load_mixer(handle, layer, RECURRENT_ROLES[role], held.data_ptr(), None)


def _load_linear(library: ctypes.CDLL, place: tuple[int, int, int], linear: AnyLinear) -> None:
    bias: Tensor | None = None if linear.bias is None else linear.bias.detach().contiguous()
    address = None if bias is None else bias.data_ptr()
    if isinstance(linear, PackedLinear) and (rows := quantized_rows(linear.weight)) is not None:
        library.decoder_load_quantized_mixer(*place, rows.address, address)
        return
    weight = plain_linear(linear).weight.detach().contiguous()
    library.decoder_load_mixer(*place, weight.data_ptr(), address)


@dataclass(frozen=True)
class SequenceTable:
    """Rows of a call by sequence, and the arrays that hold them."""

    sequences: Any  # array of CSequenceSteps
    held: list[Any]  # `sequences` points into these

    @classmethod
    def of(cls, groups: Sequence[Rows], conv_width: int) -> SequenceTable:
        """Lay out rows that follow their caches; groups with the same cache must be consecutive. Raises ValueError."""
        parts = [(cache, list(some)) for cache, some in itertools.groupby(groups, lambda group: group.cache)]
        table, held = (CSequenceSteps * len(parts))(), []
        for entry, (cache, some) in zip(table, parts, strict=True):
            parents, before = _paths(cache, some, conv_width)
            layers = cache.layer_states.layer_steps()
            entry.layers, entry.parents, entry.before = layers.ctypes.data, parents.ctypes.data, before.ctypes.data
            entry.num_rows, entry.first_step = len(parents), some[0].first_entry - cache.boundary
            held += [layers, parents, before, *cache.layer_states.held()]
        return cls(table, held)


def _paths(cache: Any, groups: list[Rows], conv_width: int) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Return each row's parent (-1: the committed state), and the entries whose inputs its convolution reads."""
    if getattr(cache, "layer_states", None) is None:
        raise ValueError("found rows behind a cache without states")
    first, num_rows = groups[0].first_entry, sum(len(group) for group in groups)
    in_front = [_in_front(group, conv_width) for group in groups]
    entries = np.concatenate(in_front)
    parents = np.where(entries[:, -1] >= first, entries[:, -1] - first, -1)
    before = (entries - cache.boundary)[:, : conv_width - 1]
    cache.layer_states.reserve(first + num_rows - cache.boundary)
    rows = np.arange(num_rows)
    if num_rows > MOST_ROWS or first != cache.length:
        raise ValueError(f"found {num_rows} rows from entry {first} on, behind a state at {cache.length}")
    if (parents >= rows).any() or (before >= (first - cache.boundary + rows)[:, None]).any():
        raise ValueError("found a row whose path goes through a later row")
    if (before < 1 - conv_width).any():
        raise ValueError("found a row whose path goes through entries in front of its boundary")
    return np.ascontiguousarray(parents, dtype=np.int32), np.ascontiguousarray(before, dtype=np.int32)


def _in_front(group: Rows, conv_width: int) -> NDArray[np.int64]:
    """Return the entries that precede each row on its path, at least one per row, in order of position."""
    places = np.array(group.tail_lengths)[:, None] - 1 - np.arange(max(1, conv_width - 1), 0, -1)
    in_tail = np.take_along_axis(np.asarray(group.tail_entries), np.maximum(places, 0), axis=1)
    found: NDArray[np.int64] = np.where(places >= 0, in_tail, group.boundary + places)
    return found
