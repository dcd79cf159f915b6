"""The whole CUDA decoder has the reference's logits."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from torch import Tensor

from swiftbatch.jobs.run.run_records import LinearName
from swiftbatch.worker.kernels.cuda.cuda_decoder import CudaDecoder
from swiftbatch.worker.kernels.cuda.device_caches import DeviceCaches
from swiftbatch.worker.kernels.cuda.stacked_weights import stacked_weights
from swiftbatch.worker.kernels.gpu_kernel_choice import CudaKernels
from swiftbatch.worker.kernels.quantized_weights import Linear
from tests.worker.kernels.cuda.arenas import CAPACITY, NAN, Arena, arena_of, random_arena, random_rows
from tests.worker.kernels.cuda.launches import launched
from tests.worker.kernels.kernel_parts import (
    BF16,
    FLOAT32,
    LATENTS,
    OTHER_FORMS,
    WITH_EXPERTS,
    Shape,
    chain,
    random_partial_rows,
    random_weights,
    whole,
)
from tests.worker.kernels.reference import ReferenceDecoder

pytestmark = pytest.mark.long

if TYPE_CHECKING:
    from swiftbatch.worker.kernels.row_tables import Rows

NUM_POSITIONS = 6000
CPU = torch.device("cpu")
SIZES = (3, 2, 6, 1)  # of trees
LLAMA = Shape(dtype=FLOAT32)
KINDS = {
    "qwen2, float32": (Shape(num_kv_heads=2, group=1, has_bias=True, is_tied=False, dtype=FLOAT32), "triton"),
    "qwen3, float32": (Shape(head_dim=96, group=3, has_qk_norm=True, dtype=FLOAT32), "cublas"),
    "llama, bfloat16": (Shape(group=4, is_tied=False), "triton"),
    "granite, bfloat16": (Shape(is_scaled=True), "triton"),
    "granite, float32": (Shape(is_scaled=True, dtype=FLOAT32), "triton"),
    "mistral, float32": (Shape(dtype=FLOAT32, windows=(40, 130), has_other_angles=True), "triton"),
    "mistral, bfloat16": (Shape(group=4, windows=(70, None)), "triton"),
    "all at once, bfloat16": (Shape(head_dim=80, group=8, has_bias=True, has_qk_norm=True), "triton"),
    **{name: (shape, "triton") for name, shape in OTHER_FORMS.items()},
    # only hybrids have experts without gates, and their mixers lack GPU kernels
    **{name: (shape, "triton") for name, shape in WITH_EXPERTS.items() if shape.has_gates},
    **{f"latent, {shape.dtype}": (shape, "triton") for shape in LATENTS},
}


def decoder_of(arena: Arena, linear: LinearName = "cublas") -> CudaDecoder:
    weights = stacked_weights(random_weights(arena.shape), CPU)
    return CudaDecoder(weights, DeviceCaches(arena.buffer, NUM_POSITIONS), CudaKernels(linear=linear))


def upload(decoder: CudaDecoder, sequences: Sequence[tuple[Rows, int]], pages: Sequence[Sequence[int]] = ()) -> None:
    buffer = np.empty(decoder.layout.size, dtype=np.int32)
    decoder.layout.fill(buffer, sequences, pages)
    decoder.table_buffer.copy_(torch.from_numpy(buffer))


def run(
    decoder: CudaDecoder,
    sequences: Sequence[tuple[Rows, int]],
    tap: Callable[[int, Tensor], None] | None = None,
    pages: Sequence[Sequence[int]] = (),
) -> tuple[Tensor, Tensor]:
    """Return the real rows' hidden states and logits."""
    upload(decoder, sequences, pages)
    decoder.hidden.fill_(NAN)
    decoder.logits.fill_(NAN)
    decoder.forward(tap)
    num_rows = sum(len(rows) for rows, _ in sequences)
    return decoder.hidden[:num_rows].clone(), decoder.logits[:num_rows].clone()


def is_near(found: Tensor, expected: Tensor, dtype: torch.dtype) -> bool:
    bound = 2e-6 if dtype == FLOAT32 else 0.03
    return bool((found.float() - expected.float()).abs().max() <= bound * expected.float().abs().max())


IN_BOTH = {kind for kind in KINDS if f"{kind} in float32" in KINDS} | {"granite, bfloat16"}
SAID_BY_OTHERS = {*IN_BOTH - {"gemma2"}, "mistral, bfloat16", "llama, bfloat16"}


@pytest.mark.parametrize(
    "kind", [pytest.param(k, marks=pytest.mark.slow if k in SAID_BY_OTHERS else ()) for k in KINDS]
)
def test_trees_of_several_sequences_are_as_in_the_reference(kind: str) -> None:
    shape, linear = KINDS[kind]
    lengths, sizes = ((5, 64, 100, 300), SIZES) if kind == "qwen2, float32" else ((64, 300), (2, 4))
    arena = random_arena(shape, lengths)
    other = arena.copy()
    found = run(decoder_of(arena, linear), random_rows(random.Random(1), arena, sizes))
    expected_rows = [rows for rows, _ in random_rows(random.Random(1), other, sizes)]
    expected = whole(ReferenceDecoder(random_weights(shape)).forward(expected_rows))
    for mine, its in zip(found, expected, strict=True):
        assert is_near(mine, its, shape.dtype)
    is_written = ~other.buffer.isnan()
    assert torch.equal(is_written, ~arena.buffer.isnan())
    assert is_near(arena.buffer[is_written], other.buffer[is_written], shape.dtype)


def test_a_text_read_block_by_block_is_as_in_the_reference() -> None:
    arena = arena_of(LLAMA, torch.full((2, 2, 1, 1, CAPACITY, 64), NAN), [0])
    other, decoder = arena.copy(), decoder_of(arena)
    reference = ReferenceDecoder(random_weights(LLAMA))
    tokens = [7 * each % LLAMA.vocab for each in range(70)]
    for block in (tokens[:64], tokens[64:]):
        found = run(decoder, [(chain(arena.caches[0], block), 0)])
        expected = whole(reference.forward([chain(other.caches[0], block)]))
        assert is_near(found[1], expected[1], FLOAT32)
        arena.caches[0].advance(len(block))
        other.caches[0].advance(len(block))


def test_rows_behind_partial_caches_are_as_in_the_reference() -> None:
    """Prefixes end anywhere; biases and entries after them are unknown."""
    numbers = random.Random(5)
    arena = arena_of(LLAMA, torch.full((2, 2, 4, 1, CAPACITY, 64), NAN), [0] * 4)
    bias = torch.full((4, CAPACITY), NAN)
    parts = [random_partial_rows(numbers, LLAMA, num_entries, 5) for num_entries in (64, 200, 1, 63)]
    for slot, rows in enumerate(parts):
        for layer in range(2):
            for which, held in enumerate(rows.cache.layer(layer)):
                arena.buffer[layer, which, slot, :, : rows.first_entry] = held[:, : rows.first_entry]
        bias[slot, : rows.first_entry] = 0 if rows.biases is None else torch.from_numpy(rows.biases)[: rows.first_entry]
    placed = [(dataclasses.replace(rows, boundary=rows.first_entry), slot) for slot, rows in enumerate(parts)]
    expected = whole(ReferenceDecoder(random_weights(LLAMA)).forward(parts))
    other = random_arena(LLAMA, (64, 10))
    found = run(decoder_of(other).over(arena.buffer, bias), placed)
    assert is_near(found[0], expected[0], FLOAT32)
    assert is_near(found[1], expected[1], FLOAT32)


def test_two_decoders_that_share_their_buffers_do_not_disturb_each_other() -> None:
    arena, partial = random_arena(LLAMA, (64, 10)), random_arena(LLAMA, (64, 10))
    decoder, sequences = decoder_of(arena), random_rows(random.Random(6), arena, (3, 2))
    hidden, logits = run(decoder, sequences)
    other = decoder.over(partial.buffer, torch.zeros(2, CAPACITY))
    run(other, random_rows(random.Random(7), partial, (2, 9)))
    decoder.forward()  # its own table is unchanged
    assert torch.equal(decoder.hidden[:5], hidden)
    assert torch.equal(decoder.logits[:5], logits)


@pytest.mark.parametrize("dtype", [BF16, FLOAT32], ids=str)
def test_rows_have_the_bits_that_they_have_alone(dtype: torch.dtype) -> None:
    shape = Shape(has_bias=True, dtype=dtype)
    arena = random_arena(shape, (100, 200))
    other = arena.copy()
    together = run(decoder_of(arena, "triton"), random_rows(random.Random(2), arena, (9, 3)))
    alone = run(decoder_of(other, "triton"), random_rows(random.Random(2), other, (9, 3))[1:])
    for mine, its in zip(alone, together, strict=True):
        assert torch.equal(mine, its[9:])
    assert torch.equal(arena.buffer[:, :, 1].nan_to_num(9), other.buffer[:, :, 1].nan_to_num(9))


LAYER = [
    "add_norm_row",
    "aten.mm.out",
    "rope_store_heads",
    "prefix_split",
    "tail_merge",
    "aten.mm.out",
    "add_norm_row",
    "aten.mm.out",
    "activate_row",
    "aten.mm.out",
]


def launches_of(shape: Shape, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    arena = random_arena(shape, (100, 10))
    decoder = decoder_of(arena)
    upload(decoder, random_rows(random.Random(3), arena, (2, 1)))
    return launched(monkeypatch, decoder.forward)


def test_a_layer_is_ten_launches_and_nothing_is_allocated_or_read_back(monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(LAYER) == 10
    for shape in (LLAMA, OTHER_FORMS["glm4"], OTHER_FORMS["gemma"], OTHER_FORMS["arcee"], OTHER_FORMS["cohere"]):
        in_float32 = dataclasses.replace(shape, dtype=FLOAT32, is_scaled=False, has_bias=False)
        assert launches_of(in_float32, monkeypatch) == ["embed_row", *LAYER, *LAYER, "add_norm_row", "aten.mm.out"]


def test_without_norms_in_front_the_first_layer_has_a_launch_less(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["embed_row", *LAYER[1:], *LAYER, "add_norm_row", "aten.mm.out"]
    assert launches_of(OTHER_FORMS["exaone4"], monkeypatch) == names


def test_norms_of_all_heads_together_are_a_launch_more(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = [*LAYER[:2], "norm_heads_row", *LAYER[2:]]
    names = ["embed_row", *layer[1:], *layer, "add_norm_row", "aten.mm.out"]
    assert launches_of(OTHER_FORMS["olmo2 in float32"], monkeypatch) == names


EXPERTS = ["multiply_router", "choose_row", "sort_choices", "multiply_tile", "multiply_tile", "sum_choices"]


def test_experts_are_six_launches_behind_what_all_rows_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, own in (("gpt_oss", []), ("glm4_moe", LAYER[7:])):
        shape = dataclasses.replace(WITH_EXPERTS[f"{name} in float32"], has_bias=False)
        layer = [*LAYER[:7], *own, *EXPERTS]
        assert len(layer) == (13 if name == "gpt_oss" else 16)
        assert launches_of(shape, monkeypatch) == ["embed_row", *LAYER, *layer, "add_norm_row", "aten.mm.out"]


def test_latent_attention_is_two_launches_more_and_one_for_the_vector_of_queries(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for shape in (dataclasses.replace(each, dtype=FLOAT32) for each in LATENTS):
        of_queries = ["aten.mm.out"] if shape.latent is not None and shape.latent.query_rank else []
        attention = ["latent_prefix_split", "latent_tail_merge", "multiply_heads"]
        layer = [*LAYER[:2], "keep_latent_row", *of_queries, "multiply_heads", *attention, *LAYER[5:]]
        assert len(layer) == len(LAYER) + 2 + len(of_queries)
        assert launches_of(shape, monkeypatch) == ["embed_row", *layer, *layer, "add_norm_row", "aten.mm.out"]


def test_a_soft_cap_of_logits_is_a_launch_more(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["embed_row", *LAYER, *LAYER, "add_norm_row", "aten.mm.out", "softcap_row"]
    assert launches_of(OTHER_FORMS["gemma2 in float32"], monkeypatch) == names


def test_an_arena_of_another_shape_or_dtype_is_refused() -> None:
    arena = random_arena(LLAMA, (10,))
    for buffer in (arena.buffer.to(BF16), arena.buffer[:1], arena.buffer[..., :32]):
        with pytest.raises(ValueError, match="found an arena of"):
            decoder_of(dataclasses.replace(arena, buffer=buffer))


def test_biases_for_some_stacked_parts_alone_are_refused() -> None:
    weights = random_weights(Shape(has_bias=True))
    layers = [dataclasses.replace(weights.layers[0], key=Linear(weights.layers[0].key.weight))]
    with pytest.raises(ValueError, match="found 2 biases, expected 3 or none"):
        stacked_weights(dataclasses.replace(weights, layers=layers), CPU)


def test_windows_beside_an_attention_that_knows_none_are_refused() -> None:
    arena = random_arena(Shape(windows=(40, None)), (5,))
    weights = stacked_weights(random_weights(arena.shape), CPU)

    with pytest.raises(ValueError, match="windows, soft caps or sinks"):
        CudaDecoder(weights, DeviceCaches(arena.buffer, NUM_POSITIONS), CudaKernels(attention="flash"))


@pytest.mark.parametrize("windows", [(None, None), (40, None)])
def test_windows_are_not_for_entries_that_are_no_positions(windows: tuple[int | None, int | None]) -> None:
    shape = Shape(dtype=FLOAT32, windows=windows)
    arena, bias = random_arena(shape, (64, 10)), torch.zeros(2, CAPACITY)
    over = decoder_of(arena).over(arena.buffer, bias)
    plain = decoder_of(random_arena(LLAMA, (64, 10))).over(arena.buffer, bias)
    rows = [(random_partial_rows(random.Random(5), shape, 64, 3), 0)]
    assert all(torch.equal(*each) for each in zip(run(over, rows), run(plain, rows), strict=True))
