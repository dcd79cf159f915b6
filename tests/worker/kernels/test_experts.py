"""Experts in the kernels choose exactly and by row."""

from __future__ import annotations

import dataclasses
import functools
import random

import pytest
import torch
from torch import Tensor

from swiftbatch.worker.forward.tile_packing import tree_rows
from swiftbatch.worker.kernels.decoder_weights import DecoderWeights, LayerWeights
from swiftbatch.worker.kernels.layer_specs import Routing, Score
from swiftbatch.worker.kernels.native_decoder import NativeDecoder
from swiftbatch.worker.kernels.quantized_weights import Linear
from swiftbatch.worker.sampling.draft_tree import DraftTree
from tests.worker.kernels.expert_parts import EXPERT_SHAPES, ExpertShape
from tests.worker.kernels.kernel_parts import (
    BF16,
    FLOAT32,
    VARIANTS,
    Shape,
    native,
    needs_kernels,
    random_cache,
    random_weights,
    whole,
)
from tests.worker.kernels.reference_experts import reference_choice

pytestmark = needs_kernels

HIDDEN = 48
ROUTINGS = {
    "softmax": Routing(20, 4, Score.SOFTMAX),
    "softmax as it is": Routing(20, 20, Score.SOFTMAX, is_normalised=False),
    "sigmoid in groups": Routing(
        24, 5, Score.SIGMOID, scale=2.5, least_sum=1e-20, num_groups=6, num_chosen_groups=2, rounds_logits=False
    ),
    "softmax in groups, by the best of each": Routing(
        24, 4, Score.SOFTMAX, is_normalised=False, num_groups=6, num_chosen_groups=3, num_best_of_group=1
    ),
    "sigmoid, no rounding": Routing(24, 1, Score.SIGMOID, rounds_logits=False, rounds_weights=False),
    "softmax of the chosen": Routing(7, 3, Score.SOFTMAX_OF_CHOSEN, is_normalised=False),
    "sigmoid of the chosen": Routing(20, 4, Score.SIGMOID_OF_CHOSEN),
    "sparse mixer": Routing(16, 3, Score.SPARSE_MIXER, is_normalised=False, jitter=0.2),
}


def telling_weights(routing: Routing, dtype: torch.dtype, router: Tensor, choice_bias: Tensor | None) -> DecoderWeights:
    """Expert number n only adds a one at place n."""
    count = routing.num_experts
    weights = random_weights(Shape(hidden=HIDDEN, dtype=dtype, experts=ExpertShape(routing)))
    layer = weights.layers[1]
    assert layer.experts is not None
    nothing = Linear(torch.zeros(HIDDEN, layer.output.weight.shape[1], dtype=dtype))
    downs = [
        Linear(torch.zeros_like(down.weight), torch.eye(HIDDEN, dtype=dtype)[number])  # type: ignore[arg-type]
        for number, down in enumerate(layer.experts.downs)
    ]
    assert len(downs) == count
    experts = dataclasses.replace(layer.experts, router=Linear(router), downs=downs, choice_bias=choice_bias)
    one = dataclasses.replace(layer, output=nothing, mlp_norm=None, experts=experts)
    return dataclasses.replace(weights, sizes=dataclasses.replace(weights.sizes, num_layers=1), layers=[one])


def told(weights: DecoderWeights, variant: str, states: Tensor) -> Tensor:
    """Return all experts' weights for rows of these states."""
    decoder, groups = NativeDecoder(weights, 2, variant), []
    for _ in range(len(states)):
        groups.append(tree_rows(random_cache(Shape(dtype=weights.sizes.dtype), 10), 1, DraftTree()))
    out = states.clone()
    decoder.run(groups, range(1), out)
    return out - states


@pytest.mark.sample(3)
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("dtype", [BF16, FLOAT32], ids=["bf16", "float32"])
@pytest.mark.parametrize("name", ROUTINGS)
def test_choices_and_weights_are_the_reference_s_to_the_bit(name: str, dtype: torch.dtype, variant: str) -> None:
    routing, numbers = ROUTINGS[name], torch.Generator().manual_seed(3)
    states = torch.randint(-8, 9, (40, HIDDEN), generator=numbers) / 8  # so that no sum rounds
    states[:, : routing.num_experts] = 0
    router = torch.randint(-8, 9, (routing.num_experts, HIDDEN), generator=numbers) / 8
    choice_bias = torch.rand(routing.num_experts, generator=numbers) if routing.score == Score.SIGMOID else None
    choices, weights = reference_choice(routing, states @ router.T, choice_bias, lambda each: each.to(dtype).float())
    expected = torch.zeros(40, HIDDEN).scatter(1, choices, weights.to(dtype).float())
    assert torch.equal(told(telling_weights(routing, dtype, router, choice_bias), variant, states), expected)


@pytest.mark.parametrize("score", Score)
def test_ties_go_to_the_lower_number(score: Score) -> None:
    routing = Routing(9, 3, score)
    found = told(telling_weights(routing, FLOAT32, torch.zeros(9, HIDDEN), None), VARIANTS[0], torch.zeros(2, HIDDEN))
    assert [each.nonzero().flatten().tolist() for each in found] == [[0, 1, 2]] * 2


def test_a_router_that_gives_no_numbers_ends_no_process() -> None:
    weights = telling_weights(Routing(9, 3, Score.SIGMOID), FLOAT32, torch.full((9, HIDDEN), float("nan")), None)
    assert told(weights, VARIANTS[0], torch.ones(1, HIDDEN)).isnan().all()


@functools.cache
def rows_alone(shape: Shape, variant: str, num_rows: int) -> tuple[Tensor, Tensor]:
    """Return hidden states and logits of single-row calls."""
    found = [
        whole(native(shape, variant).forward([tree_rows(random_cache(shape, 5 + row % 7), row, DraftTree())]))
        for row in range(num_rows)
    ]
    return torch.cat([hidden for hidden, _ in found]), torch.cat([logits for _, logits in found])


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("name", ["qwen2_moe", "gpt_oss"])
def test_a_row_has_its_bits_in_every_place_among_rows_of_other_experts(name: str, variant: str) -> None:
    shape, num_rows = Shape(experts=EXPERT_SHAPES[name]), 45
    hidden, logits = rows_alone(shape, variant, num_rows)
    numbers = random.Random(7)
    for count in (2, 9, num_rows):
        order = numbers.sample(range(num_rows), count)
        groups = [tree_rows(random_cache(shape, 5 + row % 7), row, DraftTree()) for row in order]
        found = whole(native(shape, variant, 2).forward(groups))
        assert torch.equal(found[0], hidden[order])
        assert torch.equal(found[1], logits[order])


def test_rows_of_more_than_one_block_of_experts_have_the_bits_of_rows_alone() -> None:
    shape, variant = Shape(experts=EXPERT_SHAPES["glm4_moe"]), VARIANTS[0]
    hidden, _ = rows_alone(shape, variant, 12)
    order = [random.Random(row).randrange(12) for row in range(300)]
    groups = [tree_rows(random_cache(shape, 5 + row % 7), row, DraftTree()) for row in order]
    assert torch.equal(whole(native(shape, variant, 2).forward(groups))[0], hidden[order])


def changed(layer: LayerWeights, **changes: object) -> LayerWeights:
    assert layer.experts is not None
    return dataclasses.replace(layer, experts=dataclasses.replace(layer.experts, **changes))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"gates": []}, "0 matrices gate of experts, expected 8"),
        ({"choice_bias": torch.zeros(7)}, "bias of choices"),
        ({"router": Linear(torch.zeros(8, HIDDEN, dtype=BF16))}, "router of torch.bfloat16"),
    ],
)
def test_experts_that_would_crash_the_kernels_are_refused(changes: dict[str, object], words: str) -> None:
    weights = random_weights(Shape(experts=EXPERT_SHAPES["qwen3_moe"]))
    layers = [weights.layers[0], changed(weights.layers[1], **changes)]
    with pytest.raises(ValueError, match=words):
        NativeDecoder(dataclasses.replace(weights, layers=layers), 1, VARIANTS[0])


def test_numbers_of_a_choice_that_cannot_be_are_refused() -> None:
    for numbers in ({"num_chosen": 9}, {"num_chosen": 0}, {"num_experts": 2000}, {"num_groups": 3}):
        with pytest.raises(ValueError, match="found"):
            Routing(**{"num_experts": 8, "num_chosen": 2, "score": Score.SOFTMAX} | numbers)  # type: ignore[arg-type]


@needs_kernels
@pytest.mark.parametrize("name", ROUTINGS)
def test_a_router_without_numbers_shows(name: str) -> None:
    router = torch.randn(ROUTINGS[name].num_experts, HIDDEN)
    router[1, 3] = torch.nan
    weights = telling_weights(ROUTINGS[name], FLOAT32, router, None)
    states = torch.randn(3, HIDDEN)
    assert torch.isnan(told(weights, VARIANTS[0], states)).all(dim=1).all()


@needs_kernels
@pytest.mark.parametrize("name", ["softmax", "softmax of the chosen", "sparse mixer"])
def test_a_router_whose_numbers_have_no_end_shows(name: str) -> None:
    router = torch.randn(ROUTINGS[name].num_experts, HIDDEN)
    router[1, 3] = torch.inf
    weights = telling_weights(ROUTINGS[name], FLOAT32, router, None)
    states = torch.randn(3, HIDDEN).abs()  # expert 1 has an infinite score in all rows
    assert torch.isnan(told(weights, VARIANTS[0], states)).any(dim=1).all()


@needs_kernels
def test_a_bias_of_choices_without_numbers_shows() -> None:
    routing = ROUTINGS["sigmoid in groups"]
    bias = torch.zeros(routing.num_experts)
    bias[5] = torch.nan
    weights = telling_weights(routing, FLOAT32, torch.randn(routing.num_experts, HIDDEN), bias)
    assert torch.isnan(told(weights, VARIANTS[0], torch.randn(3, HIDDEN))).all(dim=1).all()


@needs_kernels
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("name", EXPERT_SHAPES)
@pytest.mark.parametrize("part", ["gates", "ups"])
def test_experts_without_numbers_show(name: str, part: str, variant: str) -> None:
    shape = Shape(experts=EXPERT_SHAPES[name])
    weights = random_weights(shape)
    experts = weights.layers[1].experts
    assert experts is not None
    lost = [
        dataclasses.replace(each, weight=torch.full_like(each.weight, torch.nan)) for each in getattr(experts, part)
    ]
    made = dataclasses.replace(weights, layers=[weights.layers[0], changed(weights.layers[1], **{part: lost})])
    hidden, _ = NativeDecoder(made, 1, variant).forward([tree_rows(random_cache(shape, 5), 3, DraftTree())])
    assert torch.isnan(hidden).all()


@needs_kernels
@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_with_a_cap_show_that_they_are_none(variant: str) -> None:
    shape = Shape(caps=(3.0, 20.0))
    weights = random_weights(shape)
    lost = dataclasses.replace(
        weights.layers[1], output=Linear(torch.full_like(weights.layers[1].output.weight, torch.nan))
    )
    made = dataclasses.replace(weights, layers=[weights.layers[0], lost])
    _, logits = NativeDecoder(made, 1, variant).forward([tree_rows(random_cache(shape, 5), 3, DraftTree())])
    assert torch.isnan(logits).all()
