"""A model on the hub is looked at, or refused, for a few KB."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
from safetensors.torch import load_file

from swiftbatch.jobs.child_processes import environment_of_code, module_command
from tests.worker.hub import Hub, hub_of

pytestmark = pytest.mark.long

LINE = {"custom_id": "a", "prompt": "The lighthouse", "max_tokens": 3}


@pytest.fixture
def refused(tiny_model: Path, tmp_path: Path) -> Path:
    """A model of bitsandbytes."""
    folder = shutil.copytree(tiny_model, tmp_path / "refused")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "bitsandbytes"}}))
    return folder


def run(hub: Hub, folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environment = environment_of_code() | {
        "HF_ENDPOINT": hub.url,
        "HF_HOME": str(folder / "cache"),
        "HF_HUB_OFFLINE": "0",
    }
    command = module_command("swiftbatch.scheduler.cli", *words)
    return subprocess.run(command, env=dict(os.environ) | environment, cwd=folder, capture_output=True, text=True)


def test_a_model_that_does_not_run_is_refused_without_its_weights(refused: Path, tmp_path: Path) -> None:
    (tmp_path / "jobs.jsonl").write_text(json.dumps(LINE) + "\n")
    with hub_of({"some/model": refused}) as hub:
        ran = run(hub, tmp_path, "submit", "jobs.jsonl", "--run", "run", "--model", "some/model")
    assert ran.returncode == 2
    assert (
        "model some/model: its weights are quantized (config.json has quantization_config, 'bitsandbytes')"
        in ran.stderr
    )
    assert set(hub.sent) == {"config.json"}
    assert sum(hub.sent.values()) < 10_000


def test_inspect_takes_a_model_in_several_files_without_them(tiny_model: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny_model, tmp_path / "parts", ignore=shutil.ignore_patterns("parts")))
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").rename(folder / "model-1.safetensors")
    index = {"weight_map": dict.fromkeys(tensors, "model-1.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with hub_of({"some/model": folder}) as hub:
        ran = run(hub, tmp_path, "inspect", "some/model", "--json")
        assert ran.returncode == 0, ran.stdout + ran.stderr
        assert json.loads(ran.stdout)["num_bytes"] > 0
        (folder / "model.safetensors.index.json").unlink()
        (folder / "model-1.safetensors").rename(folder / "pytorch_model.bin")
        shutil.rmtree(tmp_path / "cache")
        ran = run(hub, tmp_path, "inspect", "some/model")
    assert ran.returncode == 1
    assert "model some/model: no model.safetensors on the hub, nor an index; other weights" in ran.stdout


def test_inspect_reads_the_heads_of_weights_alone(tiny_model: Path, tmp_path: Path) -> None:
    with hub_of({"some/model": tiny_model}) as hub:
        ran = run(hub, tmp_path, "inspect", "some/model", "--json")
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout)
    here = json.loads(run(hub, tmp_path, "inspect", str(tiny_model), "--json").stdout)
    assert found | {"model": here["model"], "engines": here["engines"]} == here
    assert set(found["engines"]) < set(here["engines"]), "parts are not asked for on the hub"
    size = (tiny_model / "model.safetensors").stat().st_size
    assert hub.sent["model.safetensors"] <= min(size, 110_000), "its first bytes"
    assert "tokenizer.json" not in hub.sent
