"""Ids without a text are never drawn."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from swiftbatch.jobs.sampling_params import SamplingParams
from swiftbatch.worker.forward.target_model import TargetModel
from swiftbatch.worker.kernels.native_library import NO_KERNELS, OVERRIDE
from swiftbatch.worker.model.model_files import locate_model
from swiftbatch.worker.sampling.sequence import Sequence
from swiftbatch.worker.text.tokenizer import TextCodec
from tests.worker.test_exactness import decode

NUM_PADDED, HOLE = 13, 41
SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "hot": {"temperature": 100.0},
    "biased": {"temperature": 1.0, "logit_bias": {str(HOLE): 100}, "eta": 0.001, "frequency_penalty": -2.0},
}


@pytest.fixture(scope="module")
def padded_model(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Has more rows than tokens, and prefers them."""
    folder = tmp_path_factory.mktemp("padded")
    codec = TextCodec(locate_model(str(tiny_model)))
    codec._tokenizer.save_pretrained(folder)
    model = LlamaForCausalLM.from_pretrained(tiny_model)
    num_tokens = model.config.vocab_size
    model.resize_token_embeddings(num_tokens + NUM_PADDED, mean_resizing=False)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for row in (HOLE, *range(num_tokens, num_tokens + NUM_PADDED)):
            model.lm_head.weight[row].normal_(std=2.0, generator=generator)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module", params=["kernels", "torch"])
def target(request: pytest.FixtureRequest, padded_model: Path) -> TargetModel:
    files = locate_model(str(padded_model))
    textless = TextCodec(files).textless_ids
    assert len(textless) == NUM_PADDED
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "torch":
            patch.setenv(OVERRIDE, NO_KERNELS)
        return TargetModel.load(files, "float32", "cpu", never_sampled_ids=[HOLE, *textless])


def undrawn(target: TargetModel) -> set[int]:
    assert target.forwards.never_sampled_ids is not None
    return set(target.forwards.never_sampled_ids.tolist())


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_token_without_a_text_never_comes_with_any_drafter(target: TargetModel, setting: str) -> None:
    def sequences(logprobs: int | None = None) -> list[Sequence]:
        fields = {"max_tokens": 40, "seed": 3, "ignore_eos": True, "logprobs": logprobs} | SETTINGS[setting]
        params = SamplingParams.model_validate(fields)
        return [Sequence(f"s{n}", [7, 9, 30 + n], params, target.vocab_size) for n in range(3)]

    plain = decode(target, "autoregressive", sequences())
    assert not undrawn(target) & {token_id for output in plain for token_id in output}
    for engine_name in ("token-recycling", "auto"):
        assert decode(target, engine_name, sequences()) == plain
    shown = sequences(logprobs=5)
    assert decode(target, "autoregressive", shown) == plain  # step by step, while the others are drawn in chains
    assert all(not undrawn(target) & set(each.kept_logprobs.top_ids.flatten().tolist()) for each in shown)  # type: ignore[union-attr]


def test_without_a_word_about_them_they_are_what_this_model_says(padded_model: Path) -> None:
    target = TargetModel.load(locate_model(str(padded_model)), "float32", "cpu")
    sequence = Sequence(
        "s", [7, 9, 30], SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True), target.vocab_size
    )
    [output] = decode(target, "autoregressive", [sequence])
    assert max(output) >= target.vocab_size - NUM_PADDED
