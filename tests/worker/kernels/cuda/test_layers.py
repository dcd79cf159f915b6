"""CUDA norms, gate, embedding and rotary round where the reference does."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu

from swiftbatch.worker.kernels.cuda.row_kernels import activate, add_norm, embed, norm_heads, rope_store
from swiftbatch.worker.kernels.kernel_sizes import NUM_ROWS
from swiftbatch.worker.kernels.layer_specs import Activation, NormForm
from swiftbatch.worker.kernels.rope_cos_sin import angles
from tests.worker.kernels.cuda.arenas import CAPACITY, Arena, normal, padded, random_arena, random_rows
from tests.worker.kernels.kernel_parts import BF16, FLOAT32, Shape, random_weights
from tests.worker.kernels.reference import ACTIVATIONS, ReferenceDecoder, xielu

DTYPES = pytest.mark.parametrize("dtype", [BF16, FLOAT32], ids=str)
HIDDEN = 80
CURVE = torch.tensor([0.9, 1.2, 0.5, -1e-6])

ALL_ROWS = torch.ones(NUM_ROWS, 5, dtype=torch.int32)


def is_near(found: Tensor, expected: Tensor) -> bool:
    """Allow for float32's order of summation, which rarely changes a rounding to bfloat16."""
    if found.dtype == BF16 and (found != expected.to(BF16)).float().mean() > 0.005:
        return False
    return torch.allclose(found.float(), expected.float(), rtol=2 * torch.finfo(found.dtype).eps, atol=1e-6)


def reference(dtype: torch.dtype, form: NormForm = NormForm.TWICE) -> ReferenceDecoder:
    return ReferenceDecoder(random_weights(Shape(dtype=dtype, norm_form=form)))


@DTYPES
def test_embedded_rows_are_the_tables(dtype: torch.dtype) -> None:
    embedding, state = normal(100, HIDDEN, dtype=dtype), torch.empty(NUM_ROWS, HIDDEN, dtype=dtype)
    token_ids = torch.arange(NUM_ROWS, dtype=torch.int32) * 3 % 100
    embed(ALL_ROWS, token_ids, embedding, state)
    assert torch.equal(state, embedding[token_ids])


def test_padding_rows_stay_as_they_are() -> None:
    rows = ALL_ROWS.clone()
    rows[3, 2] = 0
    state, delta, weight = (normal(NUM_ROWS, HIDDEN, dtype=FLOAT32, seed=seed) for seed in (1, 2, 3))
    before, normed, gated = state.clone(), torch.zeros(NUM_ROWS, HIDDEN), torch.zeros(NUM_ROWS, HIDDEN // 2)
    add_norm(rows, state, delta, weight[0], 1e-5, normed)
    activate(rows, before, gated)
    embed(rows, torch.zeros(NUM_ROWS, dtype=torch.int32), weight, before)
    for written, fresh in ((normed, 0), (gated, 0)):
        assert [row for row in range(NUM_ROWS) if (written[row] == fresh).all()] == [3]
    assert [row for row in range(NUM_ROWS) if not torch.equal(before[row], weight[0])] == [3]


@DTYPES
def test_a_norm_adds_and_rounds_as_the_reference_does(dtype: torch.dtype) -> None:
    state, delta = (normal(NUM_ROWS, HIDDEN, dtype=dtype, seed=seed) for seed in (1, 2))
    weight, normed = normal(HIDDEN, dtype=dtype, seed=3), torch.empty(NUM_ROWS, HIDDEN, dtype=dtype)
    total = (state.float() + delta.float()).to(dtype)
    add_norm(ALL_ROWS, state, delta, weight, 1e-5, normed)
    assert torch.equal(state, total)
    assert is_near(normed, reference(dtype)._norm(total.float(), weight))
    add_norm(ALL_ROWS, state, None, weight, 1e-5, normed)
    assert torch.equal(state, total)
    assert is_near(normed, reference(dtype)._norm(total.float(), weight))


@DTYPES
@pytest.mark.parametrize("num_parts", [1, 5])
def test_parts_of_a_delta_are_summed_in_order_and_rounded_once(num_parts: int, dtype: torch.dtype) -> None:
    state, weight = normal(NUM_ROWS, HIDDEN, dtype=dtype, seed=1), normal(HIDDEN, dtype=dtype, seed=3)
    parts = normal(num_parts, NUM_ROWS, HIDDEN, dtype=FLOAT32, seed=2)
    total, other = torch.zeros(NUM_ROWS, HIDDEN), state.clone()
    for part in parts:
        total += part
    normed, expected = (torch.empty(NUM_ROWS, HIDDEN, dtype=dtype) for _ in range(2))
    add_norm(ALL_ROWS, state, parts, weight, 1e-5, normed)
    add_norm(ALL_ROWS, other, total.to(dtype), weight, 1e-5, expected)
    assert torch.equal(state, other)
    assert torch.equal(normed, expected)


@DTYPES
@pytest.mark.parametrize("form", NormForm)
def test_a_norm_behind_norms_what_is_added(form: NormForm, dtype: torch.dtype) -> None:
    state, delta = (normal(NUM_ROWS, HIDDEN, dtype=dtype, seed=seed) for seed in (1, 2))
    width = 2 * HIDDEN if form == NormForm.SHIFTED else HIDDEN
    behind, front = (normal(width, dtype=dtype, seed=seed) for seed in (3, 4))
    before, alone = state.clone(), state.clone()
    normed, untouched = (torch.full((NUM_ROWS, HIDDEN), 7.0, dtype=dtype) for _ in range(2))
    decoder = reference(dtype, form)
    add_norm(ALL_ROWS, state, delta, front, 1e-5, normed, 0.5, behind, form)
    added = decoder._rounded(0.5 * decoder._norm(delta.float(), behind))
    assert is_near(state, before.float() + added)
    assert is_near(normed, decoder._norm(state.float(), front))
    add_norm(ALL_ROWS, alone, delta, None, 1e-5, untouched, 0.5, behind, form)
    assert torch.equal(alone, state)
    assert (untouched == 7.0).all()


@DTYPES
@pytest.mark.parametrize("num_keys", [32, 96])
def test_norms_of_all_heads_together_leave_values_and_padding_rows_as_they_are(
    num_keys: int, dtype: torch.dtype
) -> None:
    qkv, weight = normal(NUM_ROWS, 96 + 2 * num_keys, dtype=dtype), normal(96 + num_keys, dtype=dtype, seed=1)
    rows, before = ALL_ROWS.clone(), qkv.clone()
    rows[3, 2] = 0
    norm_heads(rows, qkv, weight, 96, 1e-5, NormForm.ONCE)
    decoder, real = reference(dtype, NormForm.ONCE), [row for row in range(NUM_ROWS) if row != 3]
    for part in (slice(0, 96), slice(96, 96 + num_keys)):
        assert is_near(qkv[real, part], decoder._norm(before[real, part].float(), weight[part]))
    assert torch.equal(qkv[3], before[3])
    assert torch.equal(qkv[:, 96 + num_keys :], before[:, 96 + num_keys :])


def of_xielu(rows: Tensor) -> Tensor:
    return xielu(rows, CURVE.double())


@DTYPES
@pytest.mark.parametrize("has_gates", [True, False], ids=["gates", "ups alone"])
@pytest.mark.parametrize("activation", Activation)
def test_every_activation_rounds_as_the_reference_does(
    activation: Activation, has_gates: bool, dtype: torch.dtype
) -> None:
    given = 2 * normal(NUM_ROWS, 80 * (1 + has_gates), dtype=dtype)
    given[0, :5] = torch.tensor([0.0, -5.0, 50.0, -1e-30, torch.nan])
    out = torch.empty(NUM_ROWS, 80, dtype=dtype)
    activate(ALL_ROWS, given, out, activation, CURVE)
    expected = {**ACTIVATIONS, Activation.XIELU: of_xielu}[activation](given[:, :80].double()).float()
    if has_gates:
        expected = expected.to(dtype).float() * given[:, 80:].float()
    assert out[0, 4].isnan()
    out[0, 4] = expected[0, 4] = 0
    assert is_near(out, expected)


@DTYPES
@pytest.mark.parametrize("intermediate", [80, 1040])
def test_the_gate_rounds_as_the_reference_does(intermediate: int, dtype: torch.dtype) -> None:
    gate_up, gated = normal(NUM_ROWS, 2 * intermediate, dtype=dtype), torch.empty(NUM_ROWS, intermediate, dtype=dtype)
    activate(ALL_ROWS, gate_up, gated)
    gate, up = gate_up.float().chunk(2, dim=1)
    assert is_near(gated, silu(gate).to(dtype).float() * up)


ROPES = (
    Shape(),
    Shape(head_dim=80, group=3, num_kv_heads=2, has_qk_norm=True),
    Shape(head_dim=96, group=1, num_kv_heads=2, dtype=FLOAT32),
    Shape(head_dim=128, group=4, has_qk_norm=True, dtype=FLOAT32),
)


def turned(arena: Arena, qkv: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    weights = random_weights(arena.shape)
    table = angles(weights.rotary, positions.numpy(), arena.shape.dtype)
    turns = [half.repeat(1, 2)[:, None] for half in table.chunk(2, dim=1)]
    heads = qkv.float().unflatten(1, (-1, arena.shape.head_dim))
    num_kv_heads = arena.shape.num_kv_heads
    query, key, value = heads.split((heads.shape[1] - 2 * num_kv_heads, num_kv_heads, num_kv_heads), dim=1)
    layer, decoder = weights.layers[1], ReferenceDecoder(weights)
    if layer.query_norm is not None and layer.key_norm is not None:
        query, key = decoder._norm(query, layer.query_norm), decoder._norm(key, layer.key_norm)
    query, key = (each * turns[0] + torch.cat((-each.chunk(2, -1)[1], each.chunk(2, -1)[0]), -1) * turns[1]
                  for each in (query, key))  # fmt: skip
    return query, key, value


@pytest.mark.parametrize("shape", ROPES, ids=str)
def test_queries_and_keys_are_turned_and_stored_and_padding_rows_write_nothing(shape: Shape) -> None:
    arena = random_arena(shape, (5, 100, 700))
    sequences = random_rows(random.Random(1), arena, (3, 9, 2))
    table, layer = arena.table(sequences), random_weights(shape).layers[1]
    num_rows, num_heads = 14, shape.num_kv_heads * shape.group
    qkv = normal(num_rows, (num_heads + 2 * shape.num_kv_heads) * shape.head_dim, dtype=shape.dtype)
    query = padded(torch.empty(0, num_heads, shape.head_dim, dtype=shape.dtype))
    tables = angles(random_weights(shape).rotary, np.arange(CAPACITY), shape.dtype).to(shape.dtype)
    norms = None if layer.query_norm is None or layer.key_norm is None else (layer.query_norm, layer.key_norm)
    expected = arena.copy()
    rope_store(padded(qkv), tables, norms, 1e-5, table.rows, query, *arena.buffer[1])
    queries, keys, values = turned(arena, qkv, table.rows[:num_rows, 3].long())
    assert is_near(query[:num_rows], queries)
    assert query[num_rows:].isnan().all()
    for row, (slot, _, _, _, entry) in enumerate(table.rows[:num_rows].tolist()):
        for which, stored in enumerate((keys, values)):
            found = arena.buffer[1, which, slot, :, entry]
            assert is_near(found, stored[row])
            expected.buffer[1, which, slot, :, entry] = found
    assert torch.equal(arena.buffer.nan_to_num(9), expected.buffer.nan_to_num(9))  # nothing else was written
