"""Recurrent layers in the compiled kernels: rows of a call by sequence, their steps, and states that fold steps."""

from __future__ import annotations

import ctypes
import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from swiftbatch.worker.kernels.kernel_sizes import LANES
from swiftbatch.worker.kernels.layer_specs import MOST_HEADS, MOST_ROWS
from swiftbatch.worker.kernels.native_library import INT, POINTER, Team, chosen_variant, load_library, shared_team
from swiftbatch.worker.kernels.native_weights import checked
from swiftbatch.worker.kernels.row_tables import Rows


class CRecurrence(ctypes.Structure):
    """`recurrence` of source/api.h."""

    _fields_ = (
        *((name, INT) for name in ("num_rows", "num_heads", "num_key_heads", "key_dim", "value_dim", "num_decays")),
        *((name, POINTER) for name in ("parents", "states", "queries", "keys", "values", "betas", "decays")),
        *((name, POINTER) for name in ("updates", "found")),
    )


@dataclass(frozen=True)
class Steps:
    """Steps of rows in order, float32. If `betas` is None, the values are the updates."""

    queries: Tensor  # [num_rows, num_key_heads, key_dim]
    keys: Tensor
    values: Tensor  # [num_rows, num_heads, value_dim]
    decays: Tensor  # [num_rows, num_heads, num_decays]: one, or one per row of a state
    betas: Tensor | None = None


def are_known_states(num_heads: int, value_dim: int) -> bool:
    return 0 < num_heads <= MOST_HEADS and value_dim % LANES == 0


@functools.cache
def folding_team() -> Team | None:
    """Return the threads that fold steps, or None to run without kernels."""
    variant = chosen_variant()
    return None if variant is None else shared_team(load_library(variant), torch.get_num_threads())


def native_steps(team: Team, steps: Steps, states: Sequence[Tensor], parents: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Return the updates and the results of the queries, each `[num_rows, num_heads, value_dim]`. Raises ValueError.

    A row's parent is an earlier row or, as `-1 - i`, `states[i] [num_heads, key_dim, value_dim]`.
    """
    num_rows, num_key_heads, key_dim = steps.keys.shape
    num_heads, value_dim = steps.values.shape[1:]
    if not are_known_states(num_heads, value_dim) or num_heads % num_key_heads or not 0 < num_rows <= MOST_ROWS:
        raise ValueError(f"found {num_rows} rows of {num_heads} heads of {value_dim} values, {num_key_heads} of keys")
    if len(parents) != num_rows or any(not -len(states) <= each < row for row, each in enumerate(parents)):
        raise ValueError(f"found the parents {list(parents)} of {num_rows} rows, expected earlier rows or states")
    shapes = {"queries": steps.keys.shape, "keys": steps.keys.shape, "values": (num_rows, num_heads, value_dim)}
    num_decays = steps.decays.shape[-1]
    shapes |= {"decays": _decays_shape(num_rows, num_heads, num_decays, key_dim), "betas": (num_rows, num_heads)}
    given = {name: tensor for name in shapes if (tensor := getattr(steps, name)) is not None}
    held = {name: _checked(name, tensor, shapes[name]) for name, tensor in given.items()}
    own = [_checked("a state", state, (num_heads, key_dim, value_dim)) for state in states]
    updates, found = torch.empty_like(held["values"]), torch.empty_like(held["values"])
    call = CRecurrence(num_rows, num_heads, num_key_heads, key_dim, value_dim, num_decays)
    c_parents, c_states = (
        (ctypes.c_int32 * num_rows)(*parents),
        (POINTER * len(own))(*(each.data_ptr() for each in own)),
    )
    call.parents, call.states = ctypes.addressof(c_parents), ctypes.addressof(c_states)
    for name, tensor in (*held.items(), ("updates", updates), ("found", found)):
        setattr(call, name, tensor.data_ptr())
    with team.lock:
        team.library.recurrence_rows(team.handle, ctypes.byref(call))
        team.hold([held, own, c_parents, c_states, updates, found])
    return updates, found


def native_fold(team: Team, state: Tensor, keys: Tensor, updates: Tensor, decays: Tensor) -> Tensor:
    """Return a state `[num_heads, key_dim, value_dim]` after steps, in new memory. Raises ValueError."""
    num_rows, num_key_heads, key_dim = keys.shape
    num_heads, value_dim = updates.shape[1:]
    if not are_known_states(num_heads, value_dim) or num_heads % num_key_heads:
        raise ValueError(f"found {num_heads} heads of {value_dim} values, {num_key_heads} of keys")
    own = _checked("a state", state, (num_heads, key_dim, value_dim))
    keys = _checked("keys", keys, (num_rows, num_key_heads, key_dim))
    updates = _checked("updates", updates, (num_rows, num_heads, value_dim))
    decays = _checked("decays", decays, _decays_shape(num_rows, num_heads, decays.shape[-1], key_dim))
    folded = torch.empty_like(own)
    StepBuffers(team, [(keys, keys, updates, decays)]).fold([own], [folded], 0, num_rows)
    return folded


class StepBuffers:
    """Steps of all layers of a sequence, with one call to move them and one call to fold them."""

    def __init__(self, team: Team, layers: Sequence[Sequence[Tensor]]) -> None:
        """Take each layer's inputs (which no fold reads), keys, updates and decays, `[num_steps, ...]`."""
        self._team, self._layers = team, layers
        buffers = [each for layer in layers for each in layer if each.numel()]
        places = [(each.data_ptr(), each.stride(0) * each.element_size()) for each in buffers]
        self._places = np.array(places, dtype=np.int64)

    def keep(self, first: int, chosen: Sequence[int]) -> None:
        """Move the steps `first + chosen[i]`, in rising order, to `first + i`."""
        c_chosen = (ctypes.c_int32 * len(chosen))(*chosen)
        self._team.library.rows_keep(self._places.ctypes.data, len(self._places), first, c_chosen, len(chosen))

    def fold(self, states: Sequence[Tensor], targets: Sequence[Tensor], start: int, end: int) -> None:
        """Write each layer's state after consecutive steps to its target, which may be the state itself."""
        count = len(states)
        calls, c_states, c_targets = (CRecurrence * count)(), (POINTER * count)(), (POINTER * count)()
        for number, (call, (_, keys, updates, decays)) in enumerate(zip(calls, self._layers, strict=True)):
            c_states[number], c_targets[number] = states[number].data_ptr(), targets[number].data_ptr()
            call.num_rows, call.num_heads, call.num_key_heads = end - start, updates.shape[1], keys.shape[1]
            call.key_dim, call.value_dim, call.num_decays = keys.shape[2], updates.shape[2], decays.shape[2]
            call.states = ctypes.addressof(c_states) + number * ctypes.sizeof(POINTER)
            call.keys, call.updates, call.decays = (
                each.data_ptr() + start * each.stride(0) * each.element_size() for each in (keys, updates, decays)
            )
        with self._team.lock:
            self._team.library.recurrence_fold(self._team.handle, calls, c_targets, count)
            self._team.hold([self._layers, list(states), list(targets), c_states])


def _decays_shape(num_rows: int, num_heads: int, num_decays: int, key_dim: int) -> tuple[int, int, int]:
    return num_rows, num_heads, num_decays if num_decays in (1, key_dim) else 1


def _checked(name: str, tensor: Tensor, shape: Sequence[int]) -> Tensor:
    return checked(name, tensor.contiguous(), tuple(shape), torch.float32)


# Rows of a decoder's call by sequence.


class CSequenceSteps(ctypes.Structure):
    """`sequence_steps` of source/api.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("layers", "parents", "before")),
        *((name, ctypes.c_int32) for name in ("num_rows", "first_step")),
    )


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
