"""Workers run the driver's code, whatever the current folder holds."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from swiftbatch.jobs.python_processes import environment_of_code
from swiftbatch.scheduler.cluster import worker_code
from swiftbatch.scheduler.cluster.ray_actors import last_words
from swiftbatch.scheduler.cluster.worker_code import PACKAGE, ROOMS, OtherCodeError, own_code
from tests import ROOT

pytestmark = pytest.mark.ray

IN_A_WORKER = """
import json, os, sys
from swiftbatch.scheduler.cluster import worker_code
place, folder, digest, is_sent = sys.argv[1:]
for name in [name for name in sys.modules if name.partition(".")[0] == worker_code.PACKAGE]:
    del sys.modules[name]
sys.path.insert(0, place)
code = worker_code.Code(folder, digest, (place,), is_sent == "sent")
try:
    worker_code.use_code_of_driver(code)
    import swiftbatch.worker.sampling.draft_tree
    print(json.dumps(swiftbatch.worker.sampling.draft_tree.__file__))
except worker_code.OtherCodeError as error:
    print(json.dumps(f"refused: {error}"))
"""


def checkout(folder: Path) -> Path:
    for room in (PACKAGE, *ROOMS):
        ignored = shutil.ignore_patterns("__pycache__", "embedded")
        shutil.copytree(ROOT / room, folder / room, symlinks=True, ignore=ignored)
    return folder


def in_a_worker(place: Path, folder: Path, digest: str, how: str) -> str:
    """Return what a worker imports, or its refusal, with `place` first in its path."""
    command = [sys.executable, "-P", "-c", IN_A_WORKER, str(place), str(folder / PACKAGE), digest, how]
    ran = subprocess.run(command, env=environment_of_code(), capture_output=True, text=True, check=True)
    return str(json.loads(ran.stdout))


@pytest.mark.parametrize("how", ["here", "sent"])
def test_another_checkout_in_the_current_folder_is_passed_over(how: str, tmp_path: Path) -> None:
    other = checkout(tmp_path / "other")
    code = own_code(is_sent=False)
    assert in_a_worker(other, ROOT, code.digest, how) == str(ROOT / PACKAGE / "worker" / "sampling" / "draft_tree.py")


def test_other_code_is_refused_in_a_line_that_names_both_places(tmp_path: Path) -> None:
    other = checkout(tmp_path / "other")
    with (other / "worker" / "sampling" / "draft_tree.py").open("a") as file:
        file.write("# changed\n")
    code = own_code(is_sent=False)
    line = in_a_worker(tmp_path, other, code.digest, "here")
    assert line.startswith("refused: ")
    assert "\n" not in line
    assert f"found {other / PACKAGE} with digest" in line
    assert f"expected that of {other / PACKAGE} with digest {code.digest[:12]}" in line


def test_kernels_belong_to_the_code(tmp_path: Path) -> None:
    other = checkout(tmp_path / "other")
    package, kernels = other / PACKAGE, other / "worker" / "kernels"
    digests = [worker_code.digest_of(package)]
    (kernels / "source" / "new.h").write_text("int new;")
    digests.append(worker_code.digest_of(package))
    (kernels / "lib").mkdir(exist_ok=True)
    (kernels / "lib" / "kernels-new.so").write_bytes(b"compiled")
    digests.append(worker_code.digest_of(package))
    assert len(set(digests)) == 3
    (kernels / "lib" / "tmp1").mkdir()  # left by a running compiler
    (kernels / "lib" / "tmp1" / "kernels.c").write_text("half of it")
    assert worker_code.digest_of(package) == digests[-1]


def test_a_package_that_is_nowhere_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    code = own_code(is_sent=True)
    monkeypatch.setattr(worker_code.importlib.util, "find_spec", lambda package: None)
    monkeypatch.setattr(sys, "path", list(sys.path))
    with pytest.raises(OtherCodeError, match="found no swiftbatch, expected that of"):
        worker_code.use_code_of_driver(code)


def test_the_last_words_of_a_worker_that_died_while_it_started(tmp_path: Path) -> None:
    log = tmp_path / "w1.log"
    assert last_words(None, "w1") == last_words(str(tmp_path), "w1") == ""
    log.write_text("worker process 7 starts\nof an older driver\n")
    with log.open("a") as file:
        file.write("worker process 8 starts\n")
    assert last_words(str(tmp_path), "w1") == ""
    with log.open("a") as file:
        file.write("one\n\ntwo\nthree  words\nfour\n")
    assert last_words(str(tmp_path), "w1") == "; its last lines: two | three words | four"
    with log.open("a") as file:
        file.write('Fatal Python error: Segmentation fault\n\nCurrent thread:\n  File "x.py", line 1\n  File "y.py"\n')
    assert last_words(str(tmp_path), "w1") == "; its last lines: Fatal Python error: Segmentation fault"
