"""Log-probabilities are equal after a kill at any moment."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from swiftbatch.jobs.run.run import Run
from swiftbatch.jobs.storage.store import Store
from tests.worker.session.session_parts import (
    body,
    have_caches_loaded,
    make_run,
    preempted,
    record,
    run_at,
    run_to_end,
)
from tests.worker.session.test_rewind_resume import OFTEN, REWINDING, moments, wait_for_files

pytestmark = pytest.mark.long

__all__ = ["moments"]

JOB = record("fox", 60, drawn=REWINDING | {"seed": 1, "logprobs": 2})
PLAIN_JOB = record("fox", 60, drawn=REWINDING | {"seed": 1})
MODE = "processed_logprobs"
NUM_TOKENS = 38  # by then it has ended in its fourth loop


def choice(run: Run) -> dict[str, Any]:
    """Return text, tokens and log-probabilities of the result."""
    return dict(body(run, JOB)["choices"][0])


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> dict[str, Any]:
    run = make_run(tmp_path_factory.mktemp("undisturbed") / "run")
    run_to_end(run, tiny_model, JOB, PLAIN_JOB, engine="autoregressive", logprobs_mode=MODE)
    found, without = choice(run), body(run, PLAIN_JOB)["choices"][0]
    assert len(found["logprobs"]["tokens"]) == body(run, JOB)["usage"]["completion_tokens"] == NUM_TOKENS
    assert {name: value for name, value in found.items() if name != "logprobs"} == without
    assert body(run, JOB)["metrics"]["num_rewinds"] == 3
    return found


@pytest.mark.parametrize(
    ("engine", "loads", "stride"),
    [
        ("token-recycling", True, 5),
        pytest.param("token-recycling", True, 1, marks=pytest.mark.slow),
        pytest.param("suffix", False, 1, marks=pytest.mark.slow),
    ],
)
def test_a_kill_at_any_moment_changes_no_bit(
    tmp_path: Path,
    tiny_model: Path,
    undisturbed: dict[str, Any],
    moments: list[Path],
    monkeypatch: pytest.MonkeyPatch,
    engine: str,
    loads: bool,
    stride: int,
) -> None:
    run = make_run(tmp_path / "run")
    wait_for_files(monkeypatch)
    often = OFTEN | {"checkpoint_tokens": 3}
    run_to_end(run, tiny_model, JOB, engine=engine, logprobs_mode=MODE, **often)
    assert choice(run) == undisturbed
    monkeypatch.undo()
    have_caches_loaded(monkeypatch, loads)
    for number, moment in enumerate(moments[::stride]):
        again = run_at(moment, tmp_path / f"again-{number}")
        run_to_end(again, tiny_model, JOB, engine=engine, logprobs_mode=MODE)
        assert choice(again) == undisturbed, moment


def folders_of(run: Run) -> list[str]:
    return [f"checkpoints/{JOB.job_id}/{attempt}" for attempt in run.store.list(f"checkpoints/{JOB.job_id}")]


def logprob_files(run: Run) -> list[str]:
    found = [f"{folder}/{name}" for folder in folders_of(run) for name in run.store.list(folder)]
    return [path for path in found if "/logprobs-" in path]


@pytest.fixture(scope="module")
def preempted_twice(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Path:
    run = make_run(tmp_path_factory.mktemp("preempted") / "run")
    for num_tokens in (12, 24):
        preempted(run, tiny_model, JOB, num_tokens, logprobs_mode=MODE)
    assert len({Path(path).parent for path in logprob_files(run)}) == 2
    return Path(run.store.uri)


def test_a_second_attempt_writes_what_the_first_has_not(
    tmp_path: Path, tiny_model: Path, preempted_twice: Path, undisturbed: dict[str, Any]
) -> None:
    run = Run.open(str(shutil.copytree(preempted_twice, tmp_path / "run")))
    starts = {Path(path).parent.name: int(path.split("-")[-3]) for path in sorted(logprob_files(run), reverse=True)}
    assert starts["0001"] == 0
    assert starts["0002"] > 0
    run_to_end(run, tiny_model, JOB, logprobs_mode=MODE)
    assert choice(run) == undisturbed
    recovered = body(run, JOB)["metrics"]["attempts"][2]["resume"]["num_recovered_tokens"]
    assert recovered >= 24


@pytest.mark.parametrize("harm", ["delete", "cut", "flip", "swap"])
def test_files_that_are_torn_or_gone_cost_time_alone(
    tmp_path: Path, tiny_model: Path, preempted_twice: Path, undisturbed: dict[str, Any], harm: str
) -> None:
    for number, path in enumerate(logprob_files(Run.open(str(preempted_twice)))):
        run = Run.open(str(shutil.copytree(preempted_twice, tmp_path / f"{number}")))
        data = run.store.read(path) or b""
        harmed = {"cut": data[:-3], "flip": data[:-9] + bytes([data[-9] ^ 4]) + data[-8:]}
        if harm == "delete":
            run.store.delete(path)
        else:
            run.store.write(path, harmed.get(harm, run.store.read(logprob_files(run)[-1 - number]) or b""))
        run_to_end(run, tiny_model, JOB, logprobs_mode=MODE)
        assert choice(run) == undisturbed, path


def test_a_result_has_no_log_probabilities_but_those_that_were_asked_for(undisturbed: dict[str, Any]) -> None:
    found = undisturbed["logprobs"]
    assert {len(values) for values in found.values()} == {NUM_TOKENS}
    assert all(1 <= len(top) <= 3 for top in found["top_logprobs"])
    pairs = zip(found["tokens"], found["token_logprobs"], found["top_logprobs"], strict=True)
    assert all(top[token] == value for token, value, top in pairs)
    json.dumps(found, allow_nan=False)


def test_the_log_is_never_ahead_of_them(tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    write = Store.write

    def noting(store: Store, path: str, data: bytes) -> None:
        order.append(path.rpartition("/")[2].partition("-")[0])
        write(store, path, data)

    monkeypatch.setattr(Store, "write", noting)
    run = make_run(tmp_path / "run")
    run_to_end(run, tiny_model, record("dog", 30, {"logprobs": 0}), **OFTEN)
    logs = [number for number, name in enumerate(order) if name == "tokens.bin"]
    assert logs
    assert all(order[number - 1] == "logprobs" for number in logs)
