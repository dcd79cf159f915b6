"""The plan knows the bytes of packed weights before loading."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from swiftbatch.worker.kernels.cuda.stacked_weights import StackedWeights, stacked_weights
from swiftbatch.worker.kernels.quantized_weights import CODE_BITS, AnyLinear
from swiftbatch.worker.kv.model_sizes import read_sizes
from swiftbatch.worker.model.decoder_loading import dense_weights
from swiftbatch.worker.model.gguf.gguf_weights import UNPACKED, packed_from
from swiftbatch.worker.model.gguf.header import READABLE
from swiftbatch.worker.model.model_files import locate_model
from tests.worker.model.formats.examples import EXAMPLES
from tests.worker.model.formats.twins import make_packed
from tests.worker.model.gguf.block_bytes import random_blocks
from tests.worker.model.gguf.tiny_gguf import MIXED, write_tiny

CPU = torch.device("cpu")
TOLD_BY_NUMBERS = "compressed-tensors int4, scales of float32"
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def plain_tensors(weights: StackedWeights) -> Iterator[torch.Tensor]:
    yield from (weights.embedding, weights.final_norm)
    if weights.ple is not None:
        yield weights.ple.table
    for layer in weights.layers:
        found = (layer.input_norm, layer.mlp_norm, layer.output_norm, layer.down_norm, layer.shared_norm, layer.sinks)
        found = (*found, *(layer.qk_norms or ()), *(layer.index_norms or ()))
        if (experts := layer.experts) is not None:
            found = (*found, experts.router, experts.router_bias, experts.choice_bias, experts.router_scale)
            found = (*found, experts.choice_scales, experts.front_norm, experts.behind_norm)
        if layer.ple is not None:
            found = (*found, layer.ple.norm, layer.ple.output_norm)
        if (latent := layer.latent) is not None:
            found = (*found, latent.query_norm, latent.key_norm, latent.key_up, latent.value_up)
            found = (*found, *(() if latent.indexer is None else (latent.indexer.norm,)))
        yield from (each for each in found if each is not None)
    yield from (product.bias for product in products(weights) if product.bias is not None)
    yield from (product.weight for product in products(weights) if isinstance(product.weight, torch.Tensor))


def products(weights: StackedWeights) -> list[AnyLinear]:
    experts = [layer.experts for layer in weights.layers if layer.experts is not None]
    return [*weights.products, *(each for own in experts for each in (own.gate_up, own.down))]


def loaded_bytes(weights: StackedWeights) -> int:
    """A tied head counts once, and a scale in bfloat16 as one in float32, since heads of files do not tell these."""
    plain = {each.data_ptr(): each.nbytes for each in plain_tensors(weights)}
    packed = (product.weight for product in products(weights) if not isinstance(product.weight, torch.Tensor))
    wide = sum(weight.nbytes + (weight.scales.dtype == torch.bfloat16) * weight.scales.nbytes for weight in packed)
    return sum(plain.values()) + wide


@pytest.mark.sample(3)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("name", "types"), [("llama", MIXED), ("qwen3", ("Q4_0",)), ("qwen2", ("Q6_K",)), ("phi3", ("IQ4_NL",))]
)
def test_a_gguf_file_takes_what_the_plan_counts_for_it(
    name: str, types: tuple[str, ...], dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    files = locate_model(str(write_tiny(name, tmp_path, DTYPES[dtype], types)[0]))
    weights, sizes = dense_weights(files, DTYPES[dtype]), read_sizes(files, dtype)
    assert weights is not None
    assert sizes is not None
    stacked = stacked_weights(weights, CPU)
    assert stacked.is_packed == (dtype == "bfloat16")
    assert sizes.weight_bytes == loaded_bytes(stacked)


@pytest.mark.parametrize("name", UNPACKED)
def test_the_forms_of_types_are_those_that_their_blocks_have(name: str) -> None:
    blocks = torch.from_numpy(random_blocks(name, 8))
    matrix = packed_from(name, blocks, 1, torch.bfloat16)
    said = next(each.packed for each in READABLE.values() if each.name == name)
    assert said is not None
    has_offsets = matrix.offsets is not None and not torch.equal(matrix.offsets, -8 * matrix.scales)
    found = (matrix.code, CODE_BITS[matrix.code], matrix.group_size, has_offsets)
    assert found == (said.code, said.bits, said.group, said.has_offsets)


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", EXAMPLES)
def test_a_checkpoint_in_parts_takes_what_the_plan_counts_for_it(name: str, tmp_path: Path) -> None:
    """At least the plan's size, where only the numbers decide on packing."""
    files = locate_model(str(make_packed(EXAMPLES[name], tmp_path / "model")[0]))
    weights, sizes = dense_weights(files, torch.bfloat16), read_sizes(files, "bfloat16")
    assert weights is not None
    assert sizes is not None
    stacked = stacked_weights(weights, CPU)
    assert sizes.weight_bytes >= loaded_bytes(stacked)
    if name != TOLD_BY_NUMBERS:
        assert sizes.weight_bytes == loaded_bytes(stacked)
        assert bool(sizes.packed) == stacked.is_packed
