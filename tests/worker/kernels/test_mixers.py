"""Layers with state or convolution have equal bits in all builds."""

from __future__ import annotations

import dataclasses
import random

import pytest
import torch
from torch import Tensor

from swiftbatch.worker.exactness.forward_comparisons import random_tree
from swiftbatch.worker.forward.tile_packing import known_rows, tree_rows
from swiftbatch.worker.kernels.decoder_weights import DecoderWeights
from swiftbatch.worker.kernels.layer_specs import RecurrentForm, RecurrentSizes, RecurrentWeights
from swiftbatch.worker.kernels.native_decoder import NativeDecoder
from swiftbatch.worker.kernels.quantized_weights import Linear, PackedLinear
from swiftbatch.worker.kv.cache_rows import CacheShape
from swiftbatch.worker.kv.full_cache import FullKVCache, new_cache_of
from tests.worker.kernels.kernel_parts import BF16, FLOAT32, VARIANTS, Shape, needs_kernels, random_weights
from tests.worker.kernels.quantized_parts import random_packed

pytestmark = needs_kernels

HIDDEN = 48
SIZES = {
    "delta net": RecurrentSizes(RecurrentForm.DELTA_NET, 6, 3, 32, 16, 288, 4, norm_width=16, epsilon=1e-6),
    "Mamba-2": RecurrentSizes(
        RecurrentForm.STATE_SPACE, 4, 2, 16, 48, 256, 4, norm_width=96, epsilon=1e-5, least_step=0.05, most_step=0.8
    ),
    "Mamba-2 without norm beside attention": RecurrentSizes(
        RecurrentForm.STATE_SPACE, 20, 1, 16, 16, 352, 2, most_step=float("inf"), in_scale=0.7, out_scale=1.3
    ),
    "convolution": RecurrentSizes(RecurrentForm.CONVOLUTION, 0, 0, 0, 0, 48, 3),
}
SCALES = ("attention_in_scale", "key_scale", "attention_out_scale", "gate_scale", "down_scale")
ABSENT = dict.fromkeys(("query", "key", "value", "output"))


def weights(name: str, dtype: torch.dtype = FLOAT32, packs: bool = False, unpacks: bool = False) -> DecoderWeights:
    """Make one layer with a mixer, and one with gated attention."""
    plain, sizes = random_weights(Shape(dtype=dtype, head_dim=64, num_kv_heads=2)), SIZES[name]
    torch.manual_seed(3)
    shapes = {role: (columns, HIDDEN) for role, columns in sizes.columns().items()} | {"output": (HIDDEN, sizes.width)}
    linears: dict[str, Linear | PackedLinear] = {
        role: Linear(torch.randn(shape).div(shape[1] ** 0.5).to(dtype), torch.randn(shape[0]).to(dtype))
        for role, shape in shapes.items()
    }
    if packs and shapes["gates"][0] % 16 == 0:
        matrix = random_packed("int8", shapes["gates"], 16, dtype=dtype)
        linears["gates"] = PackedLinear(matrix) if not unpacks else Linear(matrix.dequantized())
    numbers = {role: torch.randn(shape) for role, shape in sizes.float_shapes().items()}
    if not sizes.num_heads:
        numbers = {role: numbers[role] for role in ("taps", "tap_bias")}
    first, second = plain.layers
    assert second.query is not None
    attends = "beside attention" in name
    own = {"head_gate": first.query} if attends else ABSENT
    mixing = dataclasses.replace(first, **own, mixer=RecurrentWeights(sizes, linears, numbers))  # type: ignore[arg-type]
    gated = dataclasses.replace(second, head_gate=second.query)
    scales = {each: 0.5 + 0.3 * number for number, each in enumerate(SCALES)} if attends else {}
    whole = dataclasses.replace(plain.sizes, gates_heads=True, **scales)  # type: ignore[arg-type]
    return dataclasses.replace(plain, sizes=whole, layers=[mixing, gated])


def new_cache(made: DecoderWeights) -> FullKVCache:
    return new_cache_of(CacheShape.of(made, torch.device("cpu")), 300)


def outputs(made: DecoderWeights, variant: str, num_threads: int = 1) -> Tensor:
    """Return hidden states and states of two sequences' prompts, trees and single rows."""
    rng, caches = random.Random(2), [new_cache(made) for _ in range(2)]
    decoder, found = NativeDecoder(made, num_threads, variant), []
    for cache, length in zip(caches, (100, 40), strict=True):
        hidden, _ = decoder.forward(known_rows(cache, [rng.randrange(90) for _ in range(length)]))
        cache.advance(length)
        found.append(hidden)
    for size in (9, 0, 12):
        trees = [random_tree(rng, size, 8, 90) for _ in caches]
        hidden, _ = decoder.forward([tree_rows(cache, 5, tree) for cache, tree in zip(caches, trees, strict=True)])
        for cache in caches:
            cache.commit([0] if size else [])
        found.append(hidden)
    found += [layer.state.flatten(1) for cache in caches for layer in cache.layer_states.layers if layer.state.numel()]
    return torch.cat([each.float().flatten() for each in found if each is not None])


@pytest.mark.parametrize("name", SIZES)
def test_instruction_sets_and_threads_give_the_same_bits(name: str) -> None:
    expected = outputs(weights(name), VARIANTS[0])
    assert expected.isfinite().all()
    for variant in VARIANTS[1:]:
        assert torch.equal(outputs(weights(name), variant), expected)
    assert torch.equal(outputs(weights(name), VARIANTS[0], 3), expected)


@pytest.mark.parametrize("name", ["delta net", "convolution"])
@pytest.mark.parametrize("dtype", [BF16, FLOAT32])
def test_packed_weights_give_the_bits_of_their_numbers(name: str, dtype: torch.dtype) -> None:
    ours = outputs(weights(name, dtype, packs=True), VARIANTS[0])
    assert torch.equal(ours, outputs(weights(name, dtype, packs=True, unpacks=True), VARIANTS[0]))
    assert not torch.equal(ours, outputs(weights(name, dtype), VARIANTS[0]))


def test_rows_that_do_not_fit_their_states_are_refused() -> None:
    made = weights("delta net")
    decoder, cache = NativeDecoder(weights("delta net"), 1, VARIANTS[0]), new_cache(made)
    rows = tree_rows(cache, 5, random_tree(random.Random(1), 6, 3, 90))
    for changed, words in (
        (dataclasses.replace(rows, first_entry=1), "behind a state at 0"),
        (dataclasses.replace(rows, tail_entries=rows.tail_entries + 3), "through a later row"),
    ):
        with pytest.raises(ValueError, match=words):
            decoder.forward([changed])
    with pytest.raises(ValueError, match="a cache without states"):
        decoder.forward([tree_rows(FullKVCache(cache.shape, 300), 5, random_tree(random.Random(1), 2, 2, 90))])


def test_mixers_that_do_not_fit_are_refused() -> None:
    made = weights("Mamba-2")
    first = made.layers[0]
    assert first.mixer is not None
    without = dataclasses.replace(first.mixer, floats={})
    for changed, words in (
        (dataclasses.replace(first, mixer=without), "found the numbers"),
        (dataclasses.replace(first, query=made.layers[1].query), "a part of attention"),
        (dataclasses.replace(made.layers[1], head_gate=None), "attention without gates"),
    ):
        with pytest.raises(ValueError, match=words):
            NativeDecoder(dataclasses.replace(made, layers=[changed, made.layers[1]]), 1, VARIANTS[0])
    for change in ({"value_dim": 24}, {"num_heads": 3}, {"num_channels": 64}, {"norm_width": 80}, {"conv_width": 0}):
        with pytest.raises(ValueError, match="found"):
            dataclasses.replace(SIZES["Mamba-2"], **change)


def with_nan(numbers: Tensor) -> Tensor:
    damaged = numbers.clone()
    damaged.flatten()[-1] = torch.nan
    return damaged


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", SIZES)
def test_a_number_that_is_lost_shows_wherever_it_stands(name: str) -> None:
    whole = weights(name)
    mixing, gated = whole.layers
    assert mixing.mixer is not None
    assert isinstance(gated.head_gate, Linear)
    layers = {"head gate": (mixing, dataclasses.replace(gated, head_gate=Linear(with_nan(gated.head_gate.weight))))}
    for role, linear in mixing.mixer.linears.items():
        assert isinstance(linear, Linear)
        linears = mixing.mixer.linears | {role: Linear(with_nan(linear.weight), linear.bias)}
        mixer = dataclasses.replace(mixing.mixer, linears=linears)
        layers[role] = (dataclasses.replace(mixing, mixer=mixer), gated)
    for role in SIZES[name].needed() | {"tap_bias"} | ({"scales"} if SIZES[name].num_heads else set()):
        floats = mixing.mixer.floats | {role: with_nan(mixing.mixer.floats[role])}
        mixer = dataclasses.replace(mixing.mixer, floats=floats)
        layers[role] = (dataclasses.replace(mixing, mixer=mixer), gated)
    for role, damaged in layers.items():
        for variant in VARIANTS:
            made = dataclasses.replace(whole, layers=list(damaged))  # a decoder takes them out
            cache = new_cache(made)
            hidden, _ = NativeDecoder(made, 1, variant).forward(known_rows(cache, list(range(9))))
            assert torch.isnan(hidden[-1]).any(), (role, variant)
