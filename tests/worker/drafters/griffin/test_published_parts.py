"""Parts that others published compute what their authors' layers do, and change no token."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch.nn.functional import linear, silu

from swiftbatch.jobs.sampling_params import SamplingParams
from swiftbatch.scheduler.cli import main
from swiftbatch.worker.drafters.catalogue import FINGERPRINT, ORIGIN
from swiftbatch.worker.drafters.griffin.draft_forwards import NativeRows, TiledRows, rows_of
from swiftbatch.worker.drafters.griffin.griffin_model import GriffinModel, load_griffin
from swiftbatch.worker.forward.native_forwards import NativeForwards
from swiftbatch.worker.forward.target_model import TargetModel
from swiftbatch.worker.model.model_files import GRIFFIN_FILE, PARTS_FOLDER, locate_model
from swiftbatch.worker.sampling.sequence import Sequence
from tests.worker.drafters.griffin.griffin_parts import load
from tests.worker.drafters.griffin.published_drafters import normed
from tests.worker.model.test_kinds_engines import decode

Tensors = dict[str, torch.Tensor]
HIDDEN, WIDTH, EPSILON, THETA = 64, 96, 1e-6, 500_000.0
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_act": "silu",
    "hidden_size": HIDDEN,
    "intermediate_size": WIDTH,
    "max_position_embeddings": 4096,
    "model_type": "llama",
    "num_attention_heads": 1,
    "num_hidden_layers": 1,
    "num_key_value_heads": 1,
    "rms_norm_eps": EPSILON,
    "rope_scaling": None,
    "rope_theta": THETA,
    "vocab_size": 300,
}
NORM = "model.norm.weight"
LAYER = "layers.0."
MATRICES = {
    **{f"self_attn.{name}_proj": (HIDDEN, HIDDEN) for name in "qkvo"},
    **{f"mlp.{name}_proj": (WIDTH, HIDDEN) for name in ("gate", "up")},
}
KINDS = {
    "eagle": {"fc.weight": (HIDDEN, 2 * HIDDEN), "fc.bias": (HIDDEN,), f"{LAYER}mlp.down_proj.weight": (HIDDEN, WIDTH)},
    "griffin": {
        "fc.fc.weight": (HIDDEN, 2 * HIDDEN),
        "fc.fc.bias": (HIDDEN,),
        "fc.post_attention_layernorm.weight": (HIDDEN,),
        "fc.mlp.input_layernorm.weight": (HIDDEN,),
        "fc.mlp.up_proj.weight": (WIDTH, 2 * HIDDEN),
        "fc.mlp.down_proj.weight": (HIDDEN, WIDTH),
        f"{LAYER}mlp.down_proj.weight": (2 * HIDDEN, WIDTH),
    },
}


@pytest.fixture
def target_folder(tiny_model: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_model, tmp_path / "model", ignore=shutil.ignore_patterns(PARTS_FOLDER)))


def layer_of(kind: str, has_bias: bool = False) -> Tensors:
    """Make numbers that bfloat16 holds."""
    shapes: dict[str, tuple[int, ...]] = {f"{LAYER}{name}.weight": shape for name, shape in MATRICES.items()}
    shapes |= {f"{LAYER}post_attention_layernorm.weight": (HIDDEN,), **KINDS[kind]}
    shapes |= {f"{LAYER}self_attn.{name}_proj.bias": (HIDDEN,) for name in "qkv" if has_bias}
    torch.manual_seed(4)
    made = {name: (0.1 * torch.randn(shape)).to(torch.bfloat16) for name, shape in shapes.items()}
    return {name: each + 1 if name.endswith("norm.weight") else each for name, each in made.items()}


def publish(folder: Path, tensors: Tensors, target: Path, **changes: Any) -> Path:
    folder.mkdir(exist_ok=True)
    embedding = load(target).forwards.embed(torch.arange(load(target).vocab_size))
    torch.save({"embed_tokens.weight": embedding.half(), **tensors}, folder / "pytorch_model.bin")
    (folder / "config.json").write_text(json.dumps(CONFIG | changes))
    return folder


def bring(kind: str, folder: Path, model: Path, output: Path) -> Result:
    return CliRunner().invoke(
        main, ["train", "import", kind, f"{folder}", "--model", f"{model}", "--output", f"{output}"]
    )


def attended(rows: torch.Tensor, of: Callable[[str], torch.Tensor], biases: Tensors) -> torch.Tensor:
    """One head attends to a text's earlier rows."""
    query, key, value = (
        linear(rows, of(f"self_attn.{n}_proj"), biases.get(f"{LAYER}self_attn.{n}_proj.bias")) for n in "qkv"
    )
    angles = torch.arange(len(rows))[:, None] * THETA ** (-torch.arange(0, HIDDEN, 2) / HIDDEN)

    def turned(each: torch.Tensor) -> torch.Tensor:
        left, right = each.chunk(2, dim=-1)
        return torch.cat([left * angles.cos() - right * angles.sin(), right * angles.cos() + left * angles.sin()], -1)

    scores = turned(query) @ turned(key).T / HIDDEN**0.5
    hidden = scores.masked_fill(~torch.ones_like(scores, dtype=torch.bool).tril(), -torch.inf)
    return linear(hidden.softmax(-1) @ value, of("self_attn.o_proj"))


def published(kind: str, tensors: Tensors, features: torch.Tensor, tokens: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return what the authors' layer predicts and what it feeds back."""
    floats = {name: each.float() for name, each in tensors.items()}

    def of(name: str) -> torch.Tensor:
        return floats[f"{LAYER}{name}.weight"]

    joined = torch.cat([tokens, features], dim=-1)
    if kind == "eagle":
        fused = linear(joined, floats["fc.weight"], floats["fc.bias"])
    else:
        fused = linear(joined, floats["fc.fc.weight"], floats["fc.fc.bias"])
        norm, second = floats["fc.post_attention_layernorm.weight"], floats["fc.mlp.input_layernorm.weight"]
        both = torch.cat([normed(normed(fused, norm), second), normed(tokens, second)], dim=-1)
        fused = fused + linear(silu(linear(both, floats["fc.mlp.up_proj.weight"])), floats["fc.mlp.down_proj.weight"])
    rows = fused + attended(fused, of, floats)
    inner = normed(rows, of("post_attention_layernorm"))
    outer = linear(silu(linear(inner, of("mlp.gate_proj"))) * linear(inner, of("mlp.up_proj")), of("mlp.down_proj"))
    return (rows + outer, rows + outer) if kind == "eagle" else tuple(rows + each for each in outer.chunk(2, dim=-1))


def in_float32(model: GriffinModel) -> GriffinModel:
    model.set_attention("sdpa")
    return model.float()


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_an_imported_layer_computes_what_its_authors_layer_does(
    kind: str, has_bias: bool, target_folder: Path, tmp_path: Path
) -> None:
    tensors = layer_of(kind, has_bias)
    folder = publish(tmp_path / "published", tensors, target_folder)
    result = bring(kind, folder, target_folder, tmp_path / "parts")
    assert result.exit_code == 0, result.output
    assert result.output == (
        f"wrote {tmp_path}/parts/{GRIFFIN_FILE}; use it with --engine griffin --draft-model {tmp_path}/parts\n"
    )
    target = load(target_folder)
    model = in_float32(load_griffin(tmp_path / "parts", target))
    features, tokens = torch.randn(2, 40, HIDDEN)
    found = model(features[None], tokens[None], torch.arange(40)[None])
    for ours, theirs in zip(found, published(kind, tensors, features, tokens), strict=True):
        torch.testing.assert_close(ours[0], theirs, rtol=1e-4, atol=1e-4)
    with safe_open(tmp_path / "parts" / GRIFFIN_FILE, framework="pt") as file:
        header = file.metadata()
    assert header[FINGERPRINT] == target.files.fingerprint
    assert header[ORIGIN].startswith(f"{kind} of published, fingerprint ")


def texts(target: TargetModel) -> list[Sequence]:
    params = SamplingParams(max_tokens=40, seed=3, ignore_eos=True)
    prompts = torch.randint(3, target.vocab_size, (2, 80), generator=torch.Generator().manual_seed(5))
    return [Sequence(f"s{i}", each.tolist(), params, target.vocab_size) for i, each in enumerate(prompts)]


@pytest.mark.parametrize("kind", KINDS)
def test_an_imported_layer_changes_no_token(kind: str, target_folder: Path, tmp_path: Path) -> None:
    folder = publish(tmp_path / "published", layer_of(kind), target_folder)
    assert bring(kind, folder, target_folder, target_folder / PARTS_FOLDER).exit_code == 0
    target = load(target_folder)
    rows = rows_of(load_griffin(None, target), target, 5)
    if isinstance(target.forwards, NativeForwards):
        assert isinstance(rows, NativeRows if kind == "eagle" else TiledRows)
    expected = decode(target, "autoregressive", texts(target))
    for engine in ("griffin", "griffin-paper"):
        assert decode(target, engine, texts(target)) == expected


def test_a_bias_of_the_fusion_may_be_absent_and_a_norm_in_front_present(target_folder: Path, tmp_path: Path) -> None:
    tensors = layer_of("eagle") | {f"{LAYER}input_layernorm.weight": torch.ones(HIDDEN)}
    del tensors["fc.bias"]
    folder = publish(tmp_path / "published", tensors, target_folder)
    assert bring("eagle", folder, target_folder, tmp_path / "parts").exit_code == 0
    model = load_griffin(tmp_path / "parts", load(target_folder))
    assert not model.fusion.fuse.bias.any()
    assert replace(model.config, has_input_norm=False) != model.config


REFUSALS: dict[str, tuple[str, Callable[[Tensors], object], dict[str, Any], str]] = {
    "a tensor less": ("eagle", lambda t: t.pop("fc.weight"), {}, "`fc.weight` is missing; expected floats [64, 128]"),
    "a tensor more": ("eagle", lambda t: t.update(x=torch.ones(1)), {}, "unknown tensors x"),
    "a second layer": ("eagle", lambda t: t.update({"layers.1.x": torch.ones(1)}), {}, "unknown tensors layers.1.x"),
    "another shape": (
        "griffin",
        lambda t: t.update({f"{LAYER}mlp.down_proj.weight": torch.ones(HIDDEN, WIDTH)}),
        {},
        "`layers.0.mlp.down_proj.weight` is torch.float32 [64, 96]; expected floats [128, 96]",
    ),
    "EAGLE-3": ("eagle", lambda t: t.update(d2t=torch.ones(3)), {}, "it has d2t, so it is EAGLE-3's"),
    "another embedding": (
        "eagle",
        lambda t: t.update({"embed_tokens.weight": torch.ones(300, HIDDEN)}),
        {},
        "its embed_tokens.weight is not that of",
    ),
    "an embedding of NaN": (
        "eagle",
        lambda t: t.update({"embed_tokens.weight": torch.full((300, HIDDEN), torch.nan)}),
        {},
        "its embed_tokens.weight is not that of",
    ),
    "sizes that no memory holds": ("eagle", len, {"intermediate_size": 10**12}, "expected floats [1000000000000, 64]"),
    "another width": ("eagle", len, {"hidden_size": 128}, "it reads features of 128 numbers, and"),
    "no sizes": ("eagle", len, {"num_attention_heads": None}, "its num_attention_heads is None; expected the sizes"),
    "other heads": ("eagle", len, {"num_attention_heads": 3}, "its hidden_size is 64 for 3 heads; expected the sizes"),
    "other angles": (
        "eagle",
        len,
        {"rope_scaling": {"type": "linear", "factor": 2.0}},
        "config.json has rope_scaling = {'type': 'linear', 'factor': 2.0}; expected null",
    ),
    "another activation": ("griffin", len, {"hidden_act": "gelu"}, "config.json has hidden_act = 'gelu'; expected"),
    "GRIFFIN as EAGLE": ("eagle", lambda t: t.update(layer_of("griffin")), {}, "`layers.0.mlp.down_proj.weight` is"),
    "heads of TokenSwift": (
        "tokenswift",
        lambda t: t.update({"model.medusa_layers.0.linear.weight": torch.ones(HIDDEN, HIDDEN)}),
        {},
        "its heads norm what they read and what they give, and begin with the hidden state in front of",
    ),
    "no heads": ("tokenswift", len, {}, "it has no medusa_layers.0.linear.weight; expected the heads"),
}


@pytest.mark.parametrize("what", REFUSALS)
def test_what_no_engine_computes_is_refused_in_a_line(what: str, target_folder: Path, tmp_path: Path) -> None:
    kind, change, config, words = REFUSALS[what]
    tensors = layer_of("eagle" if kind == "tokenswift" else kind)
    change(tensors)
    result = bring(
        kind, publish(tmp_path / "published", tensors, target_folder, **config), target_folder, tmp_path / "parts"
    )
    assert result.exit_code == 2
    assert words in result.output
    assert result.output.startswith(f"swiftbatch: {tmp_path / 'published'}: ")
    assert result.output.count("\n") == 1
    assert not (tmp_path / "parts").exists()


def test_a_damaged_part_a_folder_without_one_and_a_taken_output_are_refused(
    target_folder: Path, tmp_path: Path
) -> None:
    folder = publish(tmp_path / "published", layer_of("eagle"), target_folder)
    (tmp_path / "parts").mkdir()
    (tmp_path / "parts" / GRIFFIN_FILE).write_text("mine")
    assert (
        "found something there already; name another folder"
        in bring("eagle", folder, target_folder, tmp_path / "parts").output
    )
    assert (tmp_path / "parts" / GRIFFIN_FILE).read_text() == "mine"
    (folder / "pytorch_model.bin").write_bytes((folder / "pytorch_model.bin").read_bytes()[:-100])
    assert "pytorch_model.bin is damaged or cut off (" in bring("eagle", folder, target_folder, tmp_path / "new").output
    (folder / "pytorch_model.bin").unlink()
    assert (
        "no model.safetensors or pytorch_model.bin; expected a part"
        in bring("eagle", folder, target_folder, tmp_path / "new").output
    )


def test_a_small_model_becomes_a_draft_model(tiny_model: Path, target_folder: Path, tmp_path: Path) -> None:
    """As llama-68m is published: pickled, with constants of older versions."""
    folder = Path(shutil.copytree(tiny_model / PARTS_FOLDER / "draft", tmp_path / "llama-68m"))
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no mapping)
    torch.save(
        {**tensors, "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(32)}, folder / "pytorch_model.bin"
    )
    (folder / "model.safetensors").unlink()
    result = bring("draft", folder, target_folder, target_folder / PARTS_FOLDER / "draft")
    assert result.exit_code == 0, result.output
    assert "--engine triforce" in result.output
    made = target_folder / PARTS_FOLDER / "draft"
    with safe_open(made / "model.safetensors", framework="pt") as file:
        header = file.metadata()
        assert all(torch.equal(file.get_tensor(name), each) for name, each in tensors.items())
        assert set(file.keys()) == set(tensors)
    target = load(target_folder)
    assert header[FINGERPRINT] == target.files.fingerprint
    assert header[ORIGIN] == f"draft of llama-68m, fingerprint {locate_model(str(folder)).fingerprint}"
    assert not list(made.glob("*.bin"))
    assert decode(target, "triforce", texts(target)) == decode(target, "autoregressive", texts(target))


def test_a_model_without_a_tokenizer_json_takes_a_draft_model_by_its_size(
    tiny_model: Path, target_folder: Path, tmp_path: Path
) -> None:
    """As Vicuna was published."""
    (target_folder / "tokenizer.json").unlink()
    result = bring("draft", tiny_model / PARTS_FOLDER / "draft", target_folder, tmp_path / "parts")
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"vocab_size": 299}, "its vocabulary (299 tokens) is not that of"),
        ({"max_position_embeddings": 512}, "it has 512 positions; the engine needs 592"),
        ({"model_type": "mamba"}, "needs state-space layers"),
    ],
)
def test_a_small_model_that_cannot_draft_is_refused(
    change: dict[str, Any], words: str, tiny_model: Path, target_folder: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(tiny_model / PARTS_FOLDER / "draft", tmp_path / "small"))
    said = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(said | change))
    result = bring("draft", folder, target_folder, tmp_path / "parts")
    assert (result.exit_code, words in result.output) == (2, True), result.output
    assert not (tmp_path / "parts").exists()


@pytest.mark.parametrize("harm", [lambda t: t.pop(NORM), lambda t: t[NORM].fill_(torch.nan)])
def test_a_small_model_with_damaged_weights_is_refused(
    harm: Callable[[Tensors], Any], tiny_model: Path, target_folder: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(tiny_model / PARTS_FOLDER / "draft", tmp_path / "small"))
    harm(tensors := load_file(folder / "model.safetensors"))
    save_file(tensors, folder / "model.safetensors")
    result = bring("draft", folder, target_folder, tmp_path / "parts")
    assert result.exit_code == 2, result.output
    assert not (tmp_path / "parts").exists()
