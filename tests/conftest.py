"""Models and helpers shared by all tests."""

from __future__ import annotations

import gc
import json
import os
import secrets
from collections import Counter
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TQDM_DISABLE", "1")
# Ray reads its access mode once per process, at the first import in any test
os.environ["RAY_AUTH_MODE"] = "token"
os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
# Waiting threads of torch must sleep: spinning ones would take cores from others. Torch reads this once at import, also
# in the processes that tests start
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# Triton chooses its interpreter for CUDA kernels at the first import, which torch triggers
os.environ.setdefault("TRITON_INTERPRET", "1")

# gw0 and gw1 get a core each, also for their children; further ones use all cores
if name := os.environ.get("PYTEST_XDIST_WORKER"):
    cores = sorted(os.sched_getaffinity(0))
    number = int(name[2:])
    os.sched_setaffinity(0, {cores[number]} if number < len(cores) else set(cores))

import hypothesis
import pytest

from swiftbatch.jobs.storage.store import Store
from tests.jobs.storage.fault_proxy import FaultProxy
from tests.jobs.storage.s3_server import S3Server, running_s3_server

if TYPE_CHECKING:  # fixtures import these, so that the process which distributes tests starts sooner
    from swiftbatch.worker.forward.target_model import TargetModel
    from swiftbatch.worker.model.model_files import ModelFiles

# Examples have no deadline on a busy machine, and a test's fixtures serve all its examples
no_checks = (hypothesis.HealthCheck.too_slow, hypothesis.HealthCheck.function_scoped_fixture)
hypothesis.settings.register_profile("busy machine", deadline=None, max_examples=50, suppress_health_check=no_checks)
hypothesis.settings.load_profile("busy machine")

DRIVER, WORKER = "tests/scheduler/driver/", "tests/worker/"
NUM_THREADS = 1 if name else min(2, len(os.sched_getaffinity(0)))  # more threads than cores are ten times slower


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect no garbage while modules are imported or later, because modules stay to the end."""
    gc.disable()
    result = yield
    gc.freeze()
    gc.enable()
    return result


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark tests that share or start Ray, and run slow files first."""
    for item in items:
        if "cluster" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.ray)
    leave_out_all_but_a_sample(items)
    items[:] = in_order(items)


def leave_out_all_but_a_sample(items: list[pytest.Item]) -> None:
    num_seen: Counter[str] = Counter()
    for item in items:
        if (marker := item.get_closest_marker("sample")) and not item.get_closest_marker("slow"):
            name = item.nodeid.partition("[")[0]
            if num_seen[name] % marker.args[0]:
                item.add_marker(pytest.mark.slow)
            num_seen[name] += 1


def in_order(items: list[pytest.Item]) -> list[pytest.Item]:
    """Sort short files last, and the driver's third, because only the first two processes have a core of their own."""
    groups: dict[str, list[list[pytest.Item]]] = {name: [] for name in ("driver", "ray", "long", "computing", "short")}
    files: dict[Path, list[pytest.Item]] = {}
    for item in items:
        files.setdefault(item.path, []).append(item)
    for file in files.values():
        groups[group_of(file)].append(file)
    driver, *between, short = groups.values()
    places = [(number / len(group), file) for group in between for number, file in enumerate(group)]
    spread = [file for _, file in sorted(places, key=lambda place: place[0])]
    return [item for file in (*spread[:2], *driver, *spread[2:], *short) for item in file]


def group_of(file: list[pytest.Item]) -> str:
    """Name what a file's tests spend their time with."""
    if file[0].nodeid.startswith(DRIVER):
        return "driver"
    if any(item.get_closest_marker("ray") for item in file):
        return "ray"
    if not any(item.get_closest_marker("long") for item in file):
        return "short"
    return "computing" if file[0].nodeid.startswith(WORKER) else "long"


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Distribute whole files; the driver's count as one, because they share a Ray."""
    from xdist.scheduler import LoadFileScheduling

    class ByFile(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return DRIVER if nodeid.startswith(DRIVER) else str(super()._split_scope(nodeid))

    return ByFile(config, log) if config.getvalue("dist") == "loadfile" else None


@pytest.fixture(autouse=True)
def _fixed_threads() -> None:
    import torch

    torch.set_num_threads(NUM_THREADS)


@pytest.fixture
def one_thread(_fixed_threads: None) -> None:
    """Lets clocks be read: two threads would wait for each other on a busy machine."""
    import torch

    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _same_numbers() -> None:
    """Seeds all generators."""
    import torch

    torch.manual_seed(0)


@pytest.fixture(scope="session", autouse=True)
def _costs_timed_once() -> Iterator[None]:
    """Times each forward for step costs once: no token depends on a plan."""
    from swiftbatch.worker.forward import step_costs

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(step_costs, "PROBE_REPEATS", 1)
        yield


@pytest.fixture(scope="session")
def embedded_files() -> ModelFiles:
    from swiftbatch.worker.model.model_files import locate_model

    return locate_model("embedded")


@pytest.fixture(scope="session")
def embedded_targets(embedded_files: ModelFiles) -> dict[str, TargetModel]:
    from swiftbatch.worker.forward.target_model import TargetModel

    return {dtype: TargetModel.load(embedded_files, dtype, "cpu") for dtype in ("bfloat16", "float32")}


@pytest.fixture(scope="session")
def target(embedded_targets: dict[str, TargetModel]) -> TargetModel:
    return embedded_targets["bfloat16"]


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.tiny_model import write_tiny_model

    return write_tiny_model(tmp_path_factory.mktemp("tiny-model"), 2)


@pytest.fixture(scope="session")
def one_layer_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with one layer, because Triton's interpreter is slow."""
    from tests.tiny_model import write_tiny_model

    return write_tiny_model(tmp_path_factory.mktemp("one-layer-model"), 1)


@pytest.fixture
def books(tmp_path: Path) -> Path:
    """A folder with one-sentence books to train on and to test on."""
    folder = tmp_path / "books"
    folder.mkdir()
    for name in ("train.jsonl", "test.jsonl"):
        (folder / name).write_text(
            json.dumps({"text": "the quick brown fox jumps over the lazy dog. " * 80}) + "\n", encoding="utf-8"
        )
    return folder


@pytest.fixture(scope="session")
def s3_server() -> Iterator[S3Server]:
    with running_s3_server() as server:
        yield server


@pytest.fixture
def s3_uri(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> str:
    for name, value in s3_server.environment().items():
        monkeypatch.setenv(name, value)
    return s3_server.uri(f"run-{uuid4().hex}")


@pytest.fixture
def s3_store(s3_uri: str) -> Store:
    """The new folder, not through the proxy."""
    return Store(s3_uri)


@pytest.fixture
def s3_proxy(s3_store: Store, s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultProxy]:
    """A proxy between the server and every store opened from now on."""
    proxy = FaultProxy(s3_server.address, seed=1)
    monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
    yield proxy
    proxy.close()
