"""Triton's head states against the float64 recurrence, across a boundary."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from swiftbatch.worker.forward.tile_packing import known_rows
from swiftbatch.worker.kernels.cuda.cuda_recurrence import (
    StateBuffers,
    StateLayout,
    StateRows,
    move_steps,
    number_of_state,
    walk,
    weigh_paths,
)
from swiftbatch.worker.kernels.kernel_sizes import BLOCK, NUM_ROWS
from swiftbatch.worker.kernels.layer_specs import RecurrentForm, RecurrentSizes

pytestmark = pytest.mark.long

SIZES = {
    "delta net": RecurrentSizes(RecurrentForm.DELTA_NET, 4, 2, 16, 48, 256, 4, norm_width=48, epsilon=1e-6),
    "Mamba-2": RecurrentSizes(RecurrentForm.STATE_SPACE, 6, 1, 32, 16, 160, 4, most_step=1.0),
}
LENGTH, SLOT = BLOCK + 6, 1
PARTS = (BLOCK - 5, LENGTH)  # ends of forwards; the second passes the boundary


class Steps:
    def __init__(self, sizes: RecurrentSizes) -> None:
        generator = torch.Generator().manual_seed(3)

        def rows(*shape: int) -> Tensor:
            return torch.randn(LENGTH, *shape, generator=generator)

        self.sizes = sizes
        self.keys, self.queries = (rows(sizes.num_key_heads, sizes.key_dim) for _ in range(2))
        self.keys /= self.keys.norm(dim=-1, keepdim=True)
        self.values = rows(sizes.num_heads, sizes.value_dim)
        self.shares, self.logs = rows(sizes.num_heads).sigmoid(), -rows(sizes.num_heads).exp() / 10

    def plainly(self) -> tuple[Tensor, Tensor]:
        """Compute each row's output and the state at the boundary."""
        group, found, kept = self.sizes.num_heads // self.sizes.num_key_heads, [], None
        state = torch.zeros(self.sizes.num_heads, self.sizes.key_dim, self.sizes.value_dim, dtype=torch.float64)
        for row in range(LENGTH):
            if row == BLOCK:
                kept = state
            key, query = (each[row].double().repeat_interleave(group, 0) for each in (self.keys, self.queries))
            state, update = state * self.logs[row].double().exp()[:, None, None], self.values[row].double()
            if self.sizes.form == RecurrentForm.DELTA_NET:
                update = self.shares[row].double()[:, None] * (update - torch.einsum("hkv,hk->hv", state, key))
            state = state + key[:, :, None] * update[:, None]
            found.append(torch.einsum("hkv,hk->hv", state, query))
        assert kept is not None
        return torch.stack(found), kept


def padded(rows: Tensor, part: slice) -> Tensor:
    whole = torch.zeros(NUM_ROWS, *rows.shape[1:])
    whole[: part.stop - part.start] = rows[part]
    return whole


def run(steps: Steps, states: StateBuffers, first: int) -> Tensor:
    """Run rows that read the steps from a boundary on."""
    sizes, layout = steps.sizes, states.layout
    tables = StateLayout(states.num_slots, layout.ring, sizes.conv_width - 1, NUM_ROWS)
    cache: Any = SimpleNamespace(length=first, first_angle=0)
    found, boundary = [], first
    for end in PARTS:
        part = slice(cache.length - first, end)
        buffer = np.zeros(tables.size, dtype=np.int32)
        groups = known_rows(cache, [0] * (end - part.start))
        tables.fill(buffer, [StateRows(group, SLOT, boundary) for group in groups])
        table = tables.table(torch.from_numpy(buffer))
        own = (torch.arange(part.start, end) + first) % layout.ring
        states.steps[0, SLOT, own, : layout.num_keys] = steps.keys[part].flatten(1)
        states.steps[0, SLOT, own, layout.decays : layout.decays + sizes.num_heads] = steps.logs[part]
        queries, values, shares = (padded(each, part) for each in (steps.queries, steps.values, steps.shares))
        heads = (NUM_ROWS, sizes.num_heads)
        weights = torch.full((*heads, BLOCK), torch.nan), torch.full((*heads, BLOCK), torch.nan), torch.zeros(heads)
        out = torch.zeros(*heads, sizes.value_dim)
        weigh_paths(table, states.steps[0], queries, weights, sizes, layout)
        walk(table, states.states[0], states.steps[0], (queries, values, shares), weights, out, sizes, layout)
        found.append(out[: end - part.start])
        cache.length, boundary = first + end, groups[-1].boundary
    return torch.cat(found)


@pytest.mark.parametrize(
    ("name", "first"),
    [
        ("delta net", 4 * BLOCK),  # its steps wrap around the ring
        ("Mamba-2", 0),
        pytest.param("delta net", 0, marks=pytest.mark.slow),
        pytest.param("Mamba-2", 4 * BLOCK, marks=pytest.mark.slow),
    ],
)
def test_rows_and_the_folded_state_are_those_of_the_plain_recurrence(name: str, first: int) -> None:
    steps, sizes = Steps(SIZES[name]), SIZES[name]
    states = StateBuffers.empty(sizes, 1, 2, torch.bfloat16, 128, torch.device("cpu"))
    for unwritten in (states.states, states.steps):
        unwritten.fill_(torch.nan)
    if first:
        states.states[0, SLOT, number_of_state(first)] = 0.0
    found, (expected, kept) = run(steps, states, first), steps.plainly()
    assert (found - expected).abs().max() < 1e-5
    assert (states.states[0, SLOT, number_of_state(first + BLOCK)] - kept).abs().max() < 1e-5
    assert states.states[:, 0].isnan().all(), "another slot's"


def test_accepted_steps_move_over_the_ring_s_end() -> None:
    states = StateBuffers.empty(SIZES["Mamba-2"], 2, 3, torch.bfloat16, 128, torch.device("cpu"))
    ring = states.layout.ring
    states.steps[:] = torch.arange(states.steps[..., 0].numel()).view(*states.steps.shape[:3], 1)
    expected = states.steps.clone()
    moves = [[SLOT, ring + 1, ring - 1], [SLOT, ring + 4, ring], [-1, 0, 0]]
    for slot, source, target in moves[:2]:
        expected[:, slot, target % ring] = expected[:, slot, source % ring]
    move_steps(states, torch.tensor(moves, dtype=torch.int32))
    assert torch.equal(states.steps, expected)


@pytest.mark.parametrize(
    ("slots", "boundary", "words"),
    [((0,), 2 * BLOCK, "behind the state at 128"), ((0, 1, 0), 0, "behind those of others"), ((2,), 0, "0 to 1")],
)
def test_rows_that_do_not_fit_their_states_are_refused(slots: tuple[int, ...], boundary: int, words: str) -> None:
    layout, cache = StateLayout(2, 259, 3, NUM_ROWS), SimpleNamespace(length=BLOCK, first_angle=0)
    [rows] = known_rows(cache, [1, 2])  # type: ignore[arg-type]
    buffer = np.full(layout.size, 7, dtype=np.int32)
    with pytest.raises(ValueError, match=words):
        layout.fill(buffer, [StateRows(rows, slot, boundary) for slot in slots])
    assert (buffer == 7).all()


def test_rows_beyond_the_ring_are_refused() -> None:
    layout, cache = StateLayout(2, 259, 3, NUM_ROWS), SimpleNamespace(length=4 * BLOCK, first_angle=0)
    [rows] = known_rows(cache, [1])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="found rows up to 257, expected them up to 192"):
        layout.fill(np.zeros(layout.size, dtype=np.int32), [StateRows(rows, 0, 0)])
