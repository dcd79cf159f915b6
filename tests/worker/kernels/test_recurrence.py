"""Compiled head states against the float64 recurrence."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from swiftbatch.worker.kernels.native_library import Team, load_library, runnable_variants
from swiftbatch.worker.kernels.native_recurrence import Steps, native_fold, native_steps

HEADS, KEY_HEADS, KEY_DIM = 4, 2, 24
TREE = [-1, 0, 0, 1, -2, 4, 4, 2, 3]  # parents of rows: two continue from states
VARIANTS = runnable_variants()

pytestmark = pytest.mark.skipif(not VARIANTS, reason="no kernels run here")


def team(variant: str = VARIANTS[0] if VARIANTS else "", num_threads: int = 1) -> Team:
    return Team(load_library(variant), num_threads)


def made(num_rows: int, width: int, corrects: bool = True, num_decays: int = 1) -> tuple[Steps, list[Tensor]]:
    torch.manual_seed(width)
    keys = torch.nn.functional.normalize(torch.randn(num_rows, KEY_HEADS, KEY_DIM), dim=-1)
    decays = 0.8 + 0.2 * torch.rand(num_rows, HEADS, num_decays)
    betas = torch.rand(num_rows, HEADS) if corrects else None
    steps = Steps(torch.randn_like(keys), keys, torch.randn(num_rows, HEADS, width), decays, betas)
    return steps, [torch.randn(HEADS, KEY_DIM, width) for _ in range(2)]


def part(steps: Steps, rows: list[int]) -> Steps:
    parts = {name: None if each is None else each[rows] for name, each in vars(steps).items()}
    return replace(steps, **parts)


def plain(steps: Steps, states: list[Tensor], parents: list[int]) -> tuple[Tensor, Tensor]:
    own: list[Tensor] = []
    updates, found = [], []
    for row, parent in enumerate(parents):
        key, query = (
            each[row].double().repeat_interleave(HEADS // KEY_HEADS, 0) for each in (steps.keys, steps.queries)
        )
        state = (own[parent] if parent >= 0 else states[-1 - parent].double()) * steps.decays[row].double()[:, :, None]
        update = steps.values[row].double()
        if steps.betas is not None:
            update = (update - torch.einsum("hkv,hk->hv", state, key)) * steps.betas[row].double()[:, None]
        own.append(state + torch.einsum("hk,hv->hkv", key, update))
        updates.append(update)
        found.append(torch.einsum("hkv,hk->hv", own[row], query))
    return torch.stack(updates), torch.stack(found)


@pytest.mark.parametrize("width", [16, 48, 64, 128, 144])
@pytest.mark.parametrize("corrects", [True, False])
@pytest.mark.parametrize("num_decays", [1, KEY_DIM])
def test_rows_of_a_tree_take_the_plain_recurrence_s_steps(width: int, corrects: bool, num_decays: int) -> None:
    steps, states = made(len(TREE), width, corrects, num_decays)
    for ours, expected in zip(native_steps(team(), steps, states, TREE), plain(steps, states, TREE), strict=True):
        assert (ours - expected).abs().max() < 1e-5 * expected.abs().max()


@pytest.mark.parametrize("corrects", [True, False])
@pytest.mark.parametrize("num_decays", [1, KEY_DIM])
def test_a_row_has_the_same_bits_in_a_tree_in_a_chain_and_alone(corrects: bool, num_decays: int) -> None:
    steps, states = made(len(TREE), 128, corrects, num_decays)
    updates, found = native_steps(team(), steps, states, TREE)
    path = [0, 1, 3, 8]
    chain = native_steps(team(), part(steps, path), states, [-1, 0, 1, 2])
    assert torch.equal(chain[1], found[path])
    state = states[0]
    for row in path:
        [own] = native_steps(team(), part(steps, [row]), [state], [-1])[1]
        assert torch.equal(own, found[row])
        state = native_fold(team(), state, steps.keys[[row]], updates[[row]], steps.decays[[row]])


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(("num_threads", "num_decays"), [(1, 1), (3, 1), (3, KEY_DIM)])
def test_instruction_sets_and_threads_give_the_same_bits(variant: str, num_threads: int, num_decays: int) -> None:
    steps, states = made(len(TREE), 144, num_decays=num_decays)
    expected = native_steps(team(), steps, states, TREE)
    ours = native_steps(team(variant, num_threads), steps, states, TREE)
    assert all(torch.equal(one, other) for one, other in zip(ours, expected, strict=True))


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("num_decays", [1, KEY_DIM])
def test_steps_are_folded_in_order_with_torch_s_bits(variant: str, num_decays: int) -> None:
    steps, [state, _] = made(70, 48, num_decays=num_decays)
    folded = native_fold(team(variant), state, steps.keys, steps.values, steps.decays)
    for row in range(70):
        state = state * steps.decays[row][:, :, None]
        keys = steps.keys[row].repeat_interleave(HEADS // KEY_HEADS, 0)
        state = state + keys[:, :, None] * steps.values[row][:, None]
    assert torch.equal(folded, state)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"values": torch.zeros(3, HEADS, 24)}, "3 rows of 4 heads of 24 values"),
        ({"values": torch.zeros(3, 3, 16)}, "3 heads of 16 values, 2 of keys"),
        ({"decays": torch.zeros(2, HEADS, 1)}, r"found decays of torch.float32 \[2, 4, 1\]"),
        ({"decays": torch.zeros(3, HEADS, 2)}, r"decays of torch.float32 \[3, 4, 2\] .*\[3, 4, 1\]"),
        ({"queries": torch.zeros(3, KEY_HEADS, KEY_DIM, dtype=torch.float64)}, "found queries of torch.float64"),
    ],
)
def test_what_does_not_fit_is_refused(change: dict[str, Tensor], words: str) -> None:
    steps, states = made(3, 16)
    with pytest.raises(ValueError, match=words):
        native_steps(team(), replace(steps, **change), states, [-1, 0, 1])


@pytest.mark.parametrize("parents", [[-1, 0], [-1, 1, 0], [-3, 0, 1], [-1, 0, 2]])
def test_a_row_that_goes_on_from_nowhere_is_refused(parents: list[int]) -> None:
    steps, states = made(3, 16)
    with pytest.raises(ValueError, match="expected earlier rows or states"):
        native_steps(team(), steps, states, parents)
