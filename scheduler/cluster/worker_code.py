"""A worker's process before it imports our code: finds and checks the driver's package.

Ray sends this module's source, so it only imports the standard library.
"""

from __future__ import annotations

import faulthandler
import hashlib
import importlib
import importlib.util
import os
import pickle
import socket
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PACKAGE = "swiftbatch"
ROOMS = ("jobs", "metrics", "scheduler", "worker")  # folders of the package; links in a checkout
CODE = ("*.py", "*.c", "*.h", "*.so")  # including the kernels' source and binaries
COMPILING = "tmp"  # prefix of a running compiler's folders
STARTING = "worker process {} starts"  # marks the start in the log


class OtherCodeError(RuntimeError):
    """A worker's code differs from the driver's."""


@dataclass(frozen=True)
class Code:
    """The driver's code: its package's folder and digest.

    `added` are folders that Ray prepends to workers' paths.
    """

    folder: str
    digest: str
    added: tuple[str, ...]
    is_sent: bool


class WorkerProcess:
    """The Ray actor of a worker, which loads the driver's code. It is single-threaded: calls run in order."""

    def __init__(self, worker_id: str, code: Code, log_folder: str | None, spec: bytes) -> None:
        """`spec` is a pickled `WorkerSpec`, importable after `start`."""
        self._worker_id, self._code, self._log_folder, self._spec = worker_id, code, log_folder, spec

    def start(self, failed_gpus: frozenset[str]) -> Any:
        """Load the model, except on a failed GPU. Raises OtherCodeError, ImportError, and as `start_session`.

        `__init__` would wrap the error.
        """
        if self._log_folder is not None:
            write_output_to(Path(self._log_folder) / f"{self._worker_id}.log")
        use_code_of_driver(self._code)
        ours = importlib.import_module(f"{PACKAGE}.scheduler.cluster.worker_actor")
        self._session, answer = ours.start_session(self._worker_id, pickle.loads(self._spec), failed_gpus)
        return answer

    def work(self, orders: Any, seconds: float) -> Any:
        return self._session.work(orders, seconds)

    def drain(self, seconds: float) -> Any:
        """Write token logs, then the rest, within `seconds`, and return all jobs."""
        return self._session.drain(seconds)


def own_code(is_sent: bool) -> Code:
    package = _place_of_package()
    if package is None:
        raise ImportError(f"the package {PACKAGE} is on no path")
    added = {os.getcwd(), os.path.dirname(os.path.realpath(sys.argv[0]))}
    added -= {os.path.abspath(place) for place in os.environ.get("PYTHONPATH", "").split(os.pathsep) if place}
    return Code(str(package), digest_of(package), tuple(added), is_sent)


def use_code_of_driver(code: Code) -> None:
    """Import the package from the driver's folder or the sent copy.

    Raises OtherCodeError before any code of a different package runs.
    """
    sys.path[:] = [place for place in sys.path if place and os.path.abspath(place) not in code.added]
    if not code.is_sent and _place_of_package() != Path(code.folder):
        sys.path.insert(0, str(Path(code.folder).parent))
    importlib.invalidate_caches()
    package = _place_of_package()
    digest = "" if package is None else digest_of(package)
    if digest != code.digest:
        found = f"no {PACKAGE}" if package is None else f"{package} with digest {digest[:12]}"
        raise OtherCodeError(
            f"the code on node {socket.gethostname()} is not the driver's: found {found}, expected that of "
            f"{code.folder} with digest {code.digest[:12]}; install the same swiftbatch on all nodes, and start again "
            "where it was changed or compiled anew"
        )


def digest_of(package: Path) -> str:
    """Return a SHA-256 of the package's code."""
    whole = hashlib.sha256((package / "__init__.py").read_bytes())
    for place in (package / room for room in ROOMS):
        for file in sorted(file for pattern in CODE for file in place.rglob(pattern)):
            if file.parent.name.startswith(COMPILING):
                continue
            whole.update(f"{place.name}/{file.relative_to(place).as_posix()}".encode())
            whole.update(hashlib.sha256(file.read_bytes()).digest())
    return whole.hexdigest()


def write_output_to(path: Path) -> None:
    """Redirect output and crash stacks to a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    faulthandler.enable(file=2)
    print(STARTING.format(os.getpid()), file=sys.stderr, flush=True)


def _place_of_package() -> Path | None:
    spec = importlib.util.find_spec(PACKAGE)
    return None if spec is None or spec.origin is None else Path(spec.origin).resolve().parent
