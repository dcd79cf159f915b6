"""Stages that are commands of their own: the tests that wait for a GPU, and a run over Ray with kills."""

from __future__ import annotations

import functools
import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import swiftbatch
from bench.gpu.exact_stages import untried
from bench.gpu.trial import Trial, Try
from swiftbatch.jobs.python_processes import environment_of_code, module_command
from swiftbatch.worker.exactness.gpu_doctor.findings import Finding

KIND_TESTS = "tests/worker/test_gpu_kinds.py"
BIT_TESTS = "tests/worker/test_gpu_bits.py"
ROW_TESTS = "tests/worker/test_gpu_rows.py"
PREDICTOR_TESTS = "tests/worker/test_gpu_predictors.py"
GPU_TESTS = tuple(f"tests/worker/{name}.py" for name in ("test_gpu", "kv/test_every_cache", "kv/test_host_copies"))
CHAOS = ("chaos", "--jobs", "3", "--tokens", "600", "--kills", "3", "--workers", "1")
LAST_LINES = 4


def kinds(trial: Trial) -> Iterator[Try]:
    """A small model of every kind against transformers, in the order of the tests."""
    yield "kinds", functools.partial(_tests, trial, KIND_TESTS)


def bits(trial: Trial) -> Iterator[Try]:
    """Pages, keys in 8 bits, experts, caches on the host, forced rounds: bits against those of the plain way."""
    yield "bits", functools.partial(_tests, trial, BIT_TESTS)


def rows_of_kinds(trial: Trial) -> Iterator[Try]:
    """2,000 rows of trees of small models of several kinds against plain decoding."""
    yield "rows of kinds", functools.partial(_tests, trial, ROW_TESTS)


def predictors(trial: Trial) -> Iterator[Try]:
    """Small models with layers that predict further tokens: their drafts against a CPU's, tokens against plain ones."""
    yield "predictors", functools.partial(_tests, trial, PREDICTOR_TESTS)


def tests(trial: Trial) -> Iterator[Try]:
    """All tests that are marked for a GPU."""
    yield "pytest -m gpu", functools.partial(_tests, trial, *GPU_TESTS)


def ray_run(trial: Trial) -> Iterator[Try]:
    """A run over Ray whose worker is killed, against one that nobody disturbs."""
    yield "chaos", functools.partial(_chaos, trial)


def _tests(trial: Trial, *chosen: str) -> Finding:
    checkout = _checkout()
    if checkout is None or importlib.util.find_spec("pytest") is None:
        return untried("the tests: no checkout with tests, or no pytest")
    options = ["-m", "gpu", "-v", "-p", "no:cacheprovider", "-W", "ignore", "--timeout=120", *chosen]
    if trial.device.type != "cuda":
        options.append("--collect-only")
    return _ran([sys.executable, "-m", "pytest", *options], checkout)


def _chaos(trial: Trial) -> Finding:
    if importlib.util.find_spec("ray") is None or trial.device.type != "cuda":
        return untried("a run over Ray: no Ray here, or no GPU")
    return _ran([*module_command("swiftbatch.scheduler", *CHAOS), "--run", str(trial.scratch / "chaos")], trial.scratch)


def _checkout() -> Path | None:
    """The folder with this code's tests, where they are."""
    code = Path(swiftbatch.__file__).resolve()
    return next((folder for folder in code.parents if (folder / KIND_TESTS).is_file()), None)


def _ran(command: list[str], folder: Path) -> Finding:
    """Run a command to its end, all of whose words go to the log; the last ones are the finding's."""
    environment = environment_of_code() | {"TRITON_INTERPRET": os.environ.get("TRITON_INTERPRET", "0")}
    lines = []
    with subprocess.Popen(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            lines.append(line.strip())
    words = " / ".join(line for line in lines[-LAST_LINES:] if line)
    return Finding(passed=process.returncode == 0, words=words or "it said nothing", rows=[])
