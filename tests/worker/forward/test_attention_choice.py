"""Layers of `transformers` models attend in our kernels as in torch."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from swiftbatch.worker.exactness.forward_comparisons import compare, probe_rows
from swiftbatch.worker.forward.hardware import torch_gemms
from swiftbatch.worker.forward.target_model import TargetModel
from swiftbatch.worker.forward.transformers_attention import attend_in_torch, attends_of, attention_kernel
from swiftbatch.worker.forward.transformers_forwards import TransformersForwards
from swiftbatch.worker.kernels.native_library import NO_KERNELS, OVERRIDE
from swiftbatch.worker.model.model_files import locate_model
from tests.worker.kernels.kernel_parts import VARIANTS, needs_kernels
from tests.worker.model.kind_parts import (
    EACH_KIND,
    OURS_ALONE,
    target_that_drops,
    tiny_config,
    tiny_model,
    tiny_target,
)

pytestmark = [pytest.mark.long, needs_kernels]

VARIANT = (VARIANTS or ["none"])[0]
MIXED = ("llama4_text",)  # some layers have chunks
WINDOWED = ("cohere2", "gemma2", "gemma3_text", "gpt_oss", "mistral", "olmo3")
PROBED = ("gemma", "olmoe", "deepseek_v3", *WINDOWED, *MIXED)
WITH_WINDOWS_OF_OTHERS = ("cohere2", "gemma3_text", "olmo3")  # as mistral; gemma2 and gpt_oss need more


def num_in_kernels(target: TargetModel) -> int:
    assert isinstance(target.forwards, TransformersForwards)
    return sum(attend is not attend_in_torch for attend in target.forwards._attends)


@pytest.mark.sample(4)
@pytest.mark.parametrize("kind", [each for each in EACH_KIND if each not in OURS_ALONE])
def test_every_kind_says_what_transformers_says_with_kernels_in_all_layers_without_chunks(kind: str) -> None:
    target = tiny_target(kind, window=40, variant=VARIANT)
    assert num_in_kernels(target) == sum(span.kind != "chunk" for span in target.transformers.spans)
    assert compare(target, 100).agrees


@pytest.mark.parametrize("asked", ["span", "softcap", "sinks"])
def test_kernels_that_drop_what_is_asked_for_do_not_agree(asked: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not compare(target_that_drops(asked, monkeypatch, VARIANT)).agrees


@pytest.mark.sample(3)
@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float32, marks=pytest.mark.slow)], ids=str)
@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=pytest.mark.slow if kind in WITH_WINDOWS_OF_OTHERS else ()) for kind in PROBED],
)
def test_rows_are_exact_whoever_attends(kind: str, dtype: torch.dtype) -> None:
    target = tiny_target(kind, dtype, window=40, variant=VARIANT)
    assert num_in_kernels(target) > 0
    assert (num_in_kernels(target) < target.cache_shape.num_layers) == (kind in MIXED)
    assert probe_rows(target, num_rows=40, seed=1, first_length=60).num_differing == 0


def test_rows_are_exact_and_kept_where_the_cache_is_elsewhere(tmp_path: Path) -> None:
    target = tiny_target("gemma", variant=VARIANT)
    elsewhere = TargetModel(target.forwards, target.files, str(tmp_path))
    assert probe_rows(elsewhere, num_rows=40, seed=1, first_length=60).num_differing == 0


def test_kernels_and_torch_say_nearly_the_same_of_the_same_weights() -> None:
    ours = tiny_target("gemma", torch.bfloat16, variant=VARIANT)
    theirs = TargetModel(TransformersForwards(ours.model, ours.files), ours.files)
    caches = [each.new_cache(300) for each in (ours, theirs)]
    token_ids = [3 + 7 * n % 90 for n in range(200)]
    for cache, target in zip(caches, (ours, theirs), strict=True):
        while cache.length < 200:
            hidden = target.read(cache, token_ids[cache.length :])
    kept = [cache.rows.buffer[..., :200, :].float() for cache in caches]
    assert (kept[0] - kept[1]).std() / kept[1].std() < 0.05
    assert hidden.isfinite().all()


def test_the_numerics_name_what_attends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So a job that moves between both is no longer called exact."""
    in_torch = attention_kernel("cpu", torch.bfloat16)
    for kind, attends in (
        ("olmo", "{} attention"),
        ("gemma2", "{} attention"),
        ("llama4_text", f"{in_torch}, {{}} attention"),
    ):
        tiny_model(tiny_config(kind, has_wide_heads=True), torch.bfloat16).save_pretrained(tmp_path / kind)
        files = locate_model(str(tmp_path / kind))
        for variant in VARIANTS:
            monkeypatch.setenv(OVERRIDE, variant)
            kernels = f"native {variant if variant.endswith('bf16') else 'f32'} 1"
            numerics = TargetModel.load(files, "bfloat16", "cpu").forwards.numerics
            products = f"torch {torch.__version__}, products {torch_gemms()}"
            assert numerics.endswith(f", {products}, {attends.format(kernels)}")
        monkeypatch.setenv(OVERRIDE, NO_KERNELS)
        assert TargetModel.load(files, "bfloat16", "cpu").forwards.numerics.endswith(f", {in_torch}")


def test_heads_that_the_kernels_do_not_take_attend_in_torch() -> None:
    narrow = TransformersForwards(tiny_model(tiny_config("gemma")), tiny_target("gemma").files, VARIANT)
    assert set(narrow._attends) == {attend_in_torch}
    assert attends_of([], torch.bfloat16, VARIANT) == []
