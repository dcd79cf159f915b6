"""CUDA experts choose exactly, row by row."""

from __future__ import annotations

import dataclasses
import random

import numpy as np
import pytest
import torch
from torch import Tensor

from swiftbatch.worker.kernels.cuda.gemm import triton_linear
from swiftbatch.worker.kernels.cuda.moe_gemm import CudaExperts
from swiftbatch.worker.kernels.cuda.moe_router import TILE, num_tiles
from swiftbatch.worker.kernels.cuda.stacked_weights import stacked_experts
from swiftbatch.worker.kernels.decoder_weights import ExpertWeights
from swiftbatch.worker.kernels.kernel_sizes import NUM_ROWS
from swiftbatch.worker.kernels.layer_specs import Activation, Routing, Score
from swiftbatch.worker.kernels.quantized_weights import Code, Linear, PackedLinear, linear_from
from tests.worker.kernels.cuda.arenas import normal
from tests.worker.kernels.cuda.launches import launched
from tests.worker.kernels.expert_parts import EXPERT_SHAPES, ExpertShape, random_experts
from tests.worker.kernels.kernel_parts import BF16, FLOAT32
from tests.worker.kernels.packed_parts import random_packed
from tests.worker.kernels.plain_parts import plain_linear
from tests.worker.kernels.reference import ACTIVATIONS
from tests.worker.kernels.reference_experts import reference_choice, reference_experts
from tests.worker.kernels.test_experts import ROUTINGS

HIDDEN = 48
CPU = torch.device("cpu")
DTYPES = pytest.mark.parametrize("dtype", [BF16, FLOAT32], ids=str)


def table_of(rows: list[int]) -> Tensor:
    table = torch.zeros(NUM_ROWS, 5, dtype=torch.int32)
    table[rows, 2] = 1
    return table


def weights_of(shape: ExpertShape, dtype: torch.dtype, hidden: int = HIDDEN) -> ExpertWeights:
    generator = torch.Generator().manual_seed(4)

    def normal(*sizes: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(sizes, generator=generator) * scale).to(dtype)

    return random_experts(shape, hidden, normal)


def kernels_of(weights: ExpertWeights, dtype: torch.dtype, hidden: int = HIDDEN) -> CudaExperts:
    """Make experts whose buffers are cleared."""
    made = CudaExperts([stacked_experts(weights, CPU)], hidden, dtype, Activation.SILU, CPU, triton_linear)
    for buffer in vars(made).values():
        if isinstance(buffer, Tensor):
            buffer.fill_(torch.nan if buffer.is_floating_point() else 10**6)
    return made


def run(weights: ExpertWeights, rows: Tensor, places: list[int], shared: Tensor | None = None) -> Tensor:
    num_rows, hidden = rows.shape
    normed, out = (torch.full((NUM_ROWS, hidden), torch.nan, dtype=rows.dtype) for _ in range(2))
    normed[places] = rows
    if shared is not None:
        out[places] = shared
    made, stacked = kernels_of(weights, rows.dtype, hidden), stacked_experts(weights, CPU)
    made.choose(table_of(places), stacked, normed)
    for launch in made.launches(table_of(places), stacked, normed, out, shared is not None, None):
        launch()
    assert out.isnan().all(dim=1).sum() == NUM_ROWS - num_rows, "padding stays as it is"
    return out[places]


@pytest.mark.sample(2)
@DTYPES
@pytest.mark.parametrize("name", EXPERT_SHAPES)
def test_experts_add_what_the_reference_adds(name: str, dtype: torch.dtype) -> None:
    shape = EXPERT_SHAPES[name]
    weights, rows = weights_of(shape, dtype), normal(12, HIDDEN, dtype=dtype)
    shared = normal(12, HIDDEN, dtype=dtype, seed=1) if shape.shared_intermediate else None
    found = run(weights, rows, random.Random(1).sample(range(NUM_ROWS), 12), shared)
    expected = reference_experts(
        weights, rows.float(), ACTIVATIONS[Activation.SILU], lambda each: each.to(dtype).float(),
        None if shared is None else shared.float(),
    )  # fmt: skip
    assert torch.allclose(found.float(), expected, rtol=0, atol=2e-6 if dtype == FLOAT32 else 0.03)
    assert dtype == FLOAT32 or (found.float() != expected).float().mean() < 0.02


def told(
    routing: Routing,
    router: Tensor,
    choice_bias: Tensor | None,
    states: Tensor,
    choice_scales: Tensor | None = None,
) -> Tensor:
    """Return weights `[num_rows, num_experts]`."""
    dtype, hidden = states.dtype, states.shape[1]
    weights = weights_of(ExpertShape(routing, intermediate=16), dtype, hidden)
    own = {"router": Linear(router), "choice_bias": choice_bias, "choice_scales": choice_scales}
    weights = dataclasses.replace(weights, **own)  # type: ignore[arg-type]
    experts, made = stacked_experts(weights, CPU), kernels_of(weights, dtype, hidden)
    places = random.Random(2).sample(range(NUM_ROWS), len(states))
    normed = torch.full((NUM_ROWS, hidden), torch.nan, dtype=dtype)
    normed[places] = states
    with np.errstate(all="ignore"):  # a GPU reports no overflow
        made.choose(table_of(places), experts, normed)
    marks = made._marks[: NUM_ROWS * routing.num_experts].view(NUM_ROWS, -1)
    assert not marks[[row for row in range(NUM_ROWS) if row not in places]].any()
    chosen = made._weights.view(NUM_ROWS, routing.num_chosen)[places]
    assert is_sorted(made, routing, marks)
    return torch.zeros(len(states), 1 + routing.num_experts).scatter(1, order_of(marks[places]), chosen)[:, 1:]


def test_scales_of_experts_multiply_the_weights_of_those_that_a_row_chose() -> None:
    routing = Routing(24, 5, Score.SOFTMAX, rounds_weights=False)
    router, states = normal(24, HIDDEN, dtype=FLOAT32, seed=1), normal(12, HIDDEN, dtype=FLOAT32)
    scales = 1 + normal(24, dtype=FLOAT32, seed=2).abs()
    assert torch.equal(told(routing, router, None, states, scales), told(routing, router, None, states) * scales)


def order_of(marks: Tensor) -> Tensor:
    return torch.stack([(row.argsort(stable=True)[row.sort(stable=True).values > 0]) + 1 for row in marks])


def is_sorted(made: CudaExperts, routing: Routing, marks: Tensor) -> bool:
    """Return whether each expert's pairs are in row order, in as few tiles as possible."""
    pairs = made._tile_pairs.view(-1, TILE)
    expected = []
    for expert in range(routing.num_experts):
        rows = marks[:, expert].nonzero().flatten()
        own = rows * routing.num_chosen + marks[rows, expert] - 1
        for part in own.split(TILE) if len(own) else ():
            expected.append((expert, part.tolist() + [-1] * (TILE - len(part))))
    used = int((made._tile_experts >= 0).sum())
    found = list(zip(made._tile_experts[:used].tolist(), pairs[:used].tolist(), strict=True))
    return found == expected and bool((made._tile_experts[used:] == -1).all())


@pytest.mark.sample(2)
@DTYPES
@pytest.mark.parametrize("name", ROUTINGS)
def test_choices_and_weights_are_the_reference_s_to_the_bit(name: str, dtype: torch.dtype) -> None:
    routing, numbers = ROUTINGS[name], torch.Generator().manual_seed(3)
    states = torch.randint(-8, 9, (16, 600), generator=numbers) / 8  # so that no sum rounds, nor parts of the depth
    router = torch.randint(-1, 2, (routing.num_experts, 600), generator=numbers) / 8
    choice_bias = torch.rand(routing.num_experts, generator=numbers) if routing.score == Score.SIGMOID else None
    choices, weights = reference_choice(routing, states @ router.T, choice_bias, lambda each: each.to(dtype).float())
    expected = torch.zeros(16, routing.num_experts).scatter(1, choices, weights)
    assert torch.equal(told(routing, router, choice_bias, states.to(dtype)), expected)


@pytest.mark.parametrize("score", Score)
def test_ties_go_to_the_lower_number(score: Score) -> None:
    routing = Routing(9, 3, score, num_groups=3, num_chosen_groups=2)
    found = told(routing, torch.zeros(9, HIDDEN), None, torch.zeros(2, HIDDEN))
    assert [each.nonzero().flatten().tolist() for each in found] == [[0, 1, 2]] * 2


@pytest.mark.parametrize("name", ROUTINGS)
def test_a_router_without_numbers_shows_and_ends_nothing(name: str) -> None:
    router = torch.randn(ROUTINGS[name].num_experts, HIDDEN)
    router[1, 3] = torch.nan
    assert told(ROUTINGS[name], router, None, torch.randn(3, HIDDEN)).isnan().any(dim=1).all()


def test_there_are_tiles_for_all_that_rows_may_choose() -> None:
    """All rows may choose one expert, all evenly, or as unevenly as possible."""
    for num_experts, num_chosen in ((1, 1), (8, 2), (128, 8), (60, 4), (512, 10), (20, 20)):
        most = 0
        for counted in range(1, num_experts + 1):  # experts with one row, while others have as many as possible
            left = NUM_ROWS * num_chosen - counted
            full, rest = divmod(max(left, 0), NUM_ROWS)
            most = max(most, counted + min(full, num_experts - counted) * NUM_ROWS // TILE + bool(rest))
        assert num_tiles(num_experts, num_chosen) >= min(most, NUM_ROWS * num_chosen)


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("gpt_oss", BF16),
        ("qwen2_moe", FLOAT32),
        pytest.param("qwen2_moe", BF16, marks=pytest.mark.slow),
        pytest.param("gpt_oss", FLOAT32, marks=pytest.mark.slow),
    ],
)
def test_a_row_has_its_bits_in_every_place_among_rows_of_other_experts(name: str, dtype: torch.dtype) -> None:
    shape = EXPERT_SHAPES[name]
    weights, rows = weights_of(shape, dtype), normal(NUM_ROWS, HIDDEN, dtype=dtype)
    shared = normal(NUM_ROWS, HIDDEN, dtype=dtype, seed=1) if shape.shared_intermediate else None
    together = run(weights, rows, list(range(NUM_ROWS)), shared)
    numbers = random.Random(7)
    for count in (1, 1, 5, 33):
        order, places = (numbers.sample(range(NUM_ROWS), count) for _ in range(2))
        found = run(weights, rows[order], places, None if shared is None else shared[order])
        assert torch.equal(found, together[order])


def test_a_row_has_its_bits_among_rows_that_all_choose_its_experts() -> None:
    weights, rows = weights_of(EXPERT_SHAPES["qwen3_moe"], BF16), normal(3, HIDDEN, dtype=BF16)
    alone = torch.cat([run(weights, row[None], [5]) for row in rows])
    found = run(weights, rows[[0, *[1] * 62, 2]], list(range(NUM_ROWS)))
    assert torch.equal(found, alone[[0, *[1] * 62, 2]])


FORMS: dict[str, tuple[Code, int, bool]] = {
    "FP8": ("e4m3", 0, False),
    "MXFP4": ("e2m1", 32, False),
    "NVFP4": ("e2m1", 16, False),
    "int4 with offsets": ("uint4", 32, True),
}


def packed(weights: ExpertWeights, code: Code, group: int, has_offsets: bool) -> ExpertWeights:
    def one(linear: object, number: int) -> PackedLinear:
        assert isinstance(linear, Linear)
        columns, depth = linear.weight.shape
        matrix = random_packed(code, columns, depth, group or depth, has_offsets=has_offsets)
        codes = matrix.codes.roll(number, 0)  # each expert has its own
        scales = matrix.scales / 64 if code == "e4m3" else matrix.scales  # its numbers reach 448
        made = linear_from(dataclasses.replace(matrix, codes=codes, scales=scales), linear.bias)
        assert isinstance(made, PackedLinear)
        return made

    parts = {f"{role}s": [one(each, 3 * number) for number, each in enumerate(found)]
             for role, found in weights.linears().items()}  # fmt: skip
    return dataclasses.replace(weights, **parts)  # type: ignore[arg-type]


def twin_of(weights: ExpertWeights) -> ExpertWeights:
    parts = {f"{role}s": [plain_linear(each) for each in found] for role, found in weights.linears().items()}
    return dataclasses.replace(weights, **parts)


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("form", "width"),
    [("FP8", 160), ("MXFP4", 160), ("int4 with offsets", 64), pytest.param("NVFP4", 64, marks=pytest.mark.slow)],
)
def test_packed_experts_have_the_bits_of_their_dequantized_twins(form: str, width: int) -> None:
    shape = dataclasses.replace(EXPERT_SHAPES["gpt_oss"], intermediate=width)
    weights = packed(weights_of(shape, BF16, 64), *FORMS[form])
    assert isinstance(stacked_experts(weights, CPU).gate_up, PackedLinear)
    rows, places = normal(9, 64, dtype=BF16), random.Random(3).sample(range(NUM_ROWS), 9)
    found = run(weights, rows, places)
    assert found.isfinite().all()
    assert torch.equal(found, run(twin_of(weights), rows, places))


def test_experts_of_several_forms_are_dequantized_and_some_biases_alone_are_refused() -> None:
    weights = weights_of(EXPERT_SHAPES["qwen3_moe"], BF16, 64)
    mixed = dataclasses.replace(packed(weights, "e2m1", 16, False), gates=weights.gates)
    stacked = stacked_experts(mixed, CPU)
    assert isinstance(stacked.gate_up, Linear)
    gates, ups = stacked.gate_up.weight.view(8, -1, 2, 64).unbind(2)
    assert torch.equal(gates, torch.stack([each.weight for each in weights.gates]))  # type: ignore[arg-type]
    assert torch.equal(ups, torch.stack([plain_linear(each).weight for each in mixed.ups]))
    first = dataclasses.replace(weights.gates[0], bias=torch.zeros(48, dtype=BF16))
    with pytest.raises(ValueError, match="found 1 biases of experts, expected 16 or none"):
        stacked_experts(dataclasses.replace(weights, gates=[first, *weights.gates[1:]]), CPU)


def test_experts_are_six_launches_of_one_grid_whatever_rows_choose(monkeypatch: pytest.MonkeyPatch) -> None:
    weights, rows = weights_of(EXPERT_SHAPES["qwen3_moe"], FLOAT32), normal(NUM_ROWS, HIDDEN, dtype=FLOAT32)
    experts, made, out = stacked_experts(weights, CPU), kernels_of(weights, FLOAT32), torch.zeros(NUM_ROWS, HIDDEN)
    names = ["multiply_router", "choose_row", "sort_choices", "multiply_tile", "multiply_tile", "sum_choices"]
    for real in ([3], list(range(NUM_ROWS))):
        table = table_of(real)

        def forward(table: Tensor = table) -> None:
            made.choose(table, experts, rows)
            for launch in made.launches(table, experts, rows, out, has_shared=False, peers=None):
                launch()

        assert launched(monkeypatch, forward) == names
