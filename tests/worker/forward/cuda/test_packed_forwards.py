"""Packed GPU forwards have the dequantized model's bits."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from swiftbatch.jobs.run.run_records import LinearName
from swiftbatch.worker.forward.cuda.cuda_forwards import CudaForwards
from swiftbatch.worker.forward.tile_packing import tree_rows
from swiftbatch.worker.kernels.cuda.stacked_weights import StackedWeights, stacked_weights
from swiftbatch.worker.kernels.decoder_weights import DecoderWeights
from swiftbatch.worker.kernels.gpu_kernel_choice import CudaKernels
from swiftbatch.worker.kernels.kernel_sizes import FEW_ROWS
from swiftbatch.worker.kernels.quantized_weights import Code, Linear, PackedLinear, PackedMatrix
from swiftbatch.worker.kv.slot_arena import KVArena
from swiftbatch.worker.sampling.draft_tree import ROOT, DraftTree
from tests.worker.forward.cuda.checked_graph import CheckedGraph
from tests.worker.kernels.kernel_parts import FLOAT32, Shape, cache_shape
from tests.worker.kernels.packed_parts import packed_weights, random_packed, twin_of
from tests.worker.kernels.plain_parts import plain_linear

CPU = torch.device("cpu")
TREE = DraftTree([5, 6], [ROOT, ROOT])
KINDS: dict[str, tuple[Shape, Code, int, bool]] = {
    "int4 with offsets, groups of 16": (Shape(), "uint4", 16, True),
    "FP8 over the depth, biases, head": (Shape(has_bias=True, is_tied=False), "e4m3", 0, False),
}


def forwards_of(weights: DecoderWeights, shape: Shape, linear: LinearName) -> CudaForwards:
    arena = KVArena(cache_shape(shape), 1, 200)
    arena.buffer.fill_(torch.nan)
    stacked = stacked_weights(weights, CPU)
    return CudaForwards(stacked, arena, frozenset(), CudaKernels(linear=linear), capture=CheckedGraph)


def outputs(forwards: CudaForwards) -> list[torch.Tensor]:
    """Return hidden states of a text and a tree, its logits, and the head's alone."""
    cache = forwards.arena.new_cache(100)
    read = forwards.read(cache, [7 * each % forwards.vocab_size for each in range(5)])
    hidden, logits = forwards.run([tree_rows(cache, 3, TREE)])
    return [read, hidden, logits.clone(), forwards.logits(hidden)]


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_a_packed_decoder_has_the_bits_and_the_numerics_of_the_dequantized_one_by_triton(kind: str) -> None:
    shape, code, group, has_offsets = KINDS[kind]
    weights = packed_weights(shape, code, group, has_offsets=has_offsets)
    packed = forwards_of(weights, shape, "cublas")  # the default, which reads no codes
    twin = forwards_of(twin_of(weights), shape, "triton")
    assert (packed._weights.is_packed, twin._weights.is_packed) == (True, False)
    assert (packed.narrow_rows, twin.narrow_rows) == ((FEW_ROWS,), ())
    assert packed.numerics == twin.numerics
    *found, alone = outputs(packed)
    *expected, _ = outputs(twin)
    assert all(torch.equal(mine, its) for mine, its in zip(found, expected, strict=True))
    assert torch.allclose(alone, found[-1], rtol=0.01, atol=0.01)


def stacked(weights: DecoderWeights) -> StackedWeights:
    return stacked_weights(weights, CPU)


def changed(weights: DecoderWeights, **parts: PackedMatrix | torch.Tensor) -> DecoderWeights:
    linears = {
        name: PackedLinear(weight) if isinstance(weight, PackedMatrix) else Linear(weight)
        for name, weight in parts.items()
    }
    return dataclasses.replace(weights, layers=[dataclasses.replace(weights.layers[0], **linears)])  # type: ignore[arg-type]


def test_parts_of_one_form_lie_one_below_the_other() -> None:
    weights = packed_weights(Shape(), "uint4", 16, has_offsets=True)
    layer = weights.layers[0]
    weight = stacked(weights).layers[0].query_key_value.weight
    assert isinstance(weight, PackedMatrix)
    parts = [plain_linear(each).weight for each in (layer.query, layer.key, layer.value)]
    assert torch.equal(weight.dequantized(), torch.cat(parts))


@pytest.mark.parametrize(
    "key",
    [
        random_packed("e2m1", 64, 48, 16),
        random_packed("uint4", 64, 48, 48),
        random_packed("uint4", 64, 48, 16, has_offsets=True),
        random_packed("uint4", 64, 48, 16).dequantized(),
    ],
    ids=["code", "group", "offsets", "plain"],
)
def test_a_product_of_parts_of_several_forms_is_dequantized(key: PackedMatrix | torch.Tensor) -> None:
    weights = packed_weights(Shape(), "uint4", 16)
    layer = stacked(changed(weights, key=key)).layers[0]
    twin = stacked(changed(twin_of(weights), key=key)).layers[0]
    assert isinstance(layer.query_key_value.weight, torch.Tensor)
    assert isinstance(twin.query_key_value.weight, torch.Tensor)
    assert torch.equal(layer.query_key_value.weight, twin.query_key_value.weight)
    assert isinstance(layer.output.weight, PackedMatrix)


def test_a_decoder_in_float32_is_dequantized_and_keeps_the_kernels_that_were_chosen() -> None:
    shape = Shape(dtype=FLOAT32)
    forwards = forwards_of(packed_weights(shape, "int8", 16), shape, "cublas")
    assert not forwards._weights.is_packed
    assert forwards.numerics.endswith(", cublas")
