"""A worker's process before any code of ours is in it: where that comes from, and whether it is the driver's.

Ray sends this module's content to the workers, not its name: what lies under that name there is the question.
So it imports the standard library alone.
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
ROOMS = ("jobs", "metrics", "scheduler", "worker")  # in its folder; links in a checkout
CODE = ("*.py", "*.c", "*.h", "*.so")  # the kernels' source and what was compiled of it among them
COMPILING = "tmp"  # the first letters of folders that a compiler at work has beside the kernels
STARTING = "worker process {} starts"  # in front of what it writes


class OtherCodeError(RuntimeError):
    """A worker's code is not the driver's; the text is one line for the user."""


@dataclass(frozen=True)
class Code:
    """The driver's code: the folder of its package, and the digest.

    `is_sent` says that Ray brings the package to the workers; else it is in the same folder there. `added` are the
    folders that Ray puts in front of the workers' paths, unless the user's PYTHONPATH has them: the driver's current
    folder and its script's.
    """

    folder: str
    digest: str
    added: tuple[str, ...]
    is_sent: bool


class WorkerProcess:
    """Ray's actor: sees to it that the driver's code runs, then does what `WorkerActor` does."""

    def __init__(self, worker_id: str, code: Code, log_folder: str | None, spec: bytes) -> None:
        """`spec` is a pickled `WorkerSpec`, whose class may not be known here before `start`."""
        self._worker_id, self._code, self._log_folder, self._spec = worker_id, code, log_folder, spec

    def start(self) -> Any:
        """Load the model. Raises OtherCodeError and ImportError, and what `WorkerActor.start` raises.

        A method of its own, so that its error arrives as the error it is.
        """
        if self._log_folder is not None:
            write_output_to(Path(self._log_folder) / f"{self._worker_id}.log")
        use_code_of_driver(self._code)
        actors = importlib.import_module(f"{PACKAGE}.scheduler.cluster.worker_actor")
        self._actor = actors.WorkerActor(self._worker_id, pickle.loads(self._spec))
        return self._actor.start()

    def work(self, orders: Any, seconds: float) -> Any:
        return self._actor.work(orders, seconds)

    def drain(self, seconds: float) -> Any:
        return self._actor.drain(seconds)


def own_code(is_sent: bool) -> Code:
    """The code of this process, a driver."""
    package = _place_of_package()
    if package is None:
        raise ImportError(f"the package {PACKAGE} is on no path")
    added = {os.getcwd(), os.path.dirname(os.path.realpath(sys.argv[0]))}
    added -= {os.path.abspath(place) for place in os.environ.get("PYTHONPATH", "").split(os.pathsep) if place}
    return Code(str(package), digest_of(package), tuple(added), is_sent)


def use_code_of_driver(code: Code) -> None:
    """Have the package imported from where the driver has or sends it, whatever its current folder holds.

    Raises OtherCodeError where another one is found. Nothing of it has run then.
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
    """A SHA-256 over the code of the package."""
    whole = hashlib.sha256((package / "__init__.py").read_bytes())
    for place in (package / room for room in ROOMS):
        for file in sorted(file for pattern in CODE for file in place.rglob(pattern)):
            if file.parent.name.startswith(COMPILING):
                continue
            whole.update(f"{place.name}/{file.relative_to(place).as_posix()}".encode())
            whole.update(hashlib.sha256(file.read_bytes()).digest())
    return whole.hexdigest()


def write_output_to(path: Path) -> None:
    """Send this process's stdout and stderr, and a crash's stack, to a file: Ray's own log folder is hard to find."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    faulthandler.enable(file=2)
    print(STARTING.format(os.getpid()), file=sys.stderr, flush=True)


def _place_of_package() -> Path | None:
    """The folder that the package would be imported from; None where there is none. Nothing of it is imported."""
    spec = importlib.util.find_spec(PACKAGE)
    return None if spec is None or spec.origin is None else Path(spec.origin).resolve().parent
