"""Models with experts, from their files through our kernels: the texts of transformers, exact in any company."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoConfig

from swiftbatch.worker.exactness.probe import probe_rows
from swiftbatch.worker.exactness.row_agreement import compare
from swiftbatch.worker.model.causal_lm import load_causal_lm
from swiftbatch.worker.model.compute_path import path_on
from swiftbatch.worker.model.dense_config import OtherDecoderError, read_dense
from swiftbatch.worker.model.files import DRAFT_FOLDER, PARTS_FOLDER, locate_model
from swiftbatch.worker.model.text_view import text_view
from swiftbatch.worker.papers.griffin.griffin_weights import save_griffin
from swiftbatch.worker.papers.griffin.model import GriffinConfig, GriffinModel
from swiftbatch.worker.papers.tokenswift.heads import save_heads
from tests.worker.kernels.kernel_parts import needs_kernels
from tests.worker.model.expert_configs import WITH_EXPERTS, write_experts
from tests.worker.model.test_dense import saved
from tests.worker.model.test_dense_forms import NUM_PROMPT_TOKENS, NUM_RECOVERED, loaded, sequences
from tests.worker.model.test_kinds_engines import decode
from tests.worker.model.test_published_configs import PUBLISHED

pytestmark = needs_kernels

DECODED = ("Qwen3 30B A3B", "gpt-oss 120B", "GLM 4.5")
ENGINES = ("auto", "griffin", "token-recycling", "triforce")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Tiny models by their names, with weights of a spread that routes rows to different experts."""
    found = {}
    for name, published in WITH_EXPERTS.items():
        found[name] = tmp_path_factory.mktemp("model")
        write_experts(published, found[name])
    return found


@pytest.fixture(scope="module")
def with_parts(folders: dict[str, Path]) -> dict[str, Path]:
    """Some of them with all parts that engines draft with."""
    for name in DECODED:
        parts, config = folders[name] / PARTS_FOLDER, AutoConfig.for_model(**WITH_EXPERTS[name])
        saved(parts / DRAFT_FOLDER, AutoConfig.for_model(**PUBLISHED["Llama 3.2 1B"]))
        fingerprint = locate_model(str(folders[name])).fingerprint
        save_heads(parts, 0.02 * torch.randn(3, config.hidden_size, config.hidden_size), fingerprint)
        save_griffin(parts, GriffinModel(GriffinConfig.for_target(config)), fingerprint)
    return folders


@pytest.mark.parametrize("name", WITH_EXPERTS)
def test_logits_and_greedy_texts_are_those_of_transformers(name: str, folders: dict[str, Path]) -> None:
    target = loaded(folders[name], "float32")
    found = compare(target)
    assert found.agrees, found
    assert found.num_same_choices == found.num_rows
    texts, theirs = sequences(target, temperature=0.0), load_causal_lm(target.files, torch.float32)
    for text, output in zip(texts, decode(target, "autoregressive", texts), strict=True):
        best = theirs(input_ids=torch.from_numpy(text.token_ids)[None]).logits[0].argmax(-1)
        assert output == best[NUM_PROMPT_TOKENS - 1 : -1].tolist()


@pytest.mark.parametrize(
    ("name", "dtype"), [*((name, "bfloat16") for name in WITH_EXPERTS), *((name, "float32") for name in DECODED)]
)
def test_of_random_tree_rows_none_differs_in_any_bit(name: str, dtype: str, folders: dict[str, Path]) -> None:
    result = probe_rows(loaded(folders[name], dtype), 150, seed=1)
    assert result.num_differing == 0


@pytest.mark.slow
@pytest.mark.parametrize("name", WITH_EXPERTS)
def test_of_ten_thousand_tree_rows_none_differs_in_any_bit(name: str, folders: dict[str, Path]) -> None:
    assert probe_rows(loaded(folders[name], "bfloat16"), 10_000, seed=2).num_differing == 0


@pytest.mark.parametrize("name", DECODED)
def test_every_engine_gives_plain_decoding_s_tokens_beside_a_resumed_job(
    name: str, with_parts: dict[str, Path]
) -> None:
    target = loaded(with_parts[name], "bfloat16")
    plain = [decode(target, "autoregressive", [text])[0] for text in sequences(target)]
    for engine in ENGINES:
        fresh, resumed = sequences(target)
        resumed.extend(plain[1][:NUM_RECOVERED])
        assert decode(target, engine, [fresh, resumed]) == plain, engine


@pytest.mark.parametrize("name", DECODED)
def test_texts_are_the_same_where_keys_and_values_lie_on_a_disk(
    name: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    outputs = []
    for kv_offload in (None, str(tmp_path)):
        target = loaded(folders[name], "bfloat16", kv_offload)
        outputs.append(decode(target, "token-recycling", sequences(target)))
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize("name", WITH_EXPERTS)
def test_experts_are_multiplied_in_our_kernels_on_both_devices(name: str) -> None:
    assert [path_on(device, text_view(WITH_EXPERTS[name])).name for device in ("cpu", "cuda")] == ["kernels"] * 2


@pytest.mark.parametrize(
    ("name", "said", "reason"),
    [
        ("Qwen3 30B A3B", {"num_local_experts": 4}, "num_experts and num_local_experts are 4, 8"),
        ("Qwen3 30B A3B", {"num_experts_per_tok": 9}, "9 of 8 experts"),
        ("Qwen3 30B A3B", {"moe_intermediate_size": 40}, "moe_intermediate_size is 40"),
        ("Qwen3 30B A3B", {"use_sliding_window": True}, "use_sliding_window is True"),
        ("Qwen3 30B A3B", {"norm_topk_prob": None}, "norm_topk_prob is None"),
        ("Qwen3 30B A3B", {"expert_shift": 2}, "expert_shift, which may change a layer"),
        ("OLMoE 1B 7B", {"clip_qkv": 8.0}, "clip_qkv is 8.0"),
        ("MiniMax M2", {"scoring_func": "softmax"}, "scoring_func is 'softmax'"),
        ("dots.llm1", {"n_group": 3}, "2 of 3 groups of experts"),
        ("dots.llm1", {"topk_group": 1}, "1 groups of experts for 3 of a row"),
    ],
)
def test_experts_of_another_form_are_left_to_transformers_with_a_reason(
    name: str, said: dict[str, object], reason: str
) -> None:
    with pytest.raises(OtherDecoderError, match=reason):
        read_dense(text_view(WITH_EXPERTS[name] | said))
