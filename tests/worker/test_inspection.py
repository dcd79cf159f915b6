"""A model is shown as it would run, from its small files."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

from bench.sizing import LARGE, MODELS
from swiftbatch.jobs.errors import ModelError
from swiftbatch.scheduler.cli import main
from swiftbatch.worker.forward.native_forwards import NativeForwards
from swiftbatch.worker.forward.target_model import TargetModel
from swiftbatch.worker.inspection import CONTEXT_BYTES, GPU_BYTES, SLOT_LENGTHS, _gpus, _slots, inspect_model
from swiftbatch.worker.kernels.native_library import chosen_variant
from swiftbatch.worker.kv.gpu_memory_plan import GPUMemory, one_slot
from swiftbatch.worker.kv.model_sizes import read_sizes
from swiftbatch.worker.model.architectures.catalogue import ARCHITECTURES
from swiftbatch.worker.model.compute_path import path_on
from swiftbatch.worker.model.model_files import locate_model
from swiftbatch.worker.model.text_config import text_view
from tests.worker.model.expert_configs import write_experts
from tests.worker.model.kind_parts import save_tiny, tiny_config, tiny_target
from tests.worker.model.latent_configs import WITH_INDEXERS as PUBLISHED_INDEXED
from tests.worker.model.latent_configs import WITH_LATENTS
from tests.worker.model.test_nested_models import publish, whole_model
from tests.worker.model.test_rank_faults import LLAMA


def test_the_embedded_model_is_shown_as_it_is() -> None:
    found = inspect_model("embedded")
    assert found.refusal is None
    assert (
        found.num_parameters
        == sum(found.formats.values())
        == read_sizes(locate_model("embedded"), "bfloat16").num_parameters
    )  # type: ignore[union-attr]
    assert found.cpu is not None
    assert (found.cpu.name, found.cpu.reason) == ("kernels", None)
    assert found.has_chat_template
    assert "griffin" in found.engines


def test_latent_vectors_are_counted_in_place_of_keys_and_values(tmp_path: Path) -> None:
    write_experts(WITH_LATENTS["GLM 4.7 Flash"], tmp_path)
    assert inspect_model(str(tmp_path)).bytes_per_position == 2 * 2 * (64 + 32)
    assert "384 bytes per position in bfloat16\n" in CliRunner().invoke(main, ["inspect", str(tmp_path)]).output


def test_a_model_larger_than_a_gpu_says_how_many_gpus_have_room_for_a_job() -> None:
    sizes = LARGE["Llama 3.1 70B, bfloat16"]
    assert _gpus(sizes, [*SLOT_LENGTHS], LLAMA) == {8_192: 2, 32_768: 2, 100_000: 4}
    assert _gpus(sizes, [8_192], LLAMA | {"num_attention_heads": 63, "num_key_value_heads": 63}) == {}


def test_a_model_with_indexers_is_shown_to_run_on_both_devices(tmp_path: Path) -> None:
    write_experts(PUBLISHED_INDEXED["GLM 5.2"], tmp_path)
    lines = CliRunner().invoke(main, ["inspect", str(tmp_path)]).output
    assert lines.count("swiftbatch's kernels\n") == 2
    assert "jobs at a time" in lines


def test_what_layers_with_windows_hold_of_old_positions_is_shown(tmp_path: Path) -> None:
    """Four layers, two of which see all."""
    save_tiny(tiny_config("gpt_oss", has_wide_heads=True), tmp_path)
    found = inspect_model(str(tmp_path))
    assert found.bytes_per_position == 2 * found.bytes_per_old_position > 0  # type: ignore[operator]
    assert found.num_whole_positions == 100 + 64 + 256 + 1024
    lines = CliRunner().invoke(main, ["inspect", str(tmp_path)]).output
    assert f"; on a CPU {found.bytes_per_old_position:,} behind the newest 1,444" in lines


def test_a_nested_model_is_counted_without_its_tower(tmp_path: Path) -> None:
    model = whole_model("qwen3_vl")
    publish(model, "qwen3_vl", tmp_path)
    found = inspect_model(str(tmp_path))
    text = model.model.language_model.num_parameters() + model.lm_head.weight.numel()
    assert (found.kind, found.text_kind, found.refusal) == ("qwen3_vl", "qwen3", None)
    assert found.num_parameters == text
    assert sum(found.formats.values()) == model.num_parameters() > text


@pytest.mark.sample(3)
@pytest.mark.parametrize("kind", [kind for kind, spec in ARCHITECTURES.items() if spec.needs_kernels is None])
def test_the_path_that_is_told_is_the_one_that_is_taken(kind: str) -> None:
    """Kernels run the whole forward, only attention, or nothing."""
    variant = chosen_variant()
    if variant is None:
        pytest.skip("no kernels run here")
    target = tiny_target(kind, torch.float32, variant=variant)
    config = text_view({**tiny_config(kind, has_wide_heads=True).to_dict(), "torch_dtype": "float32"})
    attends = [each.__qualname__ for each in target.transformers._attends]
    in_kernels = all("attend_in_kernels" in name for name in attends)
    told = path_on("cpu", config)
    assert told.name in (("kernels attend", "kernels") if in_kernels else ("transformers",)), (told, attends)
    if told.name == "kernels":
        assert ARCHITECTURES[kind].kernels_lack is None


def test_every_kind_that_the_kernels_do_not_take_has_its_reason() -> None:
    for kind in ARCHITECTURES:
        told = path_on("cuda", {"model_type": kind})
        assert told.name == ("none" if ARCHITECTURES[kind].needs_kernels else "transformers")
        assert told.reason != "its layers are of another form"


def test_slots_are_those_that_a_worker_plans() -> None:
    sizes = MODELS["Llama 3.1 8B"]
    found = _slots(sizes, 131_072)
    gpu = GPUMemory(GPU_BYTES - CONTEXT_BYTES, num_rows=128)  # of fewer rows, slots would be too few
    assert found == {n: one_slot(sizes, gpu, n).num_fitting for n in SLOT_LENGTHS}
    assert _slots(sizes, 10_000).keys() == {8_192}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"quantization_config": {"quant_method": "bitsandbytes"}}, "its weights are quantized"),
        (
            {"quantization_config": {"quant_method": "fp8"}},
            "its weights are quantized in fp8, says its config, and none",
        ),
        ({"model_type": "mamba"}, "needs state-space layers"),
        ({"rope_scaling": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "dynamic"),
    ],
)
def test_what_does_not_run_is_shown_with_the_reason_alone(
    change: dict[str, Any], words: str, tiny_model: Path, tmp_path: Path
) -> None:
    shutil.copytree(tiny_model, tmp_path / "model")
    file = tmp_path / "model" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    found = inspect_model(str(tmp_path / "model"))
    assert found.refusal is not None
    assert words in found.refusal
    assert "kinds that run here" not in found.refusal
    assert found.cpu is None
    assert not found.slots


def test_a_folder_with_an_adapter_alone_is_told_so(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    for look in (inspect_model, locate_model):
        with pytest.raises(ModelError, match="is an adapter; give its base model"):
            look(str(tmp_path))


def test_a_package_of_nvidia_is_refused_by_its_format(tiny_model: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny_model, tmp_path / "model")
    said = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "W4A16_AWQ"}}
    (tmp_path / "model" / "hf_quant_config.json").write_text(json.dumps(said))
    assert "'W4A16_AWQ'" in str(inspect_model(str(tmp_path / "model")).refusal)
    with pytest.raises(ModelError, match="W4A16_AWQ"):
        locate_model(str(tmp_path / "model"))


def test_a_dense_model_takes_the_kernels_that_are_told(tiny_model: Path) -> None:
    told = inspect_model(str(tiny_model)).cpu
    target = TargetModel.load(locate_model(str(tiny_model)), "float32", "cpu")
    if chosen_variant() is not None and told is not None:
        assert isinstance(target.forwards, NativeForwards) == (told.name == "kernels")


@pytest.mark.parametrize("fault", ["packed", "index"])
def test_weights_that_do_not_load_are_told_of(fault: str, tiny_model: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_model, tmp_path / "model")
    if fault == "packed":
        tensors = load_file(folder / "model.safetensors")
        name = "model.layers.0.mlp.up_proj.weight"
        save_file(tensors | {name: tensors[name].to(torch.int8)}, folder / "model.safetensors")
    else:
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": "two"}))
    refusal = inspect_model(str(folder)).refusal
    assert refusal is not None
    assert (".weight as I8" if fault == "packed" else "eos_token_id = 'two'") in refusal
    with pytest.raises(ModelError):
        locate_model(str(folder))
