"""`swiftbatch chaos`: kills change no token."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest

from swiftbatch.jobs.run.run import Run
from swiftbatch.scheduler.chaos.chaos_options import ChaosError, ChaosOptions
from swiftbatch.scheduler.chaos.disturbed_run import Kill
from swiftbatch.scheduler.chaos.experiment import (
    MOST_TOKENS,
    ChaosReport,
    RunOutput,
    compare,
    kinds_of,
    long_enough,
)
from swiftbatch.scheduler.chaos.faults import KINDS, plan_kills
from tests.jobs.run.run_parts import MANIFEST

DEADLINE_SECONDS = 1750
LOCAL_KINDS = KINDS[:6]  # for nodes without networks of their own


def chaos(*args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "swiftbatch.scheduler.cli", "chaos", *args]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            stdout, stderr = process.communicate(timeout=DEADLINE_SECONDS)
        finally:
            process.terminate()  # it also ends its cluster
    return subprocess.CompletedProcess(command, process.returncode, stdout, stderr)


def check(process: subprocess.CompletedProcess[str], findings: Path, kinds: Sequence[str], num_kills: int) -> Any:
    assert process.returncode == 0, process.stdout + process.stderr
    print(process.stdout)
    report = json.loads(findings.read_text())
    assert report["is_identical"]
    assert report["missing"] == report["duplicates"] == []
    assert sum(report["kills_by_kind"].values()) == num_kills
    assert min(report["kills_by_kind"][kind] for kind in kinds) >= num_kills // len(kinds)
    assert sum(report["resumes"].values()) > 0
    assert "outputs identical: yes" in process.stdout
    return report


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_forty_kills_change_no_token(seed: int, tmp_path: Path) -> None:
    findings = tmp_path / "chaos.json"
    args = ["--jobs", "12", "--tokens", "3000", "--kills", "40", "--checkpoint-tokens", "128", "--seed", str(seed)]
    process = chaos(*args, "--run", str(tmp_path / "runs"), "--json", str(findings))
    report = check(process, findings, LOCAL_KINDS, num_kills=40)
    assert len({job["disturbed_sha256"] for job in report["jobs"]}) == 12
    assert report["num_recomputed_tokens"] <= report["max_recomputed_tokens"] < report["num_tokens"]


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("ip") is None, reason="needs root and `ip`")
def test_nodes_that_come_and_go_and_hang_and_are_cut_off_change_no_token(tiny_model: Path, tmp_path: Path) -> None:
    findings = tmp_path / "chaos.json"
    size = ["--nodes", "3", "--workers", "4", "--slots", "4", "--jobs", "100", "--tokens", "1000", "--kills", "11"]
    where = ["--model", str(tiny_model), "--run", str(tmp_path / "runs"), "--json", str(findings)]
    report = check(chaos(*size, *where), findings, KINDS, num_kills=11)
    assert len(report["jobs"]) == 100


def test_a_plan_has_every_kind_equally_often_and_comes_from_its_seed() -> None:
    plan = plan_kills(27, KINDS, 36_000, Random(1))
    counts = {kind: sum(kill.kind == kind for kill in plan) for kind in KINDS}
    assert sorted(counts.values()) == [2] * 6 + [3] * 5
    due = [kill.num_tokens for kill in plan]
    assert due == sorted(due)
    assert 0 < due[0] < due[-1] < 36_000
    assert plan == plan_kills(27, KINDS, 36_000, Random(1))
    assert plan != plan_kills(27, KINDS, 36_000, Random(2))


def test_kinds_of_kills_are_those_asked_for_or_all_that_the_cluster_allows() -> None:
    ways = dict.fromkeys(KINDS[:2], lambda workers: None)
    assert kinds_of((), ways) == ["worker", "raylet", "driver", "hangup", "rival"]
    assert kinds_of(("driver", "worker"), ways) == ["worker", "driver"]
    with pytest.raises(ChaosError, match=r"--kind cut: expected one of: worker, raylet, driver, hangup, rival"):
        kinds_of(("driver", "cut"), ways)


def test_jobs_are_made_long_enough_for_all_kills() -> None:
    options = ChaosOptions(4, 1000, 6, 0, 2, 2, "embedded", 128, "runs")
    assert long_enough(options, 60.0) == 1000
    assert long_enough(options, 3.0) == 4000
    assert long_enough(options, 0.0) == MOST_TOKENS
    assert long_enough(replace(options, num_kills=0), 0.0) == 1000


def write_output(folder: Path, tokens: dict[str, str | None], repeated: int = 1) -> RunOutput:
    """Write stand-ins for tokens; None for a failed job."""
    run = Run.planned(str(folder), MANIFEST).made()
    lines = []
    for custom_id, text in tokens.items():
        choice = {"text": text, "token_ids_sha256": f"hash of {text}", "finish_reason": "length"}
        resume = {"kind": "kv", "num_recovered_tokens": 5}
        metrics: dict[str, Any] = {"num_recomputed_tokens": 3, "attempts": [{"resume": None}, {"resume": resume}]}
        body = {"choices": [choice], "usage": {"completion_tokens": 10}, "metrics": metrics}
        response = None if text is None else {"body": body}
        lines.append(json.dumps({"custom_id": custom_id, "response": response}) + "\n")
    run.store.write("output.jsonl", "".join(lines * repeated).encode())
    return RunOutput(run)


def report_of(undisturbed: RunOutput, disturbed: RunOutput) -> ChaosReport:
    return ChaosReport(
        seed=1,
        jobs=compare(["a", "b"], undisturbed, disturbed),
        num_tokens=disturbed.num_tokens(),
        num_planned_kills=2,
        kills=(Kill("worker", "w1", 5, 1.0), Kill("driver", "process 7", 9, 2.0)),
        num_recomputed_tokens=disturbed.num_recomputed_tokens(),
        tokens_per_checkpoint=4,
        resumes=disturbed.resumes(),
        undisturbed_seconds=10.0,
        disturbed_seconds=13.5,
    )


def test_the_report_says_what_was_lost(tmp_path: Path) -> None:
    calm = write_output(tmp_path / "calm", {"a": "x", "b": "y"})
    same = report_of(calm, write_output(tmp_path / "same", {"a": "x", "b": "y"}))
    assert same.has_passed
    assert (same.num_recomputed_tokens, same.max_recomputed_tokens, same.resumes) == (6, 8, {"kv": 2})
    assert same.lines()[0].startswith("outputs identical: yes (SHA-256 of 2 of 2 jobs")
    assert "kills survived: 2 of 2 (1 worker, 1 driver)" in same.lines()
    assert "3.5 s lost" in same.lines()[-1]


@pytest.mark.parametrize(
    ("tokens", "repeated", "missing", "duplicates"),
    [
        ({"a": "x", "b": "z"}, 1, [], []),
        ({"a": "x"}, 1, ["b"], []),
        ({"a": "x", "b": None}, 1, ["b"], []),
        ({"a": "x", "b": "y"}, 2, [], ["a", "b"]),
    ],
)
def test_another_token_a_missing_job_and_a_duplicate_do_not_pass(
    tokens: dict[str, str | None], repeated: int, missing: list[str], duplicates: list[str], tmp_path: Path
) -> None:
    calm = write_output(tmp_path / "calm", {"a": "x", "b": "y"})
    report = report_of(calm, write_output(tmp_path / "other", tokens, repeated))
    assert not report.is_identical
    assert not report.has_passed
    assert (report.missing, report.duplicates) == (missing, duplicates)
    assert "outputs identical: NO" in report.lines()[0]


def test_kills_that_were_not_done_do_not_pass(tmp_path: Path) -> None:
    calm = write_output(tmp_path / "calm", {"a": "x", "b": "y"})
    report = report_of(calm, calm).model_copy(update={"num_planned_kills": 3})
    assert report.is_identical
    assert not report.has_passed


def test_a_used_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "kept").touch()
    process = chaos("--run", str(tmp_path))
    assert process.returncode == 2
    assert process.stderr.count("\n") == 1
    assert f"{tmp_path} is not empty: expected a new folder" in process.stderr
