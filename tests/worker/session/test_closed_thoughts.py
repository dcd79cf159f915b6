"""A thought that would end the text is closed, and the answer follows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from swiftbatch.jobs.checkpoints.kept_logs import KeptLogs
from swiftbatch.jobs.job import JobRecord
from swiftbatch.jobs.run.run import Run
from swiftbatch.worker.model.model_files import eos_token_ids_of, locate_model
from tests.scheduler.runs.extension_parts import extend
from tests.worker.session.session_parts import claimed, digest, make_run, run_to_end, session, step_one_by_one, until
from tests.worker.session.test_thinking import ENGINES, MARKERS, chat, done, end_of, model

__all__ = ["model"]  # a fixture
NUM_TOKENS = 90


def asking(model: Path, thinking_end: str | None, **drawn: Any) -> JobRecord:
    """Make a chat whose thought soon ends by an end token."""
    [eos] = eos_token_ids_of(locate_model(str(model)))
    said = {"thinking_token_budget": None, "ignore_eos": False, "logit_bias": {str(eos): 2.0}, "seed": 1}
    return chat("fox", NUM_TOKENS, **said | {"thinking_end": thinking_end} | drawn)


def message_of(found: dict[str, Any]) -> dict[str, str]:
    message: dict[str, str] = found["choices"][0]["message"]
    return message


@pytest.fixture
def thought(tmp_path: Path, model: Path) -> dict[str, Any]:
    found = done(make_run(tmp_path / "stop"), model, asking(model, "stop"), engine="autoregressive")
    assert (found["choices"][0]["finish_reason"], message_of(found)["content"]) == ("stop", "")
    return found


@pytest.mark.sample(3)
@pytest.mark.parametrize("engine", ENGINES)
def test_the_answer_follows_where_the_text_would_end(
    run: Run, tmp_path: Path, model: Path, thought: dict[str, Any], engine: str
) -> None:
    job = asking(model, "close")
    found = done(run, model, job, engine=engine)
    end, _ = end_of(model)
    assert message_of(found)["reasoning_content"] == message_of(thought)["reasoning_content"]
    assert message_of(found)["content"]
    num_thought = thought["usage"]["completion_tokens"] - 1  # the last one has ended it
    assert found["usage"]["completion_tokens"] > num_thought + len(end)
    other = make_run(tmp_path / "plain")
    done(other, model, job, engine="autoregressive")
    assert digest(run, job) == digest(other, job)


@pytest.mark.sample(2)
@pytest.mark.parametrize("kind", ["state", "tokens"])
def test_a_closed_thought_goes_on_in_another_worker(
    tmp_path: Path, model: Path, thought: dict[str, Any], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    step_one_by_one(monkeypatch)
    job, undisturbed = asking(model, "close"), make_run(tmp_path / "undisturbed")
    done(undisturbed, model, job, engine="autoregressive")
    num_thought = thought["usage"]["completion_tokens"] - 1
    for number, num_tokens in enumerate((num_thought, num_thought + 1, num_thought + len(end_of(model)[0]) + 1)):
        disturbed = make_run(tmp_path / f"disturbed-{number}")
        worker = session(disturbed, model, engine="token-recycling", checkpoint=kind, thinking_markers=MARKERS)
        until(worker, job, num_tokens, claimed(disturbed, job))
        worker.drain(20.0)
        run_to_end(disturbed, model, job, engine="suffix", checkpoint=kind, thinking_markers=MARKERS)
        assert digest(disturbed, job) == digest(undisturbed, job)


def test_a_loop_in_a_thought_closes_it_and_one_in_the_answer_is_the_end(run: Run, model: Path) -> None:
    loops = {"max_pattern_size": 1, "min_count": 4, "action": "close"}
    forever = {"temperature": 0.0, "logit_bias": {"77": 100.0}, "repetition_penalty": 1.0}
    found = done(run, model, asking(model, None, repetition_detection=loops, **forever), engine="suffix")
    end, _ = end_of(model)
    assert found["choices"][0]["finish_reason"] == "repetition"
    assert found["usage"]["completion_tokens"] == 4 + len(end) + 4
    assert found["usage"]["completion_tokens_details"] == {"reasoning_tokens": 4}


def test_a_thought_without_room_for_its_end_stays_open(run: Run, model: Path, thought: dict[str, Any]) -> None:
    num_tokens = thought["usage"]["completion_tokens"] - 1 + len(end_of(model)[0])
    job = asking(model, "close", max_tokens=num_tokens)
    assert done(run, model, job, engine="suffix")["choices"] == thought["choices"]
    assert KeptLogs.of(run).sizes().keys() == {job.job_id}


@pytest.mark.parametrize("reason", ["stop", "repetition"])
def test_a_thought_that_had_no_room_for_its_end_is_closed_when_its_job_is_extended(
    run: Run, tmp_path: Path, model: Path, thought: dict[str, Any], reason: str
) -> None:
    loops = {"max_pattern_size": 1, "min_count": 4, "action": "close"}
    forever = {"temperature": 0.0, "logit_bias": {"77": 100.0}, "repetition_penalty": 1.0}
    drawn = {"repetition_detection": loops, **forever} if reason == "repetition" else {}
    num_thought = 4 if drawn else thought["usage"]["completion_tokens"] - 1
    longest, single = num_thought + len(end_of(model)[0]) + 9, make_run(tmp_path / "single")
    short, wide = (asking(model, "close", max_tokens=most, **drawn) for most in (num_thought + 2, longest))
    run.add_jobs([short])
    assert done(run, model, short, engine="suffix")["choices"][0]["finish_reason"] == reason
    for most in (num_thought + 3, longest):  # the first of them also lacks room
        [longer] = extend(run, model, most).records
        run_to_end(run, model, longer, engine="suffix", thinking_markers=MARKERS)
    done(single, model, wide, engine="autoregressive")
    assert digest(run, longer) == digest(single, wide)
