"""GGUF metadata becomes the twin's config."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf import GGUFWriter
from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from swiftbatch.jobs.errors import ModelError
from swiftbatch.worker.inspection import inspect_model
from swiftbatch.worker.model.compute_path import path_on
from swiftbatch.worker.model.gguf.gguf_folder import config_of, gguf_folder, shortest
from swiftbatch.worker.model.gguf.gguf_model import read_gguf
from swiftbatch.worker.model.gguf.gguf_tokenizer import generation_of
from swiftbatch.worker.model.gguf.header import GGUFError
from tests.worker.model.gguf.tiny_gguf import SIZES, TINY, finish, twin_config, write_metadata


def written(folder: Path, name: str = "llama", tensors: dict[str, np.ndarray] | None = None, **said: Any) -> Path:
    writer = GGUFWriter(folder / "model.gguf", name)
    write_metadata(writer, name, twin_config(name), said)
    embedding = np.zeros((SIZES["vocab_size"], SIZES["hidden_size"]), np.float32)
    found = {"token_embd.weight": embedding, **{f"blk.{number}.attn_norm.weight": embedding[0] for number in range(5)}}
    for key, values in (found | (tensors or {})).items():
        writer.add_tensor(key, values)
    finish(writer)
    return folder / "model.gguf"


def config_in(folder: Path, name: str = "llama", **said: Any) -> dict[str, Any]:
    return config_of(read_gguf(written(folder, name, **said)))


@pytest.mark.parametrize("name", TINY)
def test_the_config_is_that_of_the_twin(name: str, tmp_path: Path) -> None:
    ours = config_in(tmp_path, name)
    expected = twin_config(name).to_dict()
    theirs = AutoConfig.for_model(**ours | {"tie_word_embeddings": expected["tie_word_embeddings"]}).to_dict()
    for config in (theirs, expected):
        config["rope_parameters"].pop("partial_rotary_factor", None)  # which is 1
    no_matter = {"initializer_range", "max_window_layers"}
    assert {key: theirs.get(key) for key in expected if key not in no_matter} == {
        key: value for key, value in expected.items() if key not in no_matter
    }


@pytest.mark.parametrize("name", ["granite", "llama", "phi3", "qwen2", "qwen3", "smollm3"])
def test_dense_kinds_run_in_the_kernels(name: str, tmp_path: Path) -> None:
    assert path_on("cuda", config_in(tmp_path, name)).name == "kernels"


def test_numbers_are_those_that_were_written_before_float32() -> None:
    assert [shortest(float(np.float32(value))) for value in (1e-5, 0.22, 1e6, 0.015625)] == [1e-5, 0.22, 1e6, 0.015625]


def llama3_factors(factor: float) -> np.ndarray:
    """Return Llama 3's frequency factors as llama.cpp writes them."""
    frequencies = 50_000.0 ** -(np.arange(0, 64, 2, dtype=np.float32) / 64)
    found = []
    for wavelength in 2 * math.pi / frequencies:
        smooth = (8192 / wavelength - 1) / 3
        inner = 1 / ((1 - smooth) / factor + smooth)
        found.append(1 if wavelength < 8192 / 4 else factor if wavelength > 8192 else inner)
    return np.array(found, dtype=np.float32)


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_factors_of_llama_3_become_its_rope_scaling(factor: float, tmp_path: Path) -> None:
    factors = llama3_factors(factor)
    config = config_of(read_gguf(written(tmp_path, tensors={"rope_freqs.weight": factors})))
    assert config["rope_scaling"]["factor"] == factor
    read = AutoConfig.for_model(**config)
    stretched, _ = ROPE_INIT_FUNCTIONS["llama3"](read, None)
    assert np.allclose(stretched.numpy() * factors, 50_000.0 ** -(np.arange(0, 64, 2) / 64), rtol=1e-5)


def test_factors_of_one_stretch_nothing(tmp_path: Path) -> None:
    file = written(tmp_path, tensors={"rope_freqs.weight": np.ones(32, np.float32)})
    assert config_of(read_gguf(file))["rope_scaling"] is None


@pytest.mark.parametrize("change", [lambda each: each * 1.01, lambda each: each[:-1], lambda each: each[::-1].copy()])
def test_other_factors_are_refused(change: Any, tmp_path: Path) -> None:
    file = written(tmp_path, tensors={"rope_freqs.weight": change(llama3_factors(8.0))})
    with pytest.raises(GGUFError, match="not those of Llama 3"):
        config_of(read_gguf(file))


def test_yarn_and_linear_scaling_are_kept(tmp_path: Path) -> None:
    said = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 32_768}
    assert config_in(tmp_path, "qwen3", **said)["rope_scaling"] == {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 32_768,
    }
    linear = {"rope.scaling.type": "linear", "rope.scaling.factor": 2.0}
    assert config_in(tmp_path, **linear)["rope_scaling"] == {"rope_type": "linear", "factor": 2.0}


def test_a_llama_with_a_window_is_a_mistral(tmp_path: Path) -> None:
    config = config_in(tmp_path, **{"attention.sliding_window": 128})
    assert (config["model_type"], config["sliding_window"]) == ("mistral", 128)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a key that is not known": ({"logit_scale": 2.0}, "llama.logit_scale = 2.0, which may change a layer"),
    "experts": ({"expert_count": 8}, "llama.expert_count = 8"),
    "a way to stretch positions": ({"rope.scaling.type": "longrope"}, "stretched as 'longrope'"),
    "yarn without a length": ({"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0}, "original_context_length"),
    "part of each head": ({"rope.dimension_count": 32}, "rope.dimension_count = 32"),
    "values of another width": ({"attention.value_length": 32}, "value_length = 32"),
    "heads that differ by layer": ({"attention.head_count_kv": [2, 4]}, "expected one number for all layers"),
    "no heads": ({"attention.head_count": 0}, "attention.head_count = 0, expected a positive integer"),
    "an epsilon of nan": ({"attention.layer_norm_rms_epsilon": math.nan}, "epsilon = nan"),
    "a base without end": ({"rope.freq_base": math.inf}, "rope.freq_base = inf"),
    "widths that differ by layer": ({"attention.key_length": [64, 64]}, "key_length as array([64, 64]"),
    "ways that differ by layer": ({"rope.scaling.type": [1, 2]}, "rope.scaling.type as array([1, 2]"),
    "a base of nan": ({"rope.freq_base": math.nan}, "rope.freq_base = nan"),
    "another number of tokens": ({"vocab_size": 7}, "vocab_size = 7, and its embedding"),
    "more layers than tensors": ({"block_count": 2**31}, "fewer than its 2,147,483,648 layers"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_may_change_a_forward_is_refused_by_name(name: str, tmp_path: Path) -> None:
    said, words = REFUSED[name]
    with pytest.raises(GGUFError, match=re.escape(words)):
        config_in(tmp_path, **said)


def test_other_architectures_and_tensors_are_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    writer = GGUFWriter(tmp_path / "other.gguf", "mamba")
    writer.add_tensor("token_embd.weight", np.zeros((4, 4), np.float32))
    finish(writer)
    with pytest.raises(ModelError, match="its architecture 'mamba' is not read here; expected one of gemma, gemma2"):
        gguf_folder("m", tmp_path / "other.gguf", with_tokenizer=False)
    file = written(tmp_path, tensors={"blk.0.ssm_a.weight": np.ones(4, np.float32)})
    with pytest.raises(ModelError, match=r"its tensor blk\.0\.ssm_a\.weight has no place in a llama"):
        gguf_folder("m", file, with_tokenizer=False)


def test_experts_in_one_dimension_are_refused_before_anything_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    file = written(tmp_path, "qwen3moe", {"blk.0.ffn_up_exps.weight": np.ones(4, np.float32)})
    with pytest.raises(ModelError, match=r"ffn_up_exps\.weight has the shape \[4\], expected three dimensions"):
        inspect_model(str(file))


def test_a_text_ends_at_each_token_that_ends_a_turn(tmp_path: Path) -> None:
    writer = GGUFWriter(tmp_path / "model.gguf", "llama")
    writer.add_token_list(["a", "<|im_end|>", "<|eot_id|>", "<|im_end|>", "b", "c"])
    writer.add_token_types([1, gguf.TokenType.CONTROL, 1, gguf.TokenType.CONTROL, 1, 1])
    writer.add_eos_token_id(4)
    writer.add_eot_token_id(5)
    finish(writer)
    assert generation_of(read_gguf(tmp_path / "model.gguf")) == {"eos_token_id": [1, 2, 3, 4, 5]}
