"""Every supported kind agrees with transformers."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from swiftbatch.jobs.errors import ModelError
from swiftbatch.worker.exactness import forward_comparisons as agreement
from swiftbatch.worker.exactness.forward_comparisons import compare, probe_rows
from swiftbatch.worker.forward.target_model import TargetModel
from swiftbatch.worker.forward.transformers_forwards import TransformersForwards
from swiftbatch.worker.kv.model_sizes import read_sizes
from swiftbatch.worker.model import attention_needs
from swiftbatch.worker.model.architectures.catalogue import ARCHITECTURES, REFUSED, recurrent_shape, what_it_lacks
from swiftbatch.worker.model.architectures.hybrid import HYBRIDS
from swiftbatch.worker.model.architectures.llama_like import LLAMA_LIKE
from swiftbatch.worker.model.architectures.moe import MIXTURES
from swiftbatch.worker.model.attention_needs import FULL, Span
from swiftbatch.worker.model.digests import Digests
from swiftbatch.worker.model.model_files import ModelFiles, locate_model
from swiftbatch.worker.model.text_config import text_view
from tests import ROOT
from tests.worker.model.kind_parts import (
    LATER,
    asks_for,
    gguf_section,
    target_that_drops,
    tiny_config,
    tiny_model,
    tiny_target,
    where_it_runs,
)

pytestmark = pytest.mark.long

PAGE = ROOT / "docs" / "models.md"
FILES = ModelFiles("some-model", Path(), Digests({}, {}), 1024, 97)
PROBED = {"mistral": 40, "gemma2": 100, "gpt_oss": 100, "llama4_text": 40, "deepseek_v3": 100}


@pytest.fixture(autouse=True)
def _quiet_transformers(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR, logger="transformers")


@pytest.mark.sample(2)
@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_every_kind_says_row_by_row_what_transformers_says(kind: str) -> None:
    target = tiny_target(kind)
    found = compare(target)
    assert found.agrees, found
    num_others = 3 if "experts" in asks_for(target) else 1  # with nearly equal weights, another expert may come
    assert found.num_same_choices >= found.num_rows - num_others
    [row] = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith(f"| `{kind}` |")]
    assert tuple(row.split(" | ")[1:4]) == (*where_it_runs(kind), asks_for(target))


LOADED = ["kimi_linear", "laguna", *(pytest.param(kind, marks=pytest.mark.slow) for kind in LATER if kind != "laguna")]


@pytest.mark.parametrize("kind", LOADED)
def test_a_kind_says_the_same_from_files_as_its_class_writes_them(kind: str, tmp_path: Path) -> None:
    tiny_model(tiny_config(kind)).save_pretrained(tmp_path)
    target = TargetModel.load(locate_model(str(tmp_path)), "float32", "cpu")
    assert compare(target).agrees
    assert read_sizes(target.files, "float32") is not None, "a GPU's memory can be planned"
    assert probe_rows(target, num_rows=100, seed=1, first_length=60).num_differing == 0


def test_kimi_linear_is_read_by_the_keys_and_names_that_it_is_published_with(tmp_path: Path) -> None:
    tiny_model(tiny_config("kimi_linear")).save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    unpublished = {"layer_types", "mlp_layer_types", "linear_num_heads", "linear_head_dim", "linear_conv_kernel_dim"}
    published = {"first_k_dense_replace": 1, "mla_use_nope": True, "moe_layer_freq": 1, "rope_scaling": None}
    said = {key: value for key, value in written.items() if key not in unpublished} | published
    assert {"linear_attn_config", "model_max_length", "num_experts_per_token"} <= set(said)
    (tmp_path / "config.json").write_text(json.dumps(said))
    tensors = load_file(tmp_path / "model.safetensors")
    dense, named = "model.layers.0.mlp.", "model.layers.0.block_sparse_moe."
    save_file({name.replace(named, dense): each for name, each in tensors.items()}, tmp_path / "model.safetensors")
    target = TargetModel.load(locate_model(str(tmp_path)), "float32", "cpu")
    assert compare(target).agrees
    assert recurrent_shape(text_view(said)) == target.cache_shape.recurrent


def test_the_page_of_models_has_the_kinds_that_run_and_no_others() -> None:
    rows = [line.split("`")[1] for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| `")]
    assert rows == sorted(ARCHITECTURES)


def test_the_page_of_models_has_what_is_read_of_gguf_files() -> None:
    assert PAGE.read_text(encoding="utf-8").endswith(gguf_section())


@pytest.mark.parametrize("asked", ["span", "softcap", "sinks"])
def test_an_attention_that_drops_what_is_asked_for_does_not_agree(asked: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not compare(target_that_drops(asked, monkeypatch)).agrees


def test_where_experts_may_take_few_rows_elsewhere_most_rows_have_to_be_near(monkeypatch: pytest.MonkeyPatch) -> None:
    target, own = tiny_target("mixtral"), agreement._our_logits

    def shifted(some: slice) -> None:
        def logits(*args: Any) -> torch.Tensor:
            found = own(*args)
            found[some] += 0.1 * found.std() * torch.randn_like(found[some])
            return found

        monkeypatch.setattr(agreement, "_our_logits", logits)

    shifted(slice(0, 100))
    assert compare(target).agrees
    shifted(slice(None))
    assert not compare(target).agrees


def test_doctor_s_words_for_a_forward_that_is_another_one() -> None:
    target = tiny_target("mistral")
    assert compare(target).summary().startswith("the forward agrees with that of transformers: ")
    target.transformers.spans = [FULL] * len(target.transformers.spans)
    assert compare(target).summary().startswith("THE FORWARD IS NOT THAT OF TRANSFORMERS: ")


@pytest.mark.sample(3)
@pytest.mark.parametrize("kind", PROBED)
def test_rows_of_every_kind_of_attention_are_exact(kind: str) -> None:
    """Contexts grow past the window's edge, which is in the prefix, the tail, or both."""
    torch.set_num_threads(1)  # with more, a library may split sums by the number of rows, as `doctor` reports
    result = probe_rows(tiny_target(kind, window=PROBED[kind]), num_rows=50, seed=1, first_length=60)
    assert result.num_differing == 0


def test_experts_in_bf16_are_exact_too() -> None:
    torch.set_num_threads(1)  # as above, also where this test runs alone
    assert probe_rows(tiny_target("mixtral", torch.bfloat16), num_rows=50, seed=2).num_differing == 0


@pytest.mark.parametrize(
    ("kind", "window", "spans"),
    [
        ("llama", 100, {FULL}),
        ("mistral", 100, {Span("window", 100)}),
        ("gemma2", 65, {FULL, Span("window", 65)}),
        ("llama4_text", 96, {FULL, Span("chunk", 96)}),
        ("mistral", 5000, {FULL}),  # no text is as long
        ("mistral", 1, {Span("window", 1)}),
    ],
)
def test_the_spans_of_layers_are_those_of_the_model_s_own_masks(kind: str, window: int, spans: set[Span]) -> None:
    assert set(tiny_target(kind, window=window).transformers.spans) == spans


@pytest.mark.parametrize(
    ("config", "word"),
    [
        ({"model_type": "mamba"}, "state-space layers"),
        ({"model_type": "bloom"}, "position biases"),
        ({"model_type": "gpt2"}, "learned positions"),
        ({"model_type": "stablelm"}, "hands nothing on"),
        ({"model_type": "step3p7", "text_config": {"model_type": "step3p5"}}, "more heads of queries in layers with"),
        ({"model_type": "a-new-one"}, "was not compared"),
        ({}, "was not compared"),
        ({"model_type": ["llama"]}, "was not compared"),
        ({"model_type": "nemotron_h", "hybrid_override_pattern": "M-E"}, "none of its 3 layers attends"),
        ({"model_type": "nemotron_h", "hybrid_override_pattern": "M-?*"}, "layers of the kinds ?"),
        ({"model_type": "llama", "layer_types": ["linear_attention"]}, "linear_attention (gated delta nets)"),
        ({"model_type": "granitemoehybrid", "num_hidden_layers": 3}, "none of its 3 layers attends"),
        ({"model_type": "llama", "layer_types": ["mamba", "attention"]}, "mamba (Mamba-2)"),
        ({"model_type": "qwen3_5", "text_config": {"model_type": "mamba2"}}, "needs state-space layers"),
        ({"model_type": "llava", "text_config": {"model_type": "llama"}}, "'llava' was not compared"),
        ({"model_type": "internlm3", "rope_scaling": {"rope_type": "dynamic", "factor": 6.0}}, "dynamic"),
        ({"model_type": "llama", "rope_scaling": {"type": "dynamic", "factor": 2.0}}, "dynamic"),
        ({"model_type": "phi3", "rope_parameters": {"rope_type": "longrope"}}, "longrope"),
        ({"model_type": "gemma3_text", "rope_parameters": {"full_attention": {"rope_type": "dynamic"}}}, "dynamic"),
    ],
)
def test_a_model_that_needs_more_is_refused_in_a_line_before_anything_is_loaded(
    config: dict[str, object], word: str, tmp_path: Path
) -> None:
    sizes = {"max_position_embeddings": 100, "vocab_size": 10}
    (tmp_path / "config.json").write_text(json.dumps({**sizes, **config}), encoding="utf-8")
    with pytest.raises(ModelError) as caught:
        locate_model(str(tmp_path))
    assert word in str(caught.value)
    assert "kinds that run here: afmoe, " in str(caught.value)
    assert "\n" not in str(caught.value)


def test_each_name_belongs_to_one_architecture_of_one_family() -> None:
    """An entry that is made of another one would take its names along."""
    assert sum(map(len, (LLAMA_LIKE, MIXTURES, HYBRIDS))) == len(ARCHITECTURES)
    forms = ARCHITECTURES.values()
    names = [*ARCHITECTURES, *(name for form in forms for name in (*form.aliases, *form.nested_in))]
    in_gguf = [form.gguf.name for form in forms if form.gguf is not None]
    assert len(set(names)) == len(names)
    assert len(set(in_gguf)) == len(in_gguf)


def test_kinds_are_refused_for_a_need_or_run_never_both() -> None:
    assert not set(REFUSED) & set(ARCHITECTURES)
    assert all(what_it_lacks({"model_type": kind}) is None for kind in ARCHITECTURES)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("jamba", "2 of its 2 layers keep another state than keys and values"),
        ("mamba", "2 of its 2 layers keep another state"),
        ("nemotron", "its layers hand nothing on to their attention"),
        ("bert", "its mask shows a row others than the positions up to its own"),
        ("inkling_text", "its attention asks for position_bias"),
    ],
)
def test_what_a_layer_asks_for_and_is_not_known_is_refused_when_it_is_loaded(kind: str, reason: str) -> None:
    """The second guard, for a kind accepted by name."""
    model = AutoModelForCausalLM.from_config(tiny_config(kind)).eval()
    with pytest.raises(ModelError, match=f"some-model: it needs an attention that is not supported: {reason}"):
        TransformersForwards(model, FILES)


def test_a_model_that_fails_on_its_first_tokens_is_told_with_the_reason() -> None:
    model = tiny_model(tiny_config("llama"))
    model.model.layers[1].self_attn.q_proj = torch.nn.Linear(3, 3)
    with pytest.raises(ModelError, match="it cannot run 3 tokens: RuntimeError: "):
        attention_needs.observe_layers(model, "broken", 1024)


def test_a_config_that_asks_for_two_directions_is_refused() -> None:
    config = tiny_config("llama")
    config.is_causal = False
    with pytest.raises(ModelError, match="its mask shows a row others"):
        TransformersForwards(AutoModelForCausalLM.from_config(config), FILES)
