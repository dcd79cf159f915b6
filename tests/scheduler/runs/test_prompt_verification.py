"""Verification of the log-probabilities of prompts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from swiftbatch.jobs.run.run import Run
from swiftbatch.scheduler.runs.scoring import scored_results
from swiftbatch.scheduler.runs.verification import VerificationReport, verify_run
from tests.scheduler.commands.command_parts import invoke
from tests.scheduler.runs.verification_parts import finished, rewritten
from tests.worker.session.session_parts import LOOPS_OF_80, record

CHAT = {"url": "/v1/chat/completions", "prompt": None, "messages": ({"role": "user", "content": "the quick"},)}
PROMPT = "the quick brown fox"
BOTH = {"echo": True, "logprobs": 2, "prompt_logprobs": 3}
Change = Callable[[dict[str, Any]], object]


def _verified(run: Run) -> VerificationReport:
    return verify_run(run, 1.0, 0)


def test_honest_log_probabilities_of_prompts_are_exact(tmp_path: Path, tiny_model: Path) -> None:
    jobs = [
        record("echo", 300, {"echo": True, "logprobs": 2}, prompt=PROMPT),
        record("both", 40, BOTH, prompt=PROMPT),
        record("alone", 1, {**BOTH, "echo": "alone"}, prompt=PROMPT),
        record("ranks", 40, {"prompt_logprobs": 0}, prompt=PROMPT),
        record("chat", 40, {"prompt_logprobs": 2, "logprobs": 1}, **CHAT),
        record("cut", 40, {**BOTH, "truncate_prompt_tokens": 2}, prompt=PROMPT),
        record("one", 1, {**BOTH, "echo": "alone", "truncate_prompt_tokens": 1}, prompt=PROMPT),
        record("loops", 300, {**LOOPS_OF_80, **BOTH}),
    ]
    found = _verified(finished(tmp_path / "run", tiny_model, *jobs))
    assert (found.verdict, found.findings, found.num_jobs) == ("exact", (), len(jobs))


def _shift_echo(choice: dict[str, Any]) -> None:
    choice["logprobs"]["token_logprobs"][2] -= 0.5


def _shift_ranked(choice: dict[str, Any]) -> None:
    list(choice["prompt_logprobs"][2].values())[1]["logprob"] -= 0.5


@pytest.mark.parametrize("echo", [True, "alone"])
@pytest.mark.parametrize("change", [_shift_echo, _shift_ranked])
def test_a_changed_log_probability_of_a_prompt_is_found(
    tmp_path: Path, tiny_model: Path, change: Change, echo: bool | str
) -> None:
    job = record("a", 1 if echo == "alone" else 40, {**BOTH, "echo": echo}, prompt=PROMPT)
    run = rewritten(finished(tmp_path / "run", tiny_model, job), change)
    [finding] = _verified(run).findings
    assert (finding.what, finding.position) == ("prompt", 2)
    assert finding.margin == pytest.approx(0.5)
    assert (
        "job a: a log-probability of prompt token 3 is not this model's, by 0.5\n"
        in invoke("verify", run.store.uri).output
    )


def test_a_changed_log_probability_behind_an_echo_is_found_at_its_place(tmp_path: Path, tiny_model: Path) -> None:
    run = finished(tmp_path / "run", tiny_model, record("a", 40, BOTH, prompt=PROMPT))

    def change(choice: dict[str, Any]) -> None:
        choice["logprobs"]["token_logprobs"][-4] -= 0.5

    [finding] = _verified(rewritten(run, change)).findings
    assert (finding.what, finding.position) == ("logprobs", 36)


@pytest.mark.parametrize(
    "change",
    [
        lambda choice: choice.pop("prompt_logprobs"),
        lambda choice: choice["prompt_logprobs"].pop(),
        lambda choice: choice["prompt_logprobs"].__setitem__(0, {}),
        lambda choice: choice["prompt_logprobs"].__setitem__(2, {}),
        lambda choice: choice["prompt_logprobs"].__setitem__(2, None),
        lambda choice: next(iter(choice["prompt_logprobs"][2].values())).update(rank="x"),
        lambda choice: choice["logprobs"]["token_logprobs"].__setitem__(0, -1.0),
        lambda choice: choice["logprobs"]["text_offset"].__setitem__(1, 7),
    ],
)
def test_log_probabilities_of_a_prompt_of_another_form_are_found(
    tmp_path: Path, tiny_model: Path, change: Change
) -> None:
    run = finished(tmp_path / "run", tiny_model, record("a", 40, BOTH, prompt=PROMPT))
    found = _verified(rewritten(run, change)).findings
    assert [(each.what, each.margin) for each in found] == [("prompt", None)]


def test_log_probabilities_of_a_prompt_that_no_line_asked_for_are_found(tmp_path: Path, tiny_model: Path) -> None:
    run = finished(tmp_path / "run", tiny_model, record("a", 40, {}, prompt=PROMPT))
    [finding] = _verified(rewritten(run, lambda choice: choice.update(prompt_logprobs=[None]))).findings
    assert (finding.what, finding.position) == ("prompt", None)


@pytest.mark.parametrize("echo", [True, "alone"])
def test_log_probabilities_that_were_added_to_an_echo_are_compared(
    tmp_path: Path, tiny_model: Path, echo: bool | str
) -> None:
    job = record("a", 1 if echo == "alone" else 40, {"echo": echo}, prompt=PROMPT)
    run = finished(tmp_path / "run", tiny_model, job)
    [line] = scored_results(run, 3)
    added = line["response"]["body"]["choices"][0]["logprobs"]
    run = rewritten(run, lambda choice: choice.update(logprobs=added))
    assert _verified(run).verdict == "exact"
    added["token_logprobs"][1] -= 0.5
    [finding] = _verified(rewritten(run, lambda choice: choice.update(logprobs=added))).findings
    assert (finding.what, finding.position) == ("prompt", 1)
