from __future__ import annotations

import tomllib

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

from swiftbatch.jobs.sampling_params import SamplingParams
from swiftbatch.worker.drafters.triforce import window_of
from swiftbatch.worker.forward.target_model import TargetModel
from swiftbatch.worker.model.model_files import DRAFT_FOLDER, PARTS_FOLDER, ModelFiles, locate_model
from swiftbatch.worker.sampling.noise import GumbelNoise
from swiftbatch.worker.sampling.sampler import draw
from swiftbatch.worker.text.tokenizer import TextCodec
from swiftbatch.worker.training.recipes import DraftRecipe
from swiftbatch.worker.training.train_draft import SAMPLING, agreement, draft_config, windowed_logits
from swiftbatch.worker.training.training_texts import Text, load_target, own_texts
from tests import ROOT
from tests.worker.drafters.training_parts import featured
from tests.worker.drafters.triforce.draft_parts import untrained

pytestmark = pytest.mark.usefixtures("one_thread")


def test_each_row_is_measured_once_and_from_what_a_draft_model_reads_in_use(tiny_target: TargetModel) -> None:
    model = untrained(tiny_target).to(torch.bfloat16)
    for num_tokens in (1, 511, 512, 1100):
        token_ids = torch.randint(250, (num_tokens,), generator=torch.Generator().manual_seed(4)).tolist()
        with torch.inference_mode():
            stretches = list(windowed_logits(model, token_ids))
        logits = torch.cat([part for _, part in stretches])  # [num_tokens, vocab]
        assert len(logits) == num_tokens
        assert [first for first, _ in stretches] == [0, *range(511, num_tokens, 256)]
        for row in {0, 510, 511, 766, 767, 1099} & set(range(num_tokens)):
            read = window_of(np.asarray(token_ids[: row + 1]), row + 1)
            expected = model(torch.from_numpy(read)[None]).logits[0, -1].float().detach()
            torch.testing.assert_close(logits[row], expected, rtol=0.05, atol=0.03)


def test_agreement_is_whole_with_itself_and_counts_behind_the_prompt(tiny_target: TargetModel) -> None:
    token_ids = torch.randint(250, (60,), generator=torch.Generator().manual_seed(5)).tolist()
    num_rows, same = agreement(
        tiny_target, tiny_target.model, featured(tiny_target, [Text(token_ids, 20), Text(token_ids[:30])])
    )
    assert num_rows == 40 + 30
    assert min(same.values()) > 0.95
    model = untrained(tiny_target)
    _, same = agreement(tiny_target, model, featured(tiny_target, [Text(token_ids)]))
    noise = GumbelNoise(0, tiny_target.vocab_size)
    said, drafted = tiny_target.model(torch.tensor([token_ids])).logits[0].float(), model(torch.tensor([token_ids]))
    for name, params in SAMPLING.items():
        pairs = [
            (draw(s, i + 1, params, noise), draw(d, i + 1, params, noise))
            for i, (s, d) in enumerate(zip(said, drafted.logits[0].float(), strict=True))
        ]
        assert same[name] == pytest.approx(sum(a == b for a, b in pairs) / 60, abs=0.04)


def test_the_embedded_draft_model_agrees_with_the_embedded_model(embedded_files: ModelFiles) -> None:
    target = load_target(embedded_files)
    files = locate_model(str(embedded_files.path / PARTS_FOLDER / DRAFT_FOLDER))
    prompt = TextCodec(embedded_files).encode("The clock in the hall had stopped, and nobody in the house could say")
    sampling = SamplingParams(max_tokens=100, temperature=1.0, min_p=0.1, seed=3)
    texts = featured(target, own_texts(target, [prompt] * 4, sampling))
    _, same = agreement(target, load_target(files).model, texts)
    assert TextCodec(files).encode("The clock") == TextCodec(embedded_files).encode("The clock")
    assert min(same.values()) > 0.65  # 0.75 was measured


def test_the_embedded_models_draft_has_under_two_million_parameters(target: TargetModel) -> None:
    config = draft_config(target.model.config)
    assert LlamaForCausalLM(config).num_parameters() < 2_000_000
    assert config.max_position_embeddings >= DraftRecipe.window_length
    assert (config.vocab_size, config.eos_token_id, config.bos_token_id) == (4096, 0, 0)


def test_every_embedded_file_is_packaged() -> None:
    patterns = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"][
        "package-data"
    ]
    packaged = {path for pattern in patterns["swiftbatch.worker"] for path in (ROOT / "worker").glob(pattern)}
    assert {path for path in (ROOT / "worker" / "embedded").rglob("*") if path.is_file()} <= packaged
