"""A model in an object store is fetched once, whole or not at all."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from swiftbatch.jobs.errors import ModelError
from swiftbatch.jobs.python_processes import environment_of_code
from swiftbatch.jobs.storage.store import Store
from swiftbatch.worker.inspection import inspect_model
from swiftbatch.worker.model.bucket import BUCKETS, UNFINISHED
from swiftbatch.worker.model.model_files import OtherModelError, locate_model
from swiftbatch.worker.model.weight_files import read_tensors
from tests.jobs.storage.fault_proxy import FaultProxy
from tests.scheduler.commands.command_parts import invoke, job, refusal, write_jobs
from tests.worker.model.gguf.tiny_gguf import write_tiny

OTHERS = ("README.md", "optimizer.pt", "consolidated.safetensors", "logs/events.json", "pytorch_model.bin")
STOP = ("--deadline", "0s")  # when everything is checked, and nothing runs
LOCATE = (
    "import sys; from swiftbatch.worker.model.model_files import locate_model; print(locate_model(sys.argv[1]).path)"
)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the hub's cache of this test."""
    folder = tmp_path / "hub"
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(folder))
    monkeypatch.setenv("HF_HUB_CACHE", str(folder))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "own"))
    return folder


@pytest.fixture
def model(tiny_model: Path, s3_store: Store, cache: Path) -> str:
    """Return the URI of the tiny model among objects that no model needs."""
    upload(tiny_model, s3_store)
    for name in OTHERS:
        s3_store.write(name, b"{}")
    return s3_store.uri


def upload(folder: Path, store: Store) -> None:
    for file in folder.rglob("*"):
        if file.is_file():
            store.write(file.relative_to(folder).as_posix(), file.read_bytes())


def started(model: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", LOCATE, model]
    return subprocess.Popen(command, env=os.environ | environment_of_code(), stdout=subprocess.PIPE, text=True)


def is_weights(path: str) -> bool:
    return path.endswith("/model.safetensors") and "/parts/" not in path


def gets(proxy: FaultProxy, name: str = "/model.safetensors", method: str = "GET") -> int:
    asked = [each for each in proxy.requests if "/parts/" not in each]
    return sum(each.startswith(method) and each.endswith(name) for each in asked)


def num_others(proxy: FaultProxy) -> int:
    return sum(not is_weights(each) for each in proxy.requests)


def wait_for_download(cache: Path, proxy: FaultProxy) -> None:
    while not (gets(proxy) and list(cache.rglob(f"*{UNFINISHED}"))):
        time.sleep(0.05)


def test_a_model_in_a_bucket_is_the_one_in_the_folder_and_brings_no_other_files(model: str, tiny_model: Path) -> None:
    found, here = locate_model(f"{model}/"), locate_model(str(tiny_model))
    assert (found.digests, found.commit) == (here.digests, None)
    assert not {*OTHERS} & {file.relative_to(found.path).as_posix() for file in found.path.rglob("*")}
    assert (found.path / "parts").is_dir(), "what engines draft with"


def test_a_model_is_downloaded_once(model: str, s3_proxy: FaultProxy) -> None:
    found = locate_model(model)
    assert gets(s3_proxy) == 1
    assert locate_model(model) == found
    assert gets(s3_proxy) == gets(s3_proxy, "/config.json") == 1


def test_two_workers_of_a_node_download_a_model_once(model: str, s3_proxy: FaultProxy, cache: Path) -> None:
    released = threading.Event()
    s3_proxy.delay = lambda method, path: 0.0 * (is_weights(path) and method == "GET" and released.wait())
    workers = [started(model), started(model)]
    wait_for_download(cache, s3_proxy)
    num_seen = -1
    while num_seen < num_others(s3_proxy):  # until the other one waits, too
        num_seen = num_others(s3_proxy)
        time.sleep(3)
    released.set()
    paths = {worker.communicate()[0] for worker in workers}
    assert all(worker.returncode == 0 for worker in workers)
    assert len(paths) == 1
    assert gets(s3_proxy, method="HEAD") == 1  # a download begins with it; a GET without an answer is repeated


def test_a_download_that_is_killed_leaves_nothing_half(
    model: str, tiny_model: Path, s3_proxy: FaultProxy, cache: Path
) -> None:
    s3_proxy.delay = lambda method, path: 600.0 * (method == "GET" and is_weights(path))
    worker = started(model)
    wait_for_download(cache, s3_proxy)
    worker.send_signal(signal.SIGKILL)
    worker.communicate()
    s3_proxy.delay = lambda method, path: 0.0
    assert not [file for file in cache.rglob("model.safetensors") if is_weights(str(file))]
    assert locate_model(model).digests == locate_model(str(tiny_model)).digests
    assert not list(cache.rglob(f"*{UNFINISHED}"))
    assert gets(s3_proxy, "/config.json") == 1, "files that were done are kept"


def test_a_bad_network_costs_no_byte(model: str, tiny_model: Path, s3_proxy: FaultProxy) -> None:
    faults = iter(("unavailable", "refused", "cut", "lost"))
    s3_proxy.choose = lambda method, path: next(faults, None) if is_weights(path) else None
    assert locate_model(model).digests == locate_model(str(tiny_model)).digests
    assert sum(s3_proxy.num_faults.values()) == 4


@pytest.mark.parametrize("name", ["tokenizer_config.json", "model.safetensors"])
def test_a_run_whose_objects_changed_is_refused(model: str, tmp_path: Path, s3_store: Store, name: str) -> None:
    place, jobs = str(tmp_path / "run"), write_jobs(tmp_path / "jobs.jsonl", job("a", 3))
    assert invoke("submit", jobs, "--run", place, "--model", model, *STOP).exit_code == 3
    data = s3_store.read(name) or b""
    s3_store.write(name, data + b" " if name.endswith(".json") else data[:-1] + bytes([data[-1] ^ 1]))
    for command in (["resume", place], ["submit", jobs, "--run", place]):
        line = refusal(*command, *STOP)
        assert f"was made with model {model}" in line
        assert f"({name} is another)" in line
    s3_store.write(name, data)
    assert invoke("resume", place, *STOP).exit_code == 3


def test_an_object_that_is_replaced_amid_the_download_is_refused(
    model: str, s3_store: Store, s3_proxy: FaultProxy, cache: Path
) -> None:
    s3_proxy.delay = lambda method, path: 5.0 * (method == "HEAD" and is_weights(path))
    command = [sys.executable, "-c", LOCATE, model]
    worker = subprocess.Popen(command, env=os.environ | environment_of_code(), stderr=subprocess.PIPE, text=True)
    while not any(each.startswith("HEAD") and is_weights(each) for each in s3_proxy.requests):
        time.sleep(0.05)
    s3_store.write("model.safetensors", b"another")
    assert "its objects were replaced meanwhile; try again" in worker.communicate()[1]
    assert not list(cache.rglob(f"*{UNFINISHED}"))
    assert not [file for file in cache.rglob("model.safetensors") if is_weights(str(file))]


def test_a_blob_that_was_damaged_on_the_disk_is_refused_when_it_is_loaded(model: str) -> None:
    files = locate_model(model)
    blob = (files.path / "model.safetensors").resolve()
    data = blob.read_bytes()
    blob.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(OtherModelError, match=rf"is damaged: its source has SHA-256 {blob.name[:12]}.*; remove {blob}"):
        read_tensors(locate_model(model), torch.bfloat16, lambda weight: weight)
    blob.unlink()
    read_tensors(locate_model(model), torch.bfloat16, lambda weight: weight)
    assert blob.read_bytes() == data


def test_an_absent_weight_file_is_named(tiny_model: Path, s3_store: Store, cache: Path) -> None:
    upload(tiny_model, s3_store)
    s3_store.delete("model.safetensors")
    with pytest.raises(ModelError, match=r"it has no model\.safetensors or pytorch_model\.bin, nor an index"):
        locate_model(s3_store.uri)
    names = dict.fromkeys(load_file(tiny_model / "model.safetensors"), "model-00002-of-00002.safetensors")
    s3_store.write("model.safetensors.index.json", json.dumps({"weight_map": names}).encode())
    for look in (locate_model, inspect_model):
        with pytest.raises(ModelError) as told:
            look(s3_store.uri)
        named = "its index names 'model-00002-of-00002.safetensors', and no such file is there"
        assert f"model {s3_store.uri}: {named}" in str(told.value)


@pytest.mark.parametrize(
    ("model", "told"),
    [
        ("s3://swiftbatch/nothing/here", "no such object; upload the model, or correct --model"),
        ("s3://no-such-bucket-here/model", "The specified bucket does not exist; check the bucket"),
        ("s3://", "expected a bucket, as in s3://bucket"),
        ("s3://KEY:SECRET@swiftbatch/model", "model s3://swiftbatch/model: found settings or credentials in its URI"),
        ("s3://swiftbatch/model?access_key=SECRET", "expected s3://bucket/folder, with them in the environment"),
    ],
)
def test_each_reason_is_told_without_secrets(s3_uri: str, cache: Path, model: str, told: str) -> None:
    with pytest.raises(ModelError) as error:
        locate_model(model)
    assert told in str(error.value)
    assert "SECRET" not in str(error.value)


def test_a_gguf_file_is_named_or_the_only_one(tmp_path: Path, s3_store: Store, cache: Path) -> None:
    file = write_tiny("llama", tmp_path, torch.bfloat16)[0]
    here = locate_model(str(file)).fingerprint
    s3_store.write("b.gguf", file.read_bytes())
    assert locate_model(s3_store.uri).fingerprint == locate_model(f"{s3_store.uri}/b.gguf").fingerprint == here
    s3_store.write("a.gguf", b"")
    assert locate_model(f"{s3_store.uri}/b.gguf").fingerprint == here
    assert inspect_model(f"{s3_store.uri}/b.gguf").refusal is None
    with pytest.raises(ModelError, match=rf"a\.gguf, b\.gguf; name one of them, as in --model {s3_store.uri}/a\.gguf$"):
        locate_model(s3_store.uri)


def test_inspect_reads_the_headers_of_weights_alone(model: str, tiny_model: Path, cache: Path) -> None:
    found, here = inspect_model(model), inspect_model(str(tiny_model))
    assert found.model_copy(update={"model": here.model, "engines": here.engines}) == here
    assert not list(cache.rglob("*.safetensors"))


def test_a_cache_that_cannot_be_written_says_so(model: str, cache: Path) -> None:
    cache.mkdir()
    (cache / BUCKETS).write_text("")
    with pytest.raises(ModelError, match=r"it can't be kept in .*; make room there, or set HF_HOME"):
        locate_model(model)
