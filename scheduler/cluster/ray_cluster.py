"""The Ray cluster of a run, embedded or already running, and the watch of its head."""

from __future__ import annotations

import atexit
import contextlib
import functools
import logging
import os
import resource
import secrets
import socket
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from swiftbatch.jobs.errors import UserError
from swiftbatch.scheduler.cluster.embedded_ray import LOOPBACK, EmbeddedRay
from swiftbatch.scheduler.cluster.worker_code import own_code
from swiftbatch.scheduler.process.signals import INTERRUPTED, call_interruptibly

if TYPE_CHECKING:
    from ray.job_config import JobConfig

LONGEST_TICK = 2.0


class AwakeClock:
    """A clock to measure how long others are silent; it skips times when this process itself was stopped."""

    def __init__(self) -> None:
        self._last = time.monotonic()
        self._seconds = 0.0

    def now(self) -> float:
        """Return the seconds since creation, counting at most two between readings."""
        last, self._last = self._last, time.monotonic()
        self._seconds += min(self._last - last, LONGEST_TICK)
        return self._seconds


# Asks the cluster's head once a second whether it is there and which nodes will leave.


POLL_SECONDS = 1.0
ANSWER_SECONDS = 5.0
SILENT_SECONDS = 30.0  # a head with a database restarts within this time


class ClusterLostError(RuntimeError):
    """The Ray cluster is gone."""


class ClusterWatch:
    """The state of the cluster, from the thread's newest answers."""

    def __init__(self, head: Any, own_node_id: Any) -> None:
        """`head` is Ray's `GcsClient`."""
        self._head = head
        self._own_node_id = own_node_id
        self._clock = AwakeClock()
        self._answered = 0.0  # in that clock's seconds
        self._has_answered = threading.Event()  # since the last check
        self._problem: str | None = None
        self._draining: dict[str, float] = {}
        self._ended = threading.Event()
        threading.Thread(target=self._watch, name="cluster-watch", daemon=True).start()

    def check(self) -> None:
        """Raise ClusterLostError if the cluster is gone; call it several times a second."""
        if self._problem is not None:
            raise ClusterLostError(self._problem)
        now = self._clock.now()
        if self._has_answered.is_set():
            self._has_answered.clear()
            self._answered = now
        silence = now - self._answered
        if silence > SILENT_SECONDS:
            raise ClusterLostError(f"the head of the Ray cluster has not answered for {silence:.0f} s")

    def draining(self) -> dict[str, float]:
        """Return the seconds left for each node that will leave."""
        now = time.time()
        return {node_id: deadline - now for node_id, deadline in self._draining.items()}

    def stop(self) -> None:
        self._ended.set()

    def _watch(self) -> None:
        while self._problem is None and not self._ended.wait(POLL_SECONDS):
            self._ask()

    def _ask(self) -> None:
        from ray.exceptions import AuthenticationError, RayError

        try:
            (is_alive,) = self._head.check_alive([self._own_node_id], timeout=ANSWER_SECONDS)
            deadlines = self._head.get_draining_nodes(timeout=ANSWER_SECONDS)
        except AuthenticationError:
            self._problem = "the head of the Ray cluster was started anew, and does not know this run's workers"
        except RayError:
            return  # no answer; `check` measures the silence
        else:
            self._has_answered.set()
            if not is_alive:
                self._problem = "the Ray node of this machine has died, and the run's workers with it"
            # 0 means no deadline; because clocks differ, the deadline may already have passed
            self._draining = {node_id: ms / 1000 if ms else float("inf") for node_id, ms in deadlines.items()}


# The cluster itself.


OBJECT_STORE_BYTES = 100 * 2**20  # reports are small; the default reserves a third of the memory

CONNECT_SECONDS = 10.0


class ClusterError(UserError):
    """A Ray cluster that cannot be started or reached."""


@dataclass(frozen=True)
class Cluster:
    """A cluster as the driver sees it: to place and watch workers."""

    is_embedded: bool
    num_gpus: int
    watch: ClusterWatch | None  # None if this version of Ray can't be asked

    def num_cpus_per_worker(self) -> int:
        """Return 0 for an embedded Ray; else 1, which makes autoscalers act."""
        return 0 if self.is_embedded else 1

    def gives_gpus(self, device: str) -> bool:
        return device == "cuda" or (device == "auto" and self.num_gpus > 0)


@contextlib.contextmanager
def connect(address: str | None, num_workers: int) -> Iterator[Cluster]:
    """Start an embedded Ray (`address` None) or join a cluster; leave it at the end.

    Raises ClusterError, and KeyboardInterrupt at a signal. Inside, only the caller writes to the terminal. After a
    ClusterLostError the process exits with 2, after an interruption of Ray with 130.
    """
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    os.environ.setdefault("RAY_IGNORE_UNHANDLED_ERRORS", "1")  # errors of workers that nobody waits for
    os.environ.setdefault("RAY_worker_niceness", "0")  # Ray's default is 15, behind every other program
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # avoids a warning about a future default
    with contextlib.ExitStack() as stack:
        embedded = None
        if address is None:
            os.environ["RAY_AUTH_MODE"] = "token"  # because whoever can call Ray can run code
            os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
            embedded = _embedded_ray()
            stack.callback(embedded.end)
        else:
            refuse_unreachable(address)
        # Ray's listener thread prints lost workers to stdout at any log level.
        stack.enter_context(contextlib.redirect_stdout(stack.enter_context(open(os.devnull, "w", encoding="utf-8"))))
        left = threading.Event()
        stack.callback(left.set)
        _init(address, num_workers, embedded, left)
        stack.push(functools.partial(_leave, embedded))
        watch = _open_watch()
        if watch is not None:
            stack.callback(watch.stop)
        yield Cluster(is_embedded=address is None, num_gpus=_num_gpus(), watch=watch)


def _embedded_ray() -> EmbeddedRay:
    longest, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    if longest != resource.RLIM_INFINITY and longest < OBJECT_STORE_BYTES:
        raise ClusterError(
            f"an embedded Ray needs files of {OBJECT_STORE_BYTES:,} bytes, and here none is to be longer than "
            f"{longest:,}; raise the limit (ulimit -f unlimited)"
        )
    try:
        return EmbeddedRay()
    except OSError as error:
        raise ClusterError(
            f"an embedded Ray has no place for its files: cannot make {error.filename}: {error.strerror}; "
            "set RAY_TMPDIR to a folder that can be written"
        ) from None


def _init(address: str | None, num_workers: int, embedded: EmbeddedRay | None, left: threading.Event) -> None:
    """Start Ray in this process until `left`. Raises ClusterError and KeyboardInterrupt."""

    def init() -> None:
        if embedded is None:
            _join(address)
        else:
            job = _job_on_its_own_path()
            with embedded.apart(job):
                _start(num_workers, embedded, job)

    try:
        call_interruptibly(init, left)
    except KeyboardInterrupt:
        _end_without_ray(INTERRUPTED)  # it may still be starting in its thread
        raise
    except UnicodeEncodeError:  # Ray keeps the command's words and the working folder's name
        raise ClusterError(
            "Ray takes names in UTF-8 alone, and one in this command or of the folder it was given in is none; "
            "rename that folder or file"
        ) from None
    except Exception as error:  # Ray raises anything, even a bare Exception if a node is slow
        where = f"no Ray cluster answers at {address}" if embedded is None else "an embedded Ray does not start"
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        logs = "" if embedded is None else f"; its logs are in {embedded.keep_logs()}"
        raise ClusterError(f"{where}: {reason}{logs}") from error


def _job_on_its_own_path() -> JobConfig:
    """Return a job whose workers do not import from the driver's current folder.

    This uses a private part of Ray. If that part is missing, `bootstrap` removes the folder after Ray's imports.
    """
    from ray.job_config import JobConfig

    class JobOnItsOwnPath(JobConfig):  # type: ignore[misc]  # Ray has no types
        def _runtime_env_has_working_dir(self) -> bool:
            return True

    return JobOnItsOwnPath()


def _start(num_workers: int, embedded: EmbeddedRay, job: JobConfig) -> None:
    import ray

    ray.init(
        job_config=job,
        address="local",  # never joins another cluster on this machine by accident
        num_cpus=num_workers,
        include_dashboard=False,
        object_store_memory=OBJECT_STORE_BYTES,
        log_to_driver=False,
        logging_level=logging.ERROR,
        _node_ip_address=LOOPBACK,
        _temp_dir=str(embedded.folder),
    )


def _join(address: str | None) -> None:
    import ray

    ray.init(
        address=address,
        job_config=_job_on_its_own_path(),
        runtime_env={"py_modules": [own_code(is_sent=True).folder]},  # sends the driver's version to the workers
        log_to_driver=False,
        logging_level=logging.ERROR,
    )


def _open_watch() -> ClusterWatch | None:
    """Return a watch that uses private parts of Ray, or None if this Ray lacks these parts."""
    import ray

    context = ray.get_runtime_context()
    try:
        head = ray._raylet.GcsClient(address=context.gcs_address)
        own_node_id = ray.NodeID.from_hex(context.get_node_id())
        head.check_alive([own_node_id], timeout=ANSWER_SECONDS)
        head.get_draining_nodes(timeout=ANSWER_SECONDS)
    except (AttributeError, TypeError):
        return None
    return ClusterWatch(head, own_node_id)


def _leave(embedded: EmbeddedRay | None, _type: object, error: BaseException | None, _traceback: object) -> None:
    """Leave the cluster; if it is lost, a shutdown call would hang."""
    import ray

    if isinstance(error, ClusterLostError):
        if embedded is not None:
            embedded.keep_logs()
        _end_without_ray(2)
        return
    ended = threading.Event()
    ended.set()
    try:
        call_interruptibly(ray.shutdown, ended)  # afterwards SIGTERM kills the process
    except KeyboardInterrupt:
        _end_without_ray(INTERRUPTED)
        raise


def _end_without_ray(code: int) -> None:
    _silence_ray()
    atexit.register(_end_process, code)  # it runs before Ray's own


def _silence_ray() -> None:
    """Give Python a stderr of its own, because Ray's threads write to the original file descriptor."""
    threading.excepthook = lambda _failed: None
    sys.stderr.flush()
    sys.stderr = os.fdopen(os.dup(2), "w", buffering=1, encoding="utf-8", errors="backslashreplace")
    with open(os.devnull, "w", encoding="utf-8") as nowhere:
        os.dup2(nowhere.fileno(), 2)


def _end_process(code: int) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def refuse_unreachable(address: str) -> None:
    """Check that the address can be reached, because Ray would try for minutes.

    Raises ClusterError.
    """
    host, separator, port = address.removeprefix("ray://").rpartition(":")
    if not separator or not (port.isascii() and port.isdecimal()):
        raise ClusterError(f"--address {address}: expected HOST:PORT of a running Ray cluster")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_SECONDS).close()
    except (OSError, OverflowError) as error:
        raise ClusterError(f"no Ray cluster answers at {address}: {error}") from None


def _num_gpus() -> int:
    import ray

    resources: dict[str, float] = ray.cluster_resources()
    return int(resources.get("GPU", 0))
