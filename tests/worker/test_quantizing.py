from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from swiftbatch.jobs.errors import ModelError
from swiftbatch.worker import quantizing
from swiftbatch.worker.exactness.forward_comparisons import compare, probe_rows
from swiftbatch.worker.forward.target_model import TargetModel
from swiftbatch.worker.inspection import inspect_model
from swiftbatch.worker.kernels.gpu_kernel_choice import CudaKernels
from swiftbatch.worker.kernels.native_library import NO_KERNELS, OVERRIDE
from swiftbatch.worker.kernels.quantized_weights import PackedMatrix
from swiftbatch.worker.model.formats.contract import StoredTensor
from swiftbatch.worker.model.model_files import locate_model
from swiftbatch.worker.model.weight_files import read_tensors
from swiftbatch.worker.quantizing import FORMATS, FloatRounding, quantize_model, rounding_of, write_tensors
from swiftbatch.worker.text.tokenizer import TextCodec
from tests.worker.model.formats.twins import LLAMA, llama_tensors, load, logits_of, written
from tests.worker.model.gguf.tiny_gguf import write_tiny
from tests.worker.model.kind_parts import tiny_config, tiny_model

# relative to a group's largest number, with a rounded scale; in fp8 to the number itself
MOST_OFF = {"int4": 0.52 / 7, "int8": 0.76 / 127, "fp8": 1 / 15.9}
NUM_BITS = {"int4": 4 + 16 / 32, "int8": 8 + 16 / 32, "fp8": 8 + 32 / 32**2}  # per weight, with its share of scales


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    numbers = torch.Generator().manual_seed(2)
    tensors = llama_tensors(numbers)
    for name in [name for name in tensors if "_proj." in name]:
        tensors[name] = (torch.randn(tensors[name].shape, generator=numbers) / 8).to(torch.bfloat16)
    return written(tmp_path / "plain", LLAMA, tensors)


@pytest.mark.parametrize("format_", FORMATS)
def test_every_number_is_as_near_as_its_code_allows(format_: str, plain: Path, tmp_path: Path) -> None:
    files = locate_model(str(plain))
    made = quantize_model(files, format_, tmp_path / "made")
    before = read_tensors(files, torch.float32, lambda weight: weight)
    after = read_tensors(locate_model(str(made.path)), torch.float32, lambda weight: weight)
    assert before.keys() == after.keys()
    for name, weight in before.items():
        found = after[name]
        if "_proj." not in name:
            assert torch.equal(found, weight)
            continue
        assert isinstance(found, PackedMatrix)
        off, groups = (found.dequantized() - weight).abs().unflatten(1, (-1, 32)), weight.float().unflatten(1, (-1, 32))
        if format_ == "fp8":
            assert bool((off <= MOST_OFF["fp8"] * groups.abs() + 1e-4).all())
        else:
            assert bool((off.amax(-1) <= MOST_OFF[format_] * groups.abs().amax(-1)).all())


@pytest.mark.parametrize("format_", FORMATS)
def test_the_new_folder_runs_and_takes_as_much_as_its_codes(format_: str, plain: Path, tmp_path: Path) -> None:
    made = quantize_model(locate_model(str(plain)), format_, tmp_path / "made")
    assert (made.num_matrices, made.left) == (7, ("lm_head",))
    found = inspect_model(str(made.path))
    assert found.refusal is None
    weights = 43_008
    kept = 2 * (2 * 97 * 64 + 3 * 64) + 7 * 16 * (format_ != "fp8")
    assert found.num_bytes == pytest.approx(weights * NUM_BITS[format_] / 8 + kept, rel=1e-3)
    assert made.bytes_before > made.bytes_after > found.num_bytes
    logits, before = logits_of(load(made.path, "bfloat16")), logits_of(load(plain, "bfloat16"))
    assert float((logits - before).std()) < 0.3 * float(before.std())
    assert not torch.equal(logits, before)


def test_a_model_with_a_tokenizer_is_scored_before_and_after(tiny_model: Path, tmp_path: Path) -> None:
    made = quantize_model(locate_model(str(tiny_model)), "int8", tmp_path / "made")
    kept = {file.name for file in tiny_model.iterdir() if file.is_file()}
    assert {file.name for file in made.path.iterdir()} == kept, "and no parts, which belong to other weights"
    files = [locate_model(str(folder)) for folder in (tiny_model, made.path)]
    token_ids = quantizing.text_token_ids(files[0], "the quick brown fox jumps over the lazy dog. " * 60)
    losses = [quantizing.text_loss(TargetModel.load(each, "bfloat16", "cpu"), token_ids) for each in files]
    assert losses[0] == pytest.approx(losses[1], abs=0.05)
    assert losses[0] != losses[1]
    assert TextCodec(files[1]).encode("the fox") == TextCodec(files[0]).encode("the fox")


def test_the_loss_of_a_text_is_that_of_its_tokens_one_by_one(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = TargetModel.load(locate_model(str(tiny_model)), "float32", "cpu")
    monkeypatch.setattr(quantizing, "STRETCH", 16)
    token_ids = [7 * i % target.vocab_size for i in range(40)]
    total, number = 0.0, 0
    for start, end in ((0, 16), (16, 32), (32, 39)):
        rows = logits_of(target, token_ids[start:end]).double().log_softmax(-1)
        total -= sum(float(row[token]) for row, token in zip(rows, token_ids[start + 1 : end + 1], strict=True))
        number += end - start
    assert quantizing.text_loss(target, token_ids) == pytest.approx(total / number, rel=1e-5)


def test_routers_of_experts_stay_as_they_are_and_are_named(tmp_path: Path) -> None:
    tiny_model(tiny_config("qwen3_moe")).save_pretrained(tmp_path / "plain")
    made = quantize_model(locate_model(str(tmp_path / "plain")), "fp8", tmp_path / "made")
    config = json.loads((made.path / "config.json").read_text())["quantization_config"]
    assert config["modules_to_not_convert"] == ["lm_head", *(f"model.layers.{n}.mlp.gate" for n in range(2))]
    stored = load_file(made.path / "model.safetensors")
    assert stored["model.layers.0.mlp.experts.1.up_proj.weight"].dtype == torch.float8_e4m3fn
    assert stored["model.layers.0.mlp.gate.weight"].dtype == torch.float32
    assert load(made.path, "float32").vocab_size


def test_blocks_of_fp8_divide_all_matrices_where_some_size_does() -> None:
    assert rounding_of("fp8", {"a": (256, 384)}) == FloatRounding(128)
    assert rounding_of("fp8", {"a": (576, 1536), "b": (192, 576)}) == FloatRounding(64)
    assert rounding_of("fp8", {"a": (100, 70)}) == FloatRounding(128), "which then end within the matrix"
    parts = FloatRounding(128).parts(torch.ones(130, 70))
    assert parts["weight"].shape == (130, 70)
    assert parts["weight_scale_inv"].shape == (2, 1)


def test_a_folder_that_holds_something_is_refused_and_left_alone(plain: Path, tmp_path: Path) -> None:
    (tmp_path / "made").mkdir()
    (tmp_path / "made" / "mine").write_text("x")
    with pytest.raises(ModelError, match="found something there already; name a new folder, or an empty one"):
        quantize_model(locate_model(str(plain)), "int8", tmp_path / "made")
    assert [file.name for file in (tmp_path / "made").iterdir()] == ["mine"]


def test_nothing_is_left_of_a_model_whose_weights_are_damaged(plain: Path, tmp_path: Path) -> None:
    file = plain / "model-1.safetensors"
    tensors = load_file(file)
    name = next(name for name in tensors if "_proj." in name)
    tensors[name][3, 5] = float("nan")
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(ModelError, match=f"has {name} with numbers that are not finite; copy it again"):
        quantize_model(locate_model(str(plain)), "int4", tmp_path / "made")
    assert [each.name for each in tmp_path.iterdir()] == ["plain"]


def test_a_model_that_is_quantized_already_is_refused(plain: Path, tmp_path: Path) -> None:
    made = quantize_model(locate_model(str(plain)), "int8", tmp_path / "made")
    with pytest.raises(ModelError, match=r"it is quantized already \(int8\); give the plain model"):
        quantize_model(locate_model(str(made.path)), "int4", tmp_path / "again")


def test_a_disk_that_is_full_leaves_nothing(plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(quantizing, "copy_small_files", full)
    with pytest.raises(ModelError, match="No space left on device; name a folder that can be written"):
        quantize_model(locate_model(str(plain)), "int4", tmp_path / "made")
    assert [each.name for each in tmp_path.iterdir()] == ["plain"]


def test_of_two_at_once_the_later_is_refused(plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output, copy = tmp_path / "made", quantizing.copy_small_files

    def copy_while_another_is_sooner(source: Path, folder: Path) -> None:
        copy(source, folder)
        monkeypatch.setattr(quantizing, "copy_small_files", copy)
        quantize_model(locate_model(str(plain)), "int8", output)

    monkeypatch.setattr(quantizing, "copy_small_files", copy_while_another_is_sooner)
    with pytest.raises(ModelError, match="found something there already; name a new folder"):
        quantize_model(locate_model(str(plain)), "int4", output)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["made", "plain"]


def test_a_gguf_file_is_no_plain_model(tmp_path: Path) -> None:
    file, _ = write_tiny("llama", tmp_path, torch.float32)
    with pytest.raises(ModelError, match=r"it is quantized already \(GGUF\); give the plain model"):
        quantize_model(locate_model(str(file)), "int8", tmp_path / "made")


def test_a_tensor_file_is_read_by_the_library_and_each_tensor_begins_at_a_multiple_of_its_size(tmp_path: Path) -> None:
    tensors = {"a": torch.arange(3, dtype=torch.uint8), "b": torch.arange(5.0), "c": torch.arange(4).bfloat16()}
    heads = {"a": StoredTensor("U8", (3,)), "b": StoredTensor("F32", (5,)), "c": StoredTensor("BF16", (4,))}
    write_tensors(tmp_path / "x.safetensors", heads, tensors.items())
    found = load_file(tmp_path / "x.safetensors")
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], tensors[name]) for name in tensors)
    with pytest.raises(ValueError, match="found no b"):
        write_tensors(tmp_path / "y.safetensors", heads, {n: tensors[n] for n in "ac"}.items())
    with pytest.raises(ValueError, match=r"found a \[2\], expected \[3\]"):
        write_tensors(tmp_path / "z.safetensors", heads, [("a", tensors["a"][:2])])


def test_files_of_other_programs_weights_are_not_copied(plain: Path, tmp_path: Path) -> None:
    (plain / "pytorch_model.bin").write_bytes(b"x")
    (plain / "LICENSE").write_text("free")
    (plain / "chat_templates").mkdir()
    (plain / "chat_templates" / "tools.jinja").write_text("{{ messages }}")
    made = quantize_model(locate_model(str(plain)), "fp8", tmp_path / "made")
    names = {file.relative_to(made.path).as_posix() for file in made.path.rglob("*") if file.is_file()}
    shutil.rmtree(plain)
    weights = {"model-0.safetensors", "model-1.safetensors", "model.safetensors.index.json"}
    assert names == weights | {"config.json", "LICENSE", "chat_templates/tools.jinja"}
    assert load(made.path, "float32").vocab_size == 97


def test_rows_of_8_bits_are_exact_among_themselves_and_have_a_name(plain: Path, tmp_path: Path) -> None:
    made = quantize_model(locate_model(str(plain)), "int4", tmp_path / "made")
    files = locate_model(str(made.path))
    target = TargetModel.load(files, "bfloat16", "cpu", kernels=CudaKernels(linear="int8"))
    assert ", int8 products 1" in target.numerics
    assert target.numerics != TargetModel.load(files, "bfloat16", "cpu").numerics
    assert probe_rows(target, 200).num_differing == 0
    wide = TargetModel.load(files, "float32", "cpu", kernels=CudaKernels(linear="int8"))
    assert compare(wide, has_integer_rows=True).agrees
    assert not compare(wide).agrees, "rows of 8 bits are seen"


def test_rows_of_8_bits_are_refused_where_no_weight_takes_them(
    plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fp8 = quantize_model(locate_model(str(plain)), "fp8", tmp_path / "made").path
    for folder in (plain, fp8):
        with pytest.raises(
            ModelError, match=r"^--linear int8: .* none of this model's weights are integers .* leave it"
        ):
            TargetModel.load(locate_model(str(folder)), "bfloat16", "cpu", kernels=CudaKernels(linear="int8"))
    monkeypatch.setenv(OVERRIDE, NO_KERNELS)
    with pytest.raises(ModelError, match=r"^--linear int8: .* but torch runs here; leave it away$"):
        TargetModel.load(locate_model(str(plain)), "bfloat16", "cpu", kernels=CudaKernels(linear="int8"))
