"""A hub model is inspected or refused for a few KB."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from swiftbatch.jobs.python_processes import environment_of_code, module_command
from swiftbatch.worker.model.model_files import locate_model
from tests.worker.hub import COMMIT, Hub, hub_of

pytestmark = pytest.mark.long

LINE = {"custom_id": "a", "prompt": "The lighthouse", "max_tokens": 3}


@pytest.fixture
def refused(tiny_model: Path, tmp_path: Path) -> Path:
    folder = shutil.copytree(tiny_model, tmp_path / "refused")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "bitsandbytes"}}))
    return folder


def snapshots(hub: Hub, folder: Path, *models: str, **variables: str) -> list[str]:
    """Return each model's snapshot name, or why there is none."""
    code = (
        "import sys\nfrom swiftbatch.jobs.errors import ModelError\n"
        "from swiftbatch.worker.model.hub import hub_snapshot\n"
        "for model in sys.argv[1:]:\n    try:\n        print(hub_snapshot(model, ['*.json']).name)\n"
        "    except ModelError as error:\n        print(error)"
    )
    environment = os.environ | environment_of_code() | {"HF_ENDPOINT": hub.url, "HF_HOME": str(folder / "cache")}
    command = [sys.executable, "-c", code, *models]
    ran = subprocess.run(command, env=environment | {"HF_HUB_OFFLINE": "0"} | variables, capture_output=True, text=True)
    return [*ran.stdout.splitlines(), *(line for line in ran.stderr.splitlines() if line.startswith("model "))]


def test_a_run_goes_on_with_its_own_commit_though_the_hub_has_another(tiny_model: Path, tmp_path: Path) -> None:
    (tmp_path / "jobs.jsonl").write_text(json.dumps(LINE) + "\n")
    changed = shutil.copytree(tiny_model, tmp_path / "changed")
    with (changed / "tokenizer_config.json").open("a") as file:
        file.write("\n")
    stop = ("--deadline", "0s")  # when everything is checked, and nothing runs
    with hub_of({"some/model": tiny_model}) as hub:
        ran = run(hub, tmp_path, "submit", "jobs.jsonl", "--run", "run", "--model", "some/model", *stop)
        assert ran.returncode == 3, ran.stderr
        manifest = json.loads((tmp_path / "run" / "run.json").read_text())
        assert (manifest["model"], manifest["model_commit"]) == ("some/model", COMMIT)
        hub.models["some/model"], hub.commit = changed, "f" * 40
        num_sent = sum(hub.sent.values())
        again = ("submit", "jobs.jsonl", "--run", "run", "--model", "some/model", *stop)
        for words in (("resume", "run", *stop), again):
            ran = run(hub, tmp_path, *words)
            assert (ran.returncode, sum(hub.sent.values())) == (3, num_sent), ran.stderr
        newer = run(hub, tmp_path, "submit", "jobs.jsonl", "--run", "newer", "--model", "some/model", *stop)
        assert newer.returncode == 3
        older = ("submit", "jobs.jsonl", "--run", "older", "--model", f"some/model@{COMMIT}", *stop)
        assert run(hub, tmp_path, *older).returncode == 3
    commits = [json.loads((tmp_path / name / "run.json").read_text())["model_commit"] for name in ("newer", "older")]
    assert commits == ["f" * 40, COMMIT]
    assert run(hub, tmp_path, "resume", "run", *stop).returncode == 3  # though there is no hub at all
    path = tmp_path / "run" / "run.json"  # as if its commit were unknown
    path.write_text(json.dumps(manifest | {"model_commit": None}))
    ran = run(hub, tmp_path, "resume", "run", *stop)
    assert ran.returncode == 2
    assert f"tokenizer_config.json of commit {'f' * 40}" in ran.stderr


def test_a_busy_hub_is_asked_again_when_it_says(tiny_model: Path, tmp_path: Path) -> None:
    with hub_of({"some/model": tiny_model}) as hub:
        hub.faults = [(429, {"Retry-After": "1"}), (503, {"Retry-After": "0"}), (429, {"RateLimit": '"api";r=0;t=1'})]
        assert snapshots(hub, tmp_path, "some/model") == [
            COMMIT,
            "model some/model: the hub answers 429 (too many requests); asked again in 1 s",
            "model some/model: the hub answers 503 (busy); asked again in 0 s",
            "model some/model: the hub answers 429 (too many requests); asked again in 1 s",
        ]
        hub.faults = [(429, {"Retry-After": "3600"})] * 9
        [told] = snapshots(hub, tmp_path / "other", "some/model")
        assert told.endswith("the hub answers 429 (too many requests) for 300 s or longer; try again later")


def test_each_reason_why_a_model_is_not_to_be_had_is_told_with_what_to_do(tiny_model: Path, tmp_path: Path) -> None:
    reasons: dict[str, tuple[tuple[int, dict[str, str]] | None, str]] = {
        "some/private": (
            (401, {}),
            "answers 401: no model has this name, or it is private; correct the name, or set HF_TOKEN",
        ),
        "some/forbidden": ((403, {}), "answers 403: the token may not read it; set HF_TOKEN"),
        "some/gated": (
            (403, {"X-Error-Code": "GatedRepo"}),
            "gives it to those who agreed to its terms; agree at http://",
        ),
        "some/absent": (None, "answers 404: no model has this name; correct the name"),
        "some/model@v9": (None, "has no revision 'v9' of it; expected a branch, a tag or a commit behind the @"),
        "some/..": (None, "no model of the hub can have this name; expected ORG/NAME or ORG/NAME@REVISION"),
        "model": (None, "nor a name on the hub, as ORG/NAME or ORG/NAME@REVISION; correct --model"),
    }
    with hub_of({"some/model": tiny_model}) as hub:
        hub.refusals = {model: refusal for model, (refusal, _) in reasons.items() if refusal is not None}
        told = snapshots(hub, tmp_path, *reasons)
        [offline] = snapshots(hub, tmp_path, "some/model", HF_HUB_OFFLINE="1")
    [away] = snapshots(hub, tmp_path, "some/model")
    assert len(told) == len(reasons)
    for model, line, (_, reason) in zip(reasons, told, reasons.values(), strict=True):
        assert line.startswith(f"model {model}: ")
        assert reason in line
    assert "HF_HUB_OFFLINE is set, and this machine's cache lacks it" in offline
    assert f"{hub.url} can't be reached, and this machine's cache lacks it; check the network" in away


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
        (folder / "model-1.safetensors").rename(folder / "consolidated.00.pth")
        shutil.rmtree(tmp_path / "cache")
        ran = run(hub, tmp_path, "inspect", "some/model")
    assert ran.returncode == 1
    assert "model some/model: no model.safetensors or pytorch_model.bin on the hub, nor an index; oth" in ran.stdout


def test_pickled_weights_are_fetched_where_there_are_no_safetensors(tiny_model: Path, tmp_path: Path) -> None:
    (tmp_path / "jobs.jsonl").write_text(json.dumps(LINE) + "\n")
    folder = Path(shutil.copytree(tiny_model, tmp_path / "model", ignore=shutil.ignore_patterns("parts")))
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    submit = ("submit", "jobs.jsonl", "--model", "some/model", "--deadline", "0s")  # nothing runs
    with hub_of({"some/model": folder}) as hub:
        ran = run(hub, tmp_path, *submit, "--run", "both")
        assert (ran.returncode, "pytorch_model.bin" in hub.sent) == (3, False), ran.stderr
        (folder / "model.safetensors").unlink()
        hub.sent.clear()
        shutil.rmtree(tmp_path / "cache")
        ran = run(hub, tmp_path, "inspect", "some/model")
        assert (ran.returncode, "pytorch_model.bin" in hub.sent) == (0, False), ran.stdout
        ran = run(hub, tmp_path, *submit, "--run", "pickled")
        assert (ran.returncode, "pytorch_model.bin" in hub.sent) == (3, True), ran.stderr


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


DRIVER = """
import sys
from swiftbatch.jobs.run.run import Run
from swiftbatch.scheduler.runs.run_manifest import refuse_changed_model
from swiftbatch.scheduler.runs.run_settings import Settings
from swiftbatch.scheduler.runs.submission import submission
from swiftbatch.worker.kv.model_sizes import read_sizes
from swiftbatch.worker.model.model_files import locate_model

said = {"model": "some/model", "device": "cuda"}
with submission("jobs.jsonl", "run", Settings(address="ray://cluster", said=said)) as made:
    print(made.run.manifest.model_fingerprint)
refuse_changed_model(Run.open("run"))
print(read_sizes(locate_model("some/model", is_whole=False), "bfloat16").num_parameters)
"""
WORKER = """
from swiftbatch.jobs.run.run import Run
from swiftbatch.scheduler.runs.verification import load_model
load_model(Run.open("run"))
print("loaded")
"""


def test_the_driver_of_a_cluster_fetches_no_weights_and_workers_check_theirs(tiny_model: Path, tmp_path: Path) -> None:
    (tmp_path / "jobs.jsonl").write_text(json.dumps(LINE) + "\n")
    folder = Path(shutil.copytree(tiny_model, tmp_path / "model"))
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | {"visual.weight": torch.rand(10**6)}, folder / "model.safetensors", metadata={"format": "pt"})
    with hub_of({"some/model": folder}) as hub:
        fingerprint, num_parameters = run_code(hub, tmp_path, DRIVER).stdout.split()
        assert fingerprint == locate_model(str(folder)).fingerprint
        assert int(num_parameters) == sum(tensor.numel() for tensor in tensors.values())
        assert hub.sent["model.safetensors"] <= 110_000, "its first bytes"
        manifest = json.loads((tmp_path / "run" / "run.json").read_text())
        (tmp_path / "run" / "run.json").write_text(json.dumps(manifest | {"device": "cpu"}))
        assert run_code(hub, tmp_path, WORKER).stdout == "loaded\n"
        [blob] = (tmp_path / "cache" / "hub" / "models--some--model" / "blobs").glob(
            manifest["model_files"]["model.safetensors"]
        )
        data = bytearray(blob.read_bytes())
        data[-1] ^= 1
        blob.write_bytes(data)
        assert f"is damaged: its source has SHA-256 {blob.name[:12]}" in run_code(hub, tmp_path, WORKER).stderr


LOCATE = """
from swiftbatch.jobs.errors import ModelError
from swiftbatch.worker.model.model_files import locate_model
for is_whole in (False, True):
    try:
        found = locate_model("some/model", is_whole=is_whole)
        print(sorted(file.name for file in found.path.iterdir()))
    except ModelError as error:
        print(error)
"""


def test_an_absent_weight_file_is_named_with_and_without_weights(tiny_model: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny_model, tmp_path / "model"))
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").rename(folder / "model-1.safetensors")
    names = dict.fromkeys(tensors, "model-1.safetensors") | {list(tensors)[-1]: "model-2.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    with hub_of({"some/model": folder}) as hub:
        absent = run_code(hub, tmp_path, LOCATE).stdout.splitlines()
        shutil.copy(folder / "model-1.safetensors", folder / "model-2.safetensors")
        hub.lost = {"model-2.safetensors"}
        shutil.rmtree(tmp_path / "cache")
        lost = run_code(hub, tmp_path, LOCATE).stdout.splitlines()
    assert len(absent) == len(lost) == 2
    assert all("its index names 'model-2.safetensors', and no such file is there" in line for line in absent)
    assert all("it lists model-2.safetensors, and has no such file" in line for line in lost)


def test_a_folder_of_headers_gets_the_files_that_a_newer_version_wants(tiny_model: Path, tmp_path: Path) -> None:
    with hub_of({"some/model": tiny_model}) as hub:
        headers_alone = LOCATE.replace("(False, True)", "(False,)")
        before = run_code(hub, tmp_path, headers_alone).stdout
        assert "tokenizer_config.json" in before
        [link] = (tmp_path / "own" / "swiftbatch" / "headers").rglob("tokenizer_config.json")
        link.unlink()
        assert run_code(hub, tmp_path, headers_alone).stdout == before


def run_code(hub: Hub, folder: Path, code: str) -> subprocess.CompletedProcess[str]:
    places = {"HF_ENDPOINT": hub.url, "HF_HOME": str(folder / "cache"), "XDG_CACHE_HOME": str(folder / "own")}
    environment = os.environ | environment_of_code() | places | {"HF_HUB_OFFLINE": "0"}
    return subprocess.run([sys.executable, "-c", code], env=environment, cwd=folder, capture_output=True, text=True)
