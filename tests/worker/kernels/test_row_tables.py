from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from swiftbatch.worker.forward.tile_packing import SequenceRows
from swiftbatch.worker.kernels.decoder_weights import DecoderSizes
from swiftbatch.worker.kernels.native_decoder import NativeDecoder, native_attention
from swiftbatch.worker.kernels.native_library import Team, load_library
from swiftbatch.worker.kernels.quantized_weights import Linear
from tests.worker.kernels.kernel_parts import (
    FLOAT32,
    SHAPES,
    VARIANTS,
    chain,
    native,
    needs_kernels,
    random_cache,
    random_partial_rows,
    random_weights,
)

pytestmark = needs_kernels
SHAPE = SHAPES[0]


def changed(**fields: Any) -> SequenceRows:
    return dataclasses.replace(chain(random_cache(SHAPE, 70), [1, 2, 3]), **fields)


def with_tail(change: Callable[[np.ndarray], None]) -> SequenceRows:
    rows = changed()
    change(rows.tail_entries)
    return rows


WRONG: dict[str, Callable[[], SequenceRows]] = {
    "a token beyond the vocabulary": lambda: changed(token_ids=[1, 2, 100]),
    "a negative token": lambda: changed(token_ids=[1, -2, 3]),
    "a token that is no number": lambda: changed(token_ids=[1, 2.5, 3]),
    "a token of 33 bits": lambda: changed(token_ids=[1, 2**32, 3]),
    "too few positions": lambda: changed(positions=[70, 71]),
    "a negative position": lambda: changed(positions=[70, -1, 72]),
    "a position beyond all texts": lambda: changed(positions=[70, 2**21, 72]),
    "no rows": lambda: changed(token_ids=[], positions=[], tail_lengths=[], tail_entries=np.zeros((0, 64), np.int64)),
    "a slot before the cache": lambda: changed(first_entry=-1),
    "slots behind the cache": lambda: changed(first_entry=70 + 64 + 127 - 2),
    "a boundary within a block": lambda: changed(boundary=63),
    "a boundary behind the cache": lambda: changed(boundary=320),
    "a negative boundary": lambda: changed(boundary=-64),
    "an empty tail": lambda: changed(tail_lengths=[7, 0, 9]),
    "a tail longer than a block": lambda: changed(tail_lengths=[7, 65, 9]),
    "too few tail lengths": lambda: changed(tail_lengths=[7, 8]),
    "narrow tails": lambda: changed(tail_entries=np.zeros((3, 63), np.int64)),
    "tails of floats": lambda: changed(tail_entries=np.zeros((3, 64))),
    "a tail slot before the cache": lambda: with_tail(lambda tails: tails.__setitem__((1, 2), -1)),
    "a tail slot behind the cache": lambda: with_tail(lambda tails: tails.__setitem__((1, 2), 70 + 64 + 127)),
    "a cache of another dtype": lambda: chain(random_cache(dataclasses.replace(SHAPE, dtype=FLOAT32), 70), [1, 2, 3]),
    "a cache of other heads": lambda: chain(random_cache(dataclasses.replace(SHAPE, num_kv_heads=2), 70), [1, 2, 3]),
    "a cache of another head_dim": lambda: chain(random_cache(dataclasses.replace(SHAPE, head_dim=80), 70), [1, 2, 3]),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_row_table_is_refused_before_anything_is_read(what: str) -> None:
    with pytest.raises(ValueError, match="found"):
        native(SHAPE, VARIANTS[0]).forward([changed(), WRONG[what]()])


WRONG_BIASES = {
    "too few": np.zeros(64, np.float32),
    "too many": np.zeros(192, np.float32),
    "of doubles": np.zeros(128),
    "in two dimensions": np.zeros((2, 64), np.float32),
    "apart from each other": np.zeros(256, np.float32)[::2],
}


@pytest.mark.parametrize("what", WRONG_BIASES)
def test_wrong_biases_are_refused(what: str) -> None:
    rows = random_partial_rows(random.Random(0), SHAPE, 100, 3)
    native(SHAPE, VARIANTS[0]).forward([rows])
    with pytest.raises(ValueError, match="found biases"):
        native(SHAPE, VARIANTS[0]).forward([dataclasses.replace(rows, biases=WRONG_BIASES[what])])


def test_wrong_room_for_queries_is_refused() -> None:
    right = torch.empty(2, 3, 2, 64, dtype=SHAPE.dtype)
    native(SHAPE, VARIANTS[0]).forward([changed()], queries=right)
    assert torch.isfinite(right).all()
    for wrong in (right[:1], right[:, :2], right.float(), right.transpose(1, 2).contiguous().transpose(1, 2)):
        with pytest.raises(ValueError, match="found room for queries"):
            native(SHAPE, VARIANTS[0]).forward([changed()], queries=wrong)


def test_what_lies_behind_a_tail_is_never_looked_at() -> None:
    rows = with_tail(lambda tails: tails[:, 10:].fill(2**30))
    want = native(SHAPE, VARIANTS[0]).forward([changed()])[1]
    found = native(SHAPE, VARIANTS[0]).forward([rows])[1]
    assert found is not None
    assert want is not None
    assert torch.equal(found, want)


def test_a_call_without_rows_or_with_a_wrong_state_is_refused() -> None:
    decoder = native(SHAPE, VARIANTS[0])
    with pytest.raises(ValueError, match="no rows"):
        decoder.forward([])
    with pytest.raises(ValueError, match="no state"):
        decoder.forward([changed()], layers=range(1))
    with pytest.raises(ValueError, match="expected float32"):
        decoder.forward([changed()], layers=range(1), state=torch.zeros(2, SHAPE.hidden))
    for layers in (range(0), range(1, 4), range(0, 2, 2), range(-1, 1)):
        with pytest.raises(ValueError, match="layers"):
            decoder.forward([changed()], layers=layers, state=torch.zeros(3, SHAPE.hidden))
    with pytest.raises(ValueError, match="hidden states"):
        decoder.logits(torch.zeros(3, SHAPE.hidden))


def test_attention_of_wrong_shapes_is_refused() -> None:
    team = Team(load_library(VARIANTS[0]), 1)

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return native_attention(team, [changed()], 0, query, key, value, 0.1)

    right = [torch.zeros(3, heads, 64, dtype=SHAPE.dtype) for heads in (2, 1, 1)]
    assert attend(*right).shape == right[0].shape
    for number in range(3):
        for wrong in (right[number].float(), right[number][:2], right[number][..., :48]):
            with pytest.raises(ValueError, match="found"):
                attend(*(wrong if each == number else right[each] for each in range(3)))
    with pytest.raises(ValueError, match="found"):
        attend(*(each.repeat(2, 1, 1) for each in right))


def test_weights_that_do_not_fit_together_are_refused() -> None:
    weights = random_weights(SHAPE)
    layer = weights.layers[0]
    for name in ("query", "value", "output", "down"):
        wrong = dataclasses.replace(layer, **{name: Linear(getattr(layer, name).weight[1:])})
        with pytest.raises(ValueError, match=name):
            NativeDecoder(dataclasses.replace(weights, layers=[layer, wrong]), 1, VARIANTS[0])
    with pytest.raises(ValueError, match="1 layers"):
        NativeDecoder(dataclasses.replace(weights, layers=[layer]), 1, VARIANTS[0])
    with pytest.raises(ValueError, match="0 threads"):
        NativeDecoder(weights, 0, VARIANTS[0])


WRONG_SIZES = {"head_dim": 72, "hidden": 40, "intermediate": 100, "num_heads": 3, "vocab": 0, "dtype": torch.half}


@pytest.mark.parametrize("name", WRONG_SIZES)
def test_sizes_that_the_kernels_do_not_take_are_refused(name: str) -> None:
    sizes = DecoderSizes(2, 64, 4, 2, 64, 96, 100, 1e-5, 0.125, torch.bfloat16)
    with pytest.raises(ValueError, match="found"):
        dataclasses.replace(sizes, **{name: WRONG_SIZES[name]})
