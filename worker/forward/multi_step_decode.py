"""Chains drawn in one native call (source/chain.c), faster than single rounds with the same results."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence as Many
from dataclasses import dataclass

import numpy as np
import torch

from swiftbatch.worker.kernels.kernel_sizes import BLOCK
from swiftbatch.worker.kernels.native_decoder import CForwardCall, NativeDecoder
from swiftbatch.worker.kernels.row_tables import Rows, RowTable, address_of
from swiftbatch.worker.sampling.draft_tree import DraftTree
from swiftbatch.worker.sampling.native_sampler import CTreeWalk, NativeSampler, scratch

MOST_ROUNDS = BLOCK - 1  # all drawn rows must fit in one tail of a partial cache


class CTokenSet(ctypes.Structure):
    """`token_set` of source/chain.h."""

    _fields_ = (("token_ids", ctypes.c_void_p), ("num_tokens", ctypes.c_int64))


class CChainCall(ctypes.Structure):
    """`chain_call` of source/chain.h."""

    _fields_ = (
        ("forward", CForwardCall),
        *((name, ctypes.c_void_p) for name in ("groups", "token_ids", "positions", "tail_lengths", "tail_slots")),
        *((name, ctypes.c_void_p) for name in ("walks", "texts")),
        ("num_rounds", ctypes.c_int32),
        ("vocab", ctypes.c_int32),
        ("ends", ctypes.c_void_p),
        ("undrawn", CTokenSet),
    )


@dataclass(frozen=True)
class DecodedChain:
    """Tokens of one sequence's chain."""

    token_ids: list[int]
    has_failed: bool  # true if no token can be drawn after these


def draw_chains(
    decoder: NativeDecoder,
    groups: Many[Rows],
    samplers: Many[NativeSampler],
    num_rounds: int,
    ends: Many[frozenset[int]] | None = None,
    never_sampled_ids: torch.Tensor | None = None,
) -> list[DecodedChain]:
    """Draw 1 to `MOST_ROUNDS` tokens per sequence, one forward per round.

    `groups` have one row each, with tail entries up to the block's end for the tokens to draw. Tokens are written after
    the sequences' own, which the caller extends. All chains end when one of them cannot draw, or draws one of its
    `ends`. Raises ValueError.
    """
    room = min(sampler.sequence.num_remaining_tokens for sampler in samplers)
    if not 1 <= num_rounds <= min(MOST_ROUNDS, room):
        raise ValueError(f"found {num_rounds} rounds, expected from 1 to {MOST_ROUNDS}, and to {room} tokens left")
    table = decoder.table(groups, range(decoder.sizes.num_layers))
    if table.num_rows != len(samplers) or table.num_groups != len(samplers):
        raise ValueError(f"found {table.num_rows} rows of {table.num_groups} groups for {len(samplers)} sequences")
    _check_room(table, groups, num_rounds)
    walks = _run(decoder, table, groups, samplers, num_rounds, ends, never_sampled_ids)
    return [_drawn(sampler, walk) for sampler, walk in zip(samplers, walks, strict=True)]


def _run(
    decoder: NativeDecoder,
    table: RowTable,
    groups: Many[Rows],
    samplers: Many[NativeSampler],
    num_rounds: int,
    ends: Many[frozenset[int]] | None,
    never_sampled_ids: torch.Tensor | None,
) -> Many[CTreeWalk]:
    sizes = decoder.sizes
    state = torch.empty(table.num_rows, sizes.hidden)
    hidden = torch.empty(table.num_rows, sizes.hidden, dtype=sizes.dtype)
    logits = torch.empty(table.num_rows, sizes.vocab)
    made = [sampler.walk_call(DraftTree(), row[None]) for sampler, row in zip(samplers, logits, strict=True)]
    walks = (CTreeWalk * len(made))(*(walk for walk, _ in made))
    texts = (ctypes.c_void_p * len(made))(*(address_of(sampler.sequence.token_ids) for sampler in samplers))
    endings = [np.array([*token_ids], dtype=np.int64) for token_ids in ends or ()]
    sets = (CTokenSet * len(endings))(*(CTokenSet(address_of(each), len(each)) for each in endings))
    last_position = int(table.positions.max()) + num_rounds
    with decoder.team.lock:
        call = CChainCall(
            forward=decoder.call(table, range(sizes.num_layers), last_position, state, True, hidden, logits),
            groups=ctypes.addressof(table.groups),
            token_ids=address_of(table.token_ids),
            positions=address_of(table.positions),
            tail_lengths=address_of(table.arrays[1]),
            tail_slots=address_of(table.arrays[0]),
            walks=ctypes.addressof(walks),
            texts=ctypes.addressof(texts),
            ends=ctypes.addressof(sets) if endings else None,
            num_rounds=num_rounds,
            vocab=sizes.vocab,
            undrawn=CTokenSet()
            if never_sampled_ids is None
            else CTokenSet(never_sampled_ids.data_ptr(), len(never_sampled_ids)),
        )
        decoder.team.library.draw_chains(decoder.handle, decoder.team.handle, ctypes.byref(call), scratch(sizes.vocab))
        decoder.team.hold([list(groups), table, state, hidden, logits])
    return list(walks)


def _check_room(table: RowTable, groups: Many[Rows], num_rounds: int) -> None:
    for entry, group in zip(table.groups, groups, strict=True):
        own = group.tail_lengths[0] - 1
        # full caches start a new block on their own
        num_named = num_rounds if group.is_partial else min(num_rounds, BLOCK - own)
        expected = np.arange(group.first_entry, group.first_entry + num_named)
        found = group.tail_entries[0, own : own + num_named]
        if entry.capacity < group.first_entry + num_rounds or not np.array_equal(found, expected):
            raise ValueError(f"found no room for {num_rounds} rows from entry {group.first_entry} on")


def _drawn(sampler: NativeSampler, walk: CTreeWalk) -> DecodedChain:
    sequence = sampler.sequence
    return DecodedChain(sequence.ahead(walk.length - len(sequence)).tolist(), walk.failed_row >= 0)
