from __future__ import annotations

import os
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from swiftbatch.scheduler.cluster import embedded_ray, ray_cluster
from swiftbatch.scheduler.cluster.embedded_ray import EmbeddedRay
from swiftbatch.scheduler.cluster.ray_cluster import ClusterError, connect

pytestmark = pytest.mark.ray


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A short folder, because sockets' paths must be short."""
    folder = tempfile.mkdtemp(prefix="er-", dir="/tmp")
    monkeypatch.setenv("RAY_TMPDIR", folder)
    yield Path(folder)
    shutil.rmtree(folder)


def age(folder: Path) -> None:
    long_ago = time.time() - embedded_ray.KEPT_SECONDS - 60
    os.utime(folder, (long_ago, long_ago))


def test_a_folder_goes_with_its_ray_and_stays_where_ray_has_failed(place: Path) -> None:
    EmbeddedRay().end()
    assert list(place.iterdir()) == []
    failed = EmbeddedRay()
    assert failed.keep_logs() == failed.folder
    failed.end()
    assert list(place.iterdir()) == [failed.folder]


def test_a_folder_goes_though_a_process_that_is_being_killed_writes_into_it(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ray, rmtree, written = EmbeddedRay(), shutil.rmtree, []

    def remove(folder: Path, **options: bool) -> None:
        rmtree(folder, **options)
        if len(written) < 2:
            written.append(folder / "session_1")
            written[-1].mkdir(parents=True)

    monkeypatch.setattr(embedded_ray.shutil, "rmtree", remove)
    ray.end()
    assert list(place.iterdir()) == []
    assert len(written) == 2


def test_a_ray_that_is_starting_when_the_command_ends_starts_no_process_more(place: Path) -> None:
    from ray._private import services

    ray = EmbeddedRay()
    with ray.apart():
        ray.end()
        with pytest.raises(ChildProcessError):
            services.ConsolePopen(["true"])


def test_what_killed_processes_have_left_goes_after_a_day_and_nothing_that_is_in_use(place: Path) -> None:
    running, left, kept = EmbeddedRay(), EmbeddedRay(), EmbeddedRay()
    for each in (left, kept):
        each.keep_logs()
        each.end()
    (place / "swiftbatch-else").mkdir()
    for folder in (running.folder, left.folder, place / "swiftbatch-else"):
        age(folder)
    newest = EmbeddedRay()
    assert set(place.iterdir()) == {running.folder, kept.folder, newest.folder, place / "swiftbatch-else"}
    running.end()
    newest.end()


def test_where_the_temporary_folder_has_a_long_name_another_one_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path / "with a name that is too long for a socket below it"))
    embedded = EmbeddedRay()
    embedded.end()
    assert embedded.folder.parent == Path("/tmp")


def test_where_the_temporary_folder_is_not_there_one_line_says_so(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_TMPDIR", f"{place}x")
    with pytest.raises(ClusterError, match=rf"cannot make {place}x/.*: No such file or directory; set RAY_TMPDIR"):
        connect(None, 1).__enter__()


def test_names_that_ray_cannot_take_are_told_of_and_leave_nothing(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_cluster, "_start", lambda *_: "a\udcff".encode())  # as it does with its own command line
    with pytest.raises(ClusterError, match=r"Ray takes names in UTF-8 alone, .* rename that folder or file"):
        connect(None, 1).__enter__()
    assert list(place.iterdir()) == []


def test_a_limit_on_the_length_of_files_is_told_before_ray_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (10_240, resource.RLIM_INFINITY))
    with pytest.raises(ClusterError, match=r"none is to be longer than 10,240; raise the limit"), connect(None, 1):
        pass


HEARING = """
import os, signal, sys
from pathlib import Path
from swiftbatch.scheduler.cli import main
from swiftbatch.scheduler.cluster import ray_cluster

def start(*_: object) -> None:
    states = [(task / "status").read_text() for task in Path("/proc/self/task").iterdir()]
    masks = [int(state.split("SigBlk:")[1].split()[0], 16) for state in states]
    raise Exception(f"{len(masks)} threads, {sum(not mask >> (signal.SIGTERM - 1) & 1 for mask in masks)} hear")

ray_cluster._start = start
main()
"""


def test_no_thread_hears_a_signal_while_ray_starts(place: Path, tmp_path: Path) -> None:
    """A receiving thread would run Ray's handler, which ends the process with a trace."""
    jobs = tmp_path / "jobs.jsonl"
    jobs.write_text("".join(f'{{"custom_id": "{name}", "prompt": "It was", "max_tokens": 9}}\n' for name in "ab"))
    command = [sys.executable, "-c", HEARING, "submit", str(jobs), "--run", str(tmp_path / "run")]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert re.search(r"does not start: ([0-9]+) threads, 0 hear;", ended.stderr), ended.stderr


LISTENING = """
import os, sys
from pathlib import Path
from swiftbatch.scheduler.cluster.ray_cluster import connect

def parent_of(process):
    return int((process / "stat").read_text().rpartition(")")[2].split()[1])

with connect(None, 1):
    import ray

    def inside():
        return os.getpid()

    ray.get(ray.remote(inside).remote())
    ours, processes = {os.getpid()}, list(Path("/proc").glob("[0-9]*"))
    for _ in range(4):
        ours |= {int(process.name) for process in processes if process.exists() and parent_of(process) in ours}
    rows = [row.split() for name in ("tcp", "tcp6") for row in Path("/proc/net", name).read_text().splitlines()[1:]]
    sockets = {row[9]: row[1].partition(":")[0] for row in rows if row[3] == "0A"}
    for pid in ours:
        links = [os.readlink(link) for link in Path("/proc", str(pid), "fd").iterdir() if link.is_symlink()]
        held = [link[len("socket:[") : -1] for link in links if link.startswith("socket:[")]
        sys.stderr.writelines(f"{sockets[number]}\\n" for number in held if number in sockets)
"""


def test_every_port_of_an_embedded_ray_is_on_the_loopback(place: Path) -> None:
    """The driver's, the head's, the node's two, and a worker's."""
    ended = subprocess.run([sys.executable, "-c", LISTENING], capture_output=True, text=True, timeout=300, check=False)
    assert ended.returncode == 0, ended.stderr
    addresses = ended.stderr.split()
    assert len(addresses) >= 5
    assert set(addresses) <= {"0100007F", "0000000000000000FFFF00000100007F"}  # 127.0.0.1, in IPv6 the second time


LOST_LISTENER = """
import threading
from swiftbatch.scheduler.cluster.ray_cluster import _silence_ray

def listen() -> None:
    raise ConnectionError("recvmsg: Connection reset by peer")

_silence_ray()
listener = threading.Thread(target=listen)
listener.start()
listener.join()
"""


def test_threads_of_a_ray_that_has_gone_say_nothing_behind_the_last_line() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", LOST_LISTENER], capture_output=True, text=True, timeout=60, check=False
    )
    assert (ended.returncode, ended.stderr) == (0, "")


def test_whatever_ray_raises_while_it_starts_becomes_one_line(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def start(*_: object) -> None:
        raise Exception("The current node timed out during startup.\nmore")  # Ray's own text and class

    monkeypatch.setattr(ray_cluster, "_start", start)
    with (
        pytest.raises(ClusterError, match=r"an embedded Ray does not start: The .* startup[.]; its logs are in /tmp"),
        connect(address=None, num_workers=1),
    ):
        pass


RAYLET = {"--dashboard_agent_command": "python agent", "--runtime_env_agent_command": "python other"}
RAYLET |= {"--metrics-agent-port": "0", "--runtime_env_agent_port": "0", "--head": ""}


def without_agents(runtime_env: dict[str, object]) -> dict[str, str]:
    from ray.job_config import JobConfig

    words = [f"{name}={said}" for name, said in RAYLET.items()]
    changed = embedded_ray._without_agents(words, JobConfig(runtime_env=runtime_env))
    return dict(word.split("=") for word in changed)


@pytest.mark.parametrize("runtime_env", [{}, {"env_vars": {"NIGHT": "1"}}])
def test_a_job_with_a_runtime_environment_keeps_the_agent_that_prepares_it(runtime_env: dict[str, object]) -> None:
    changed = without_agents(runtime_env)
    is_kept = (changed["--runtime_env_agent_command"], changed["--runtime_env_agent_port"]) == ("python other", "0")
    assert is_kept == bool(runtime_env)
    assert changed["--dashboard_agent_command"] != "python agent"
    assert changed["--metrics-agent-port"] != "0"


@pytest.mark.parametrize("runtime_env", [{}, {"env_vars": {"NIGHT": "1"}}])
def test_what_stands_in_for_an_agent_is_found_whatever_the_path_says(
    runtime_env: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tmp_path / embedded_ray.NO_AGENT
    other.write_text("#!/bin/sh\nexit 1\n")
    other.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    program = Path(without_agents(runtime_env)["--dashboard_agent_command"])
    assert program.is_absolute()
    assert program != other
    ended = subprocess.run([program], input="", env={"PATH": str(tmp_path)}, timeout=60, check=False)
    assert ended.returncode == 0


def test_without_the_pipe_that_ends_the_stand_in_agents_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_enable_pipe_based_agent_to_parent_health_check", "0")
    assert without_agents({}) == RAYLET


def test_a_machine_without_what_stands_in_for_an_agent_keeps_its_agents(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded_ray, "NO_AGENT", "no-program-of-this-name")
    assert without_agents({}) == RAYLET
