from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from bench import kernel_operations as roofline
from bench import kernels as kernel_bench
from bench.kernel_operations import Roof
from bench.kernels import Options, run
from bench.tables import Record
from swiftbatch.worker.decode_bench import BenchError
from swiftbatch.worker.kernels import build
from swiftbatch.worker.kernels.native_library import OVERRIDE, load_library
from tests.worker.kernels.kernel_parts import VARIANTS, needs_kernels


def make_options(model: Path, **changes: object) -> Options:
    fields = {"model": str(model), "lengths": (128, 0), "rows": (1, 3), "num_rounds": 1}
    return Options.model_validate(fields | changes)


@pytest.fixture(scope="module")
def small_model(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The smallest model that the kernels take."""
    folder = tmp_path_factory.mktemp("small-model")
    for path in tiny_model.glob("token*"):
        (folder / path.name).write_bytes(path.read_bytes())
    config = LlamaConfig(
        vocab_size=300,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=64,
        max_position_embeddings=4096,
        eos_token_id=0,
        bos_token_id=0,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return folder


@pytest.fixture
def _small_roof(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"LARGEST": 1 << 20, "NUM_READ": 1 << 20, "NUM_MULTIPLIED": 100, "NUM_ROUNDS": 1}.items():
        monkeypatch.setattr(roofline, name, value)


@pytest.fixture
def result(small_model: Path, tmp_path: Path, _small_roof: None, monkeypatch: pytest.MonkeyPatch) -> list[Record]:
    monkeypatch.setenv(OVERRIDE, VARIANTS[-1])
    return list(run(make_options(small_model)))


@needs_kernels
def test_every_operation_is_counted_timed_and_shown(result: list[Record]) -> None:
    limits, *records = result
    assert (limits["variant"], limits["numerics"]) == (VARIANTS[-1], "cpu native f32 1, bfloat16")
    by_place = {(record["name"], record["length"], record["num_rows"]): record for record in records}
    assert len(by_place) == len(records) == (5 + 21 + 5) * 2 + 2 + 2 + 2 * 2 + 2 * 2
    gate_up = by_place["gate, up 64x192", None, 3]
    assert (gate_up["num_bytes"], gate_up["num_flops"]) == (2 * 64 * 192, 2 * 3 * 64 * 192)
    packed = by_place["gate, up 64x192 4 bits by 32", None, 3]
    assert (packed["num_bytes"], packed["num_flops"]) == (64 * 192 // 2 + 2 * 2 * 2 * 192, gate_up["num_flops"])
    attention = by_place["attention, one layer", 128, 3]
    assert (attention["num_bytes"], attention["num_flops"]) == (2 * 64 * 2 * 131, 4 * 3 * 2 * 64 * 131)
    num_weights = 2 * (64 * 256 + 128 * 64 + 64 * 192 + 96 * 64) + 64 * 304
    together = by_place["all matrices", None, 3]
    assert (together["num_bytes"], together["num_flops"]) == (2 * num_weights, 2 * 3 * num_weights)
    assert {("all matrices 4 bits by 32", None, 3), ("all matrices 8 bits by 32, int8", None, 3)} <= by_place.keys()
    whole = by_place["whole forward", 128, 3]
    assert whole["num_bytes"] == 2 * num_weights + 2 * attention["num_bytes"]
    assert whole["num_flops"] == 2 * 3 * num_weights + 2 * attention["num_flops"]
    assert by_place["walk", None, 3]["num_bytes"] == 3 * 4 * 300
    assert all(record["ms"] > 0 and record["allowed_ms"] > 0 for record in records)
    assert [record["name"] for record in records if "torch_ms" in record] == ["whole forward"] * 4


@needs_kernels
@pytest.mark.usefixtures("_small_roof")
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_variant_has_a_roof(variant: str) -> None:
    found = Roof(load_library(variant), 0, num_threads=2)
    assert found.flops_per_second > 0
    least = found.seconds(1000, 0, 1 << 18)
    assert least == 1000 / found.bytes_per_second(1 << 18)
    assert found.seconds(0, 500, 1) == 500 / found.flops_per_second


def test_where_nothing_was_compiled_one_line_says_so(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(OVERRIDE, raising=False)
    monkeypatch.setattr(build, "LIBRARIES", tmp_path)
    with pytest.raises(BenchError, match=r"^no kernels to measure: none were compiled; install swiftbatch anew.*CC$"):
        next(run(make_options(tiny_model)))


@needs_kernels
def test_a_model_that_the_kernels_do_not_know_is_refused(small_model: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(small_model, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"hidden_act": "gelu"}))
    with pytest.raises(BenchError, match="the kernels do not know this kind"):
        next(run(make_options(folder)))


@needs_kernels
@pytest.mark.usefixtures("_small_roof")
def test_matrices_of_other_models_are_timed_by_their_shapes(small_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(kernel_bench.SHAPES, "small", (2, 128, 2, 1, 64, 256, 100))
    _, *records = run(make_options(small_model, lengths=(0,), rows=(1,), shapes=("small",)))
    found = {record["name"] for record in records if record["name"].startswith("small ")}
    whole = {"small q, k, v 128x256", "small output 128x128", "small gate, up 128x512", "small down 256x128"}
    assert (
        whole | {"small head 128x112", "small down 256x128 4 bits by 128", "small output 128x128 8 bits by 32"} <= found
    )
    with pytest.raises(BenchError, match=r"got tiny; expected one of: qwen3-0\.6b, llama-3\.1-8b, small"):
        list(run(make_options(small_model, lengths=(0,), rows=(1,), shapes=("tiny",))))
