"""Promises of every kind of decoder in our kernels."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, PreTrainedConfig

from swiftbatch.jobs.errors import ModelError
from swiftbatch.jobs.sampling_params import SamplingParams
from swiftbatch.worker.drafters.griffin.griffin_model import GriffinConfig, GriffinModel, save_griffin
from swiftbatch.worker.drafters.tokenswift.decoding_heads import save_heads
from swiftbatch.worker.exactness.forward_comparisons import compare
from swiftbatch.worker.forward.native_forwards import NativeForwards
from swiftbatch.worker.forward.target_model import TargetModel
from swiftbatch.worker.model.causal_lm import load_causal_lm
from swiftbatch.worker.model.model_files import DRAFT_FOLDER, PARTS_FOLDER, locate_model
from swiftbatch.worker.sampling.sequence import Sequence
from tests.worker.model.dense_configs import PUBLISHED
from tests.worker.model.test_dense_loading import saved
from tests.worker.model.test_kinds_engines import decode

ENGINES = ("auto", "griffin", "token-recycling", "triforce")
NUM_PROMPT_TOKENS, NUM_TOKENS, NUM_RECOVERED = 50, 28, 15


def save_parts(folder: Path, config: PreTrainedConfig) -> None:
    parts = folder / PARTS_FOLDER
    saved(parts / DRAFT_FOLDER, AutoConfig.for_model(**PUBLISHED["Llama 3.2 1B"]))
    fingerprint = locate_model(str(folder)).fingerprint
    save_heads(parts, 0.02 * torch.randn(3, config.hidden_size, config.hidden_size), fingerprint)
    save_griffin(parts, GriffinModel(GriffinConfig.for_target(config)), fingerprint)


def loaded(folder: Path, dtype: str, kv_offload: str | None = None) -> TargetModel:
    target = TargetModel.load(locate_model(str(folder)), dtype, "cpu", kv_offload)
    assert isinstance(target.forwards, NativeForwards)
    return target


def sequences(target: TargetModel, temperature: float = 1.0) -> list[Sequence]:
    params = SamplingParams(max_tokens=NUM_TOKENS, temperature=temperature, seed=3, ignore_eos=True)
    texts = torch.randint(3, target.vocab_size, (2, NUM_PROMPT_TOKENS), generator=torch.Generator().manual_seed(5))
    return [Sequence(f"s{i}", text.tolist(), params, target.vocab_size) for i, text in enumerate(texts)]


def check_texts_are_those_of_transformers(target: TargetModel) -> None:
    """Compare logits and greedy texts."""
    found = compare(target)
    assert found.agrees, found
    assert found.num_same_choices == found.num_rows
    texts, theirs = sequences(target, temperature=0.0), load_causal_lm(target.files, torch.float32)
    for text, output in zip(texts, decode(target, "autoregressive", texts), strict=True):
        best = theirs(input_ids=torch.from_numpy(text.token_ids)[None]).logits[0].argmax(-1)
        assert output == best[NUM_PROMPT_TOKENS - 1 : -1].tolist()


def check_engines_give_plain_tokens_beside_a_resumed_job(target: TargetModel) -> None:
    plain = [decode(target, "autoregressive", [text])[0] for text in sequences(target)]
    for engine in ENGINES:
        fresh, resumed = sequences(target)
        resumed.extend(plain[1][:NUM_RECOVERED])
        assert decode(target, engine, [fresh, resumed]) == plain, engine


def check_a_disk_changes_no_text(folder: Path, caches: Path) -> None:
    """Compare with texts of caches in memory."""
    outputs = []
    for kv_offload in (None, str(caches)):
        target = loaded(folder, "bfloat16", kv_offload)
        outputs.append(decode(target, "token-recycling", sequences(target)))
    assert outputs[0] == outputs[1]


def check_config_is_refused(folder: Path, config: dict[str, Any], reason: str) -> None:
    """Expect the reason in a line, before weights are read."""
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=reason) as caught:
        locate_model(str(folder))
    assert "\n" not in str(caught.value)
