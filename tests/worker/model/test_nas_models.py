"""Llama-Nemotron's NAS models, whose layers lack parts or have MLPs of their own width."""

from __future__ import annotations

import copy
import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoConfig

from swiftbatch.jobs.errors import ModelError
from swiftbatch.worker.drafters.mtp.predictor import PredictorModule
from swiftbatch.worker.exactness.forward_comparisons import probe_rows
from swiftbatch.worker.inspection import inspect_model
from swiftbatch.worker.model.causal_lm import load_causal_lm
from swiftbatch.worker.model.decoder_loading import dense_weights
from swiftbatch.worker.model.formats.layout import heads_in
from swiftbatch.worker.model.model_files import locate_model
from swiftbatch.worker.model.mtp_layers import predictor_of
from swiftbatch.worker.model.text_config import text_view
from swiftbatch.worker.text.tokenizer_loading import loaded_tokenizer
from tests.worker.kernels.kernel_parts import needs_kernels
from tests.worker.model.formats.examples import EXAMPLES
from tests.worker.model.formats.twins import logits_of, make_twins
from tests.worker.model.kind_promises import (
    check_a_disk_changes_no_text,
    check_engines_give_plain_tokens_beside_a_resumed_job,
    check_texts_are_those_of_transformers,
    loaded,
    save_parts,
)
from tests.worker.model.kind_sizes import nas_blocks
from tests.worker.model.nas_configs import PUBLISHED, SUPER, publish, published_tensors, whole_llama

pytestmark = [pytest.mark.long, needs_kernels]

NUM_TOKENS = 200
TEXT = [(7 * each + 3) % 61 for each in range(NUM_TOKENS)]


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_model_makes_the_choices_of_a_llama_whose_missing_parts_are_zeros(
    name: str, tmp_path: Path
) -> None:
    publish(name, tmp_path)
    target, expected = loaded(tmp_path, "float32"), whole_llama(PUBLISHED[name])(torch.tensor([TEXT])).logits[0]
    for found in (logits_of(target, TEXT), load_causal_lm(target.files, torch.float32)(torch.tensor([TEXT])).logits[0]):
        assert int((found.argmax(-1) == expected.argmax(-1)).sum()) == NUM_TOKENS
        assert (found - expected).abs().max() < 1e-4 * expected.abs().max()
    check_texts_are_those_of_transformers(target)


@pytest.mark.parametrize("name", PUBLISHED)
def test_inspect_counts_the_layers_that_attend_and_says_that_our_kernels_run_all(name: str, tmp_path: Path) -> None:
    publish(name, tmp_path)
    told = inspect_model(str(tmp_path))
    assert told.cpu is not None
    assert told.cuda is not None
    assert (told.refusal, told.cpu.name, told.cuda.name) == (None, "kernels", "kernels")
    num_attending = sum(not block["attention"]["no_op"] for block in PUBLISHED[name]["block_configs"])
    assert told.bytes_per_position == num_attending * 2 * 64 * 2
    assert told.num_parameters == sum(each.numel() for each in published_tensors(PUBLISHED[name]).values())


def test_the_tokenizer_asks_for_no_class_that_transformers_lacks(tmp_path: Path) -> None:
    publish("Super 49B", tmp_path)
    embedded = locate_model("embedded")
    shutil.copy(embedded.path / "tokenizer.json", tmp_path)
    said = json.loads((embedded.path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(said | {"tokenizer_class": "PreTrainedTokenizerFast"}))
    found, expected = (loaded_tokenizer(files) for files in (locate_model(str(tmp_path)), embedded))
    assert found.encode("It had rained since noon.") == expected.encode("It had rained since noon.")


@pytest.mark.parametrize("name", PUBLISHED)
def test_every_engine_gives_plain_decoding_s_tokens_beside_a_resumed_job(name: str, tmp_path: Path) -> None:
    publish(name, tmp_path)
    view = text_view(PUBLISHED[name])
    save_parts(tmp_path, AutoConfig.for_model(view.pop("model_type"), **view))
    check_engines_give_plain_tokens_beside_a_resumed_job(loaded(tmp_path, "bfloat16"))


def test_texts_are_the_same_where_keys_and_values_lie_on_a_disk(tmp_path: Path) -> None:
    publish("Super 49B", tmp_path)
    check_a_disk_changes_no_text(tmp_path, tmp_path)


@pytest.mark.parametrize("num_rows", [300, pytest.param(10_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("name", PUBLISHED)
def test_of_many_random_tree_rows_none_differs_in_any_bit(name: str, dtype: str, num_rows: int, tmp_path: Path) -> None:
    publish(name, tmp_path)
    assert probe_rows(loaded(tmp_path, dtype), num_rows, seed=1).num_differing == 0


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_layer_that_predicts_is_like_the_first_one_that_lacks_no_part(name: str, tmp_path: Path) -> None:
    view = text_view(PUBLISHED[name])
    save_file(PredictorModule(view).tensors(), tmp_path / "mtp.safetensors")
    dense = predictor_of(heads_in(tmp_path / "mtp.safetensors").items(), view, tmp_path).dense
    assert dense.attending == {0}
    assert dense.mlp_widths == ({"Super 49B": 256, "Ultra 253B": 512, "one that may come": 256}[name],)


@pytest.mark.parametrize("packed", ["ModelOpt FP8", "ModelOpt NVFP4"])
def test_packed_weights_give_the_bits_of_their_dequantized_twin(packed: str, tmp_path: Path) -> None:
    twins = make_twins(EXAMPLES[packed], tmp_path, SUPER, published_tensors(SUPER))
    found, expected = (logits_of(loaded(folder, "bfloat16"), TEXT[:40]) for folder in twins)
    assert torch.equal(found, expected)
    assert float(found.std()) > 0.1


def test_a_width_that_the_weights_do_not_have_is_told_in_one_line(tmp_path: Path) -> None:
    publish("Super 49B", tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(SUPER | {"block_configs": nas_blocks(*[(2, 3.0)] * 5)}))
    files = locate_model(str(tmp_path))
    assert dense_weights(files, torch.float32) is None
    with pytest.raises(ModelError, match=r"its config\.json and its weights do not belong together"):
        loaded(tmp_path, "float32")


BLOCK = nas_blocks((2, 3.0))[0]


@pytest.mark.parametrize(
    ("number", "part", "changes", "words"),
    [
        (1, "attention", {"replace_with_linear": True}, "[1].attention.replace_with_linear = True; expected null or"),
        (0, "attention", {"window_length": 8192}, "[0].attention.window_length = 8192; expected null or false"),
        (0, "attention", {"num_sink_tokens": 4}, "[0].attention.num_sink_tokens = 4; expected null or false"),
        (0, "attention", {"a\nb": 4}, r"[0].attention.a\nb = 4; expected null or false"),
        (4, "ffn", {"sparsify": ["2:4"]}, "[4].ffn.sparsify = ['2:4']; expected null or false"),
        (2, "ffn", {"replace_with_linear": True}, "[2].ffn.replace_with_linear = True; expected null or false"),
        (0, "attention", {"n_heads_in_group": None}, "n_heads_in_group = None; expected a positive integer"),
        (
            0,
            "attention",
            {"n_heads_in_group": 1},
            "n_heads_in_group = 1, 2 for 2 heads; expected a divisor that is the",
        ),
        (0, "ffn", {"ffn_mult": -1}, "[0].ffn.ffn_mult = -1; expected a finite number above 0"),
        (0, "ffn", {"no_op": "yes"}, "[0].ffn.no_op = 'yes'; expected true or false"),
    ],
)
def test_a_layer_of_another_form_is_refused_by_its_key(
    number: int, part: str, changes: dict[str, Any], words: str, tmp_path: Path
) -> None:
    blocks = copy.deepcopy(SUPER["block_configs"])
    blocks[number][part] |= changes
    assert_refused({"block_configs": blocks}, words, tmp_path)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"block_configs": None}, "config.json has block_configs = None; expected one for each of 5 layers"),
        ({"block_configs": [BLOCK] * 4}, "config.json has 4 block_configs; expected one for each of 5 layers"),
        ({"block_configs": [BLOCK] * 4 + [7]}, "block_configs[4].attention = 7; expected an object"),
        ({"block_configs": nas_blocks(*[(None, 3.0)] * 5)}, "n_heads_in_group = null for 2 heads; expected a divisor"),
        ({"hidden_size": math.inf}, "config.json has hidden_size = inf; expected a positive integer"),
        ({"num_attention_heads": 3}, "n_heads_in_group = 2 for 3 heads; expected a divisor"),
        ({"block_configs": nas_blocks(*[(2, None)] * 5)}, "intermediate_size = 0; expected a positive integer"),
    ],
)
def test_blocks_that_tell_of_no_model_are_refused_in_a_line(
    changes: dict[str, Any], words: str, tmp_path: Path
) -> None:
    assert_refused(changes, words, tmp_path)


def assert_refused(changes: dict[str, Any], words: str, folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps(SUPER | changes))
    with pytest.raises(ModelError, match=r"\A.*\Z") as caught:
        locate_model(str(folder))
    assert words in str(caught.value)
    assert words in str(inspect_model(str(folder)).refusal)
