"""Published config.json files that need no transformers.

Sizes are cut down, with windows shorter than texts.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from swiftbatch.jobs.errors import ModelError
from swiftbatch.worker.forward.native_forwards import NativeForwards
from swiftbatch.worker.forward.target_model import TargetModel
from swiftbatch.worker.inspection import inspect_model
from swiftbatch.worker.kernels.decoder_weights import DecoderWeights
from swiftbatch.worker.kernels.transformers_weights import decoder_weights
from swiftbatch.worker.kv.cache_rows import CacheShape
from swiftbatch.worker.kv.full_cache import FullKVCache
from swiftbatch.worker.kv.model_sizes import read_sizes
from swiftbatch.worker.model.causal_lm import load_causal_lm
from swiftbatch.worker.model.decoder_loading import dense_weights
from swiftbatch.worker.model.model_files import ModelFiles
from swiftbatch.worker.model.text_config import text_view
from tests.worker.kernels.kernel_parts import chain
from tests.worker.kernels.reference import ReferenceDecoder
from tests.worker.model.dense_configs import LLAMA3, PUBLISHED, YARN
from tests.worker.model.test_dense_loading import files_in, saved

BF16, CPU = torch.bfloat16, torch.device("cpu")

LEFT: dict[str, tuple[str, dict[str, Any]]] = {  # left to transformers, each changed from a supported model
    "a number that is not known": ("Qwen3 8B", {"residual_multiplier": 0.22}),
    "numbers that are not known": ("Qwen3 8B", {"layer_scales": [0.5, 0.5]}),
    "a window that is no number": ("Qwen2.5 7B Instruct", {"sliding_window": "none"}),
    "types of layers that its class does not look at": (
        "Mistral 7B v0.1",
        {"layer_types": ["full_attention", "sliding_attention"], "head_dim": 64},
    ),
    "one type of layers beside a window": ("Mistral 7B v0.1", {"layer_types": ["full_attention"] * 2, "head_dim": 64}),
    "a ramp of its own": ("Qwen2.5 7B Instruct", {"rope_scaling": YARN | {"ramp": 2.0}}),
    "no factor": ("Llama 3.1 8B Instruct", {"rope_scaling": {"rope_type": "llama3"}}),
    "a factor of 0": ("Llama 3.1 8B Instruct", {"rope_scaling": LLAMA3 | {"factor": 0}}),
    "words for numbers": ("Llama 3.1 8B Instruct", {"rope_scaling": LLAMA3 | {"factor": "8.0"}}),
    "one number more": ("Llama 3.1 8B Instruct", {"rope_scaling": LLAMA3 | {"beta_fast": 32.0}}),
    "no dictionary": ("Llama 3.1 8B Instruct", {"rope_scaling": "llama3"}),
    "a type that is a list": ("Llama 3.1 8B Instruct", {"rope_scaling": LLAMA3 | {"rope_type": ["llama3"]}}),
}
NO_MODEL = {"no factor", "a factor of 0", "words for numbers", "no dictionary", "a type that is a list"}
NO_MODEL |= {"a window that is no number"}


def folder_of(name: str, folder: Path) -> ModelFiles:
    view = {key: value for key, value in text_view(PUBLISHED[name]).items() if key != "_attn_implementation"}
    files = saved(folder, AutoConfig.for_model(**view))
    (folder / "config.json").write_text(json.dumps(PUBLISHED[name]))
    return files


def logits(weights: DecoderWeights) -> torch.Tensor:
    """Return two blocks' logits at positions with many rotations."""
    sizes = weights.sizes
    shape = CacheShape(sizes.num_layers, sizes.num_kv_heads, sizes.head_dim, sizes.dtype, CPU)
    cache, decoder, found = FullKVCache(shape, 128), ReferenceDecoder(weights), []
    for start in (0, 64):
        block = [(7 * (start + i)) % sizes.vocab for i in range(64)]
        found.append(decoder.forward([chain(cache, block)])[1])
        cache.advance(len(block))
    return torch.cat([each for each in found if each is not None])


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_config_is_understood_and_gives_the_bits_of_transformers_weights(name: str, tmp_path: Path) -> None:
    files = folder_of(name, tmp_path)
    ours, theirs = dense_weights(files, BF16), decoder_weights(load_causal_lm(files, BF16))
    assert ours is not None
    assert theirs is not None
    assert ours.sizes == theirs.sizes
    assert (ours.rotary.frequencies == theirs.rotary.frequencies).all()
    assert torch.equal(logits(ours), logits(theirs))
    assert read_sizes(files, "bfloat16") is not None, "a GPU's memory can be planned"


@pytest.mark.parametrize(
    ("name", "key"), [("Llama 3.1 8B Instruct", "rope_scaling"), ("Mistral 7B v0.1", "sliding_window")]
)
def test_a_stretch_and_a_window_change_logits(name: str, key: str, tmp_path: Path) -> None:
    """So tests of logits would notice their absence."""
    files = folder_of(name, tmp_path)
    published = dense_weights(files, BF16)
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED[name] | {key: None}))
    plain = dense_weights(files, BF16)
    assert published is not None
    assert plain is not None
    assert not torch.equal(logits(published), logits(plain))


@pytest.mark.parametrize("change", LEFT)
def test_what_says_more_is_left_to_transformers_and_ends_in_no_traceback(change: str, tmp_path: Path) -> None:
    name, changes = LEFT[change]
    files = folder_of(name, tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED[name] | changes))
    assert dense_weights(files_in(tmp_path), BF16) is None
    if change in NO_MODEL:
        with pytest.raises(ModelError, match=r"\A.*\Z"):  # in one line
            TargetModel.load(files, "bfloat16", "cpu")
    else:
        assert_told(TargetModel.load(files, "bfloat16", "cpu"))


def test_kernels_that_take_over_what_transformers_has_loaded_are_told(tmp_path: Path) -> None:
    """This config leaves the base of its angles to a default."""
    folder_of("Mistral 7B v0.3", tmp_path)
    config = PUBLISHED["Mistral 7B v0.3"] | {"max_position_embeddings": 4096}
    del config["rope_theta"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    target = TargetModel.load(files_in(tmp_path), "bfloat16", "cpu")
    assert isinstance(target.forwards, NativeForwards)
    assert_told(target)


def assert_told(target: TargetModel) -> None:
    found = inspect_model(str(target.files.path))
    assert found.refusal is None
    assert found.cpu is not None
    assert found.cuda is not None
    assert (found.cpu.name == "kernels") == isinstance(target.forwards, NativeForwards)
    assert found.cuda.name == "transformers"
