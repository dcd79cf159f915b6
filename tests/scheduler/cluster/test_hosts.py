"""Hosts with addresses of their own, as network namespaces: one is cut off, and comes back."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from swiftbatch.jobs.run.run_records import WorkerStatus
from swiftbatch.scheduler.chaos.local_cluster import Node, cluster_environment
from swiftbatch.scheduler.demo.prompts import PROMPTS
from tests.scheduler.driving import DEADLINE_SECONDS, Driver, is_alive, outputs, swiftbatch

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(os.geteuid() != 0 or shutil.which("ip") is None, reason="needs root and `ip`"),
]

NUM_HOSTS = 4  # the head and the driver on the first, a worker each on two of the others
NUM_TOKENS = 4000
PORT = 6379
JOBS = [
    {"custom_id": name, "prompt": prompt, "max_tokens": NUM_TOKENS, "temperature": 0.8, "ignore_eos": True}
    for name, prompt in list(PROMPTS.items())[:3]
]


def ip(*args: str) -> None:
    subprocess.run(["ip", *args], check=True, capture_output=True, text=True)


class Hosts:
    """Hosts on one switch, which is in the first; they share the disk and the process numbers."""

    def __init__(self, folder: Path) -> None:
        self.names = [f"sb{os.getpid()}-{number}" for number in range(NUM_HOSTS)]
        self.environment = cluster_environment()
        self._folder = folder
        self._num_nodes = 0
        self._nodes: dict[int, Node] = {}

    def connect(self) -> None:
        for name in self.names:
            ip("netns", "add", name)
            ip("-n", name, "link", "set", "lo", "up")
        switch = self.names[0]
        ip("-n", switch, "link", "add", "switch", "type", "bridge")
        ip("-n", switch, "addr", "add", f"{self.address(0)}/24", "dev", "switch")
        ip("-n", switch, "link", "set", "switch", "up")
        for number, name in enumerate(self.names[1:], 1):
            ip("link", "add", "eth0", "netns", name, "type", "veth", "peer", f"port{number}", "netns", switch)
            ip("-n", switch, "link", "set", f"port{number}", "master", "switch", "up")
            ip("-n", name, "addr", "add", f"{self.address(number)}/24", "dev", "eth0")
            ip("-n", name, "link", "set", "eth0", "up")

    def address(self, number: int) -> str:
        return f"10.213.77.{number + 1}"

    def set_link(self, number: int, state: str) -> None:
        """Pull a host's plug ("down"), or put it back ("up")."""
        ip("-n", self.names[0], "link", "set", f"port{number}", state)

    def command(self, number: int, *args: str) -> list[str]:
        """A Python module's command line, to be run on a host, with a host name of its own."""
        name = self.names[number]
        named = ["unshare", "--uts", "sh", "-c", f'hostname {name} && exec "$@"', "sh"]
        return ["ip", "netns", "exec", name, *named, sys.executable, "-m", *args]

    def start_node(self, number: int, *args: str) -> Node:
        self._num_nodes += 1
        folder = self._folder / str(self._num_nodes)
        folder.mkdir()
        log = folder / "node.log"
        where = [f"--temp-dir={folder}", f"--node-ip-address={self.address(number)}"]
        what = ["ray.scripts.scripts", "start", "--block", "--object-store-memory=100000000", *where, *args]
        with log.open("wb") as output:
            process = subprocess.Popen(
                self.command(number, *what), env=self.environment, stdout=output, stderr=output, start_new_session=True
            )
        node = Node(process, log)
        self._nodes[number] = node
        node.wait_until_up()
        return node

    def start_raylet(self, number: int) -> Node:
        return self.start_node(number, f"--address={self.address(0)}:{PORT}", "--num-cpus=1")

    def lose(self, number: int) -> None:
        """SIGKILL a host's node."""
        if node := self._nodes.pop(number, None):
            node.kill()

    def remove(self) -> None:
        for number in reversed(range(NUM_HOSTS)):
            self.lose(number)
        for name in self.names:
            with contextlib.suppress(subprocess.CalledProcessError):
                ip("netns", "del", name)


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    folder = Path("/tmp") / f"sb{os.getpid()}"  # short: Ray's sockets are below
    folder.mkdir()
    hosts = Hosts(folder)
    try:
        hosts.connect()
        hosts.start_node(0, "--head", f"--port={PORT}", "--num-cpus=0", "--include-dashboard=false")
        for number in range(1, NUM_HOSTS):
            hosts.start_raylet(number)
        yield hosts
    finally:
        hosts.remove()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def jobs_file(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("jobs") / "jobs.jsonl"
    path.write_text("".join(json.dumps(job) + "\n" for job in JOBS))
    return str(path)


@pytest.fixture(scope="module")
def undisturbed(jobs_file: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the jobs give on one worker without any trouble."""
    run = tmp_path_factory.mktemp("undisturbed") / "run"
    command = swiftbatch("submit", jobs_file, "--run", str(run), "--slots", "3")
    subprocess.run(command, check=True, capture_output=True, timeout=DEADLINE_SECONDS)
    assert set(outputs(run)) == {job["custom_id"] for job in JOBS}
    return outputs(run)


def start(hosts: Hosts, number: int, *args: str) -> list[str]:
    """A command of ours on a host."""
    options = ["--workers", "2", "--checkpoint-seconds", "0.5", "--address", f"{hosts.address(0)}:{PORT}"]
    return hosts.command(number, "swiftbatch.scheduler.cli", *args, *options)


def test_a_worker_host_that_is_cut_off_and_comes_back_changes_nothing(
    hosts: Hosts, jobs_file: str, undisturbed: dict[str, Any], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    with Driver(start(hosts, 0, "submit", jobs_file, "--run", str(run)), hosts.environment, run) as driver:
        cut_off_and_back(hosts, driver)
        assert driver.process.wait(DEADLINE_SECONDS) == 0
    assert outputs(run) == undisturbed


def test_a_driver_host_that_is_cut_off_stops_and_another_one_goes_on(
    hosts: Hosts, jobs_file: str, undisturbed: dict[str, Any], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    with Driver(start(hosts, 3, "submit", jobs_file, "--run", str(run)), hosts.environment, run) as driver:
        worker = driver.wait_for(driver.busy_workers)[0]
        driver.wait_for(lambda: list(driver.checkpoints(worker).glob("*/tokens.bin")))
        cut_off = time.monotonic()
        hosts.set_link(3, "down")
        assert driver.process.wait(DEADLINE_SECONDS) == 2
        print(f"the driver that was cut off stopped after {time.monotonic() - cut_off:.1f} s")
    assert "Traceback" not in driver.output()
    assert "nothing is lost" in driver.output().splitlines()[-1]
    with Driver(start(hosts, 0, "resume", str(run)), hosts.environment, run) as driver:
        assert driver.process.wait(DEADLINE_SECONDS) == 0
    assert outputs(run) == undisturbed


def cut_off_and_back(hosts: Hosts, driver: Driver) -> None:
    """Cut a host off until its job has been given to another, which is then lost while the first one is back."""
    number, stale = driver.wait_for(lambda: busy_on(hosts, driver, {1, 2, 3}))
    job = driver.checkpoints(stale)
    driver.wait_for(lambda: (job / "0001" / "tokens.bin").exists())
    cut_off = time.monotonic()
    hosts.set_link(number, "down")
    driver.wait_for(lambda: (job / "0002").exists())
    print(f"its job was given to another host after {time.monotonic() - cut_off:.1f} s")
    assert is_alive(stale.pid)  # it knows nothing of that
    hosts.set_link(number, "up")
    back = time.monotonic()
    driver.wait_for(lambda: not is_alive(stale.pid))
    print(f"back on the network, its worker ended after {time.monotonic() - back:.1f} s")
    hosts.lose(number)  # its raylet has ended: the cluster had given it up
    hosts.start_raylet(number)
    other_number, _ = driver.wait_for(lambda: busy_on(hosts, driver, {1, 2, 3} - {number}))
    hosts.lose(other_number)
    driver.wait_for(lambda: busy_on(hosts, driver, {number}))


def busy_on(hosts: Hosts, driver: Driver, numbers: set[int]) -> tuple[int, WorkerStatus] | None:
    """A worker with a job on one of these hosts."""
    workers = [(hosts.names.index(worker.host), worker) for worker in driver.busy_workers()]
    return next(((number, worker) for number, worker in workers if number in numbers), None)
