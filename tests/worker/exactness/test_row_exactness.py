"""Rows of random trees equal plain decoding bit by bit."""

from __future__ import annotations

import copy
import random
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from swiftbatch.worker.exactness.forward_comparisons import probe_rows, random_tree
from swiftbatch.worker.forward.target_model import TargetModel
from swiftbatch.worker.forward.tile_packing import SequenceRows
from swiftbatch.worker.kernels.kernel_sizes import MIN_ROWS
from swiftbatch.worker.model.model_files import locate_model
from tests.worker.exactness.spoilt_attention import rows_that_depend_on_neighbours

pytestmark = pytest.mark.long


def by_transformers(target: TargetModel) -> TargetModel:
    """Load the model without our kernels, so that rows can be spoilt."""
    return TargetModel(target.transformers, target.files)


@pytest.mark.parametrize("num_rows", [200, pytest.param(10_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_of_many_random_tree_rows_none_differs_in_any_bit(
    embedded_targets: dict[str, TargetModel], dtype: str, num_rows: int
) -> None:
    result = probe_rows(embedded_targets[dtype], num_rows, seed=1)
    assert result.num_rows >= num_rows
    assert result.num_differing == 0


@pytest.mark.sample(2)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_probe_finds_attention_whose_rows_depend_on_their_neighbours(
    embedded_targets: dict[str, TargetModel], dtype: str
) -> None:
    with rows_that_depend_on_neighbours():
        assert probe_rows(by_transformers(embedded_targets[dtype]), num_rows=8, seed=1).num_differing > 0


def test_the_probe_finds_linear_layers_whose_rows_depend_on_the_row_count(
    embedded_targets: dict[str, TargetModel],
) -> None:
    """The layer flips its last bits with more rows than plain decoding's."""
    target = by_transformers(embedded_targets["bfloat16"])

    def spoil(_module: object, _inputs: object, output: torch.Tensor) -> None:
        output.view(torch.int16)[:] ^= int(output.shape[-2] > MIN_ROWS)

    handle = target.model.model.layers[-1].self_attn.v_proj.register_forward_hook(spoil)
    try:
        assert probe_rows(target, num_rows=8, seed=1).num_differing > 0
    finally:
        handle.remove()


def test_the_probe_finds_rows_of_a_target_whose_logits_hold_until_its_next_forward(
    embedded_targets: dict[str, TargetModel],
) -> None:
    """Logits hold until the next forward, as on a GPU, which overwrites the roots."""
    target = TargetModel(copy.copy(embedded_targets["bfloat16"].forwards), embedded_targets["bfloat16"].files)
    run, kept = target.forwards.run, torch.zeros(64, target.vocab_size)

    def overwriting(groups: list[SequenceRows], *_: object) -> tuple[torch.Tensor, torch.Tensor]:
        hidden, logits = run(groups)
        kept[: len(logits)] = logits
        kept[0] += float(len(groups) > 1)
        return hidden, kept[: len(logits)]

    target.forwards.run = overwriting  # type: ignore[method-assign]
    result = probe_rows(target, num_rows=30, seed=1)
    assert 0 < result.num_differing < result.num_rows / 4


def test_shapes_whose_single_rows_take_another_kernel_are_exact_too(tmp_path: Path) -> None:
    """2048 -> 512 in bf16: a one-row product has other bits (measured)."""
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=2048,
        intermediate_size=512,
        num_hidden_layers=1,
        num_attention_heads=16,
        num_key_value_heads=4,
        initializer_range=0.1,
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(tmp_path)
    wide = TargetModel.load(locate_model(str(tmp_path)), "bfloat16", "cpu")
    assert probe_rows(wide, num_rows=100, seed=1).num_differing == 0


def test_random_trees_keep_the_tree_s_contract() -> None:
    rng = random.Random(0)
    for max_depth in (0, 1, 5):
        tree = random_tree(rng, 30, max_depth, vocab_size=4)
        assert all(parent < node for node, parent in enumerate(tree.parents))
        assert all(depth <= max_depth for depth in tree.depths())
        assert len({(p, t) for p, t in zip(tree.parents, tree.token_ids, strict=True)}) == len(tree)
