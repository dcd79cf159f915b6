from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from swiftbatch.jobs.checkpoints.kept_logs import KeptLogs
from swiftbatch.jobs.job import JobRecord
from swiftbatch.jobs.run.output_line import num_completion_tokens
from swiftbatch.jobs.run.run import Run
from swiftbatch.jobs.run.run_records import RunError
from swiftbatch.jobs.shared_prompts import shared_prompts
from swiftbatch.scheduler.runs.forking import ForkError, forks
from swiftbatch.scheduler.runs.verification import verify_run
from swiftbatch.worker.model.model_files import locate_model
from swiftbatch.worker.text.tokenizer import TextCodec
from tests.scheduler.commands.command_parts import refusal
from tests.scheduler.runs.verification_parts import finished
from tests.worker.session.session_parts import LOOPS_OF_80, record, run_to_end


@pytest.fixture
def run(tmp_path: Path, tiny_model: Path) -> Run:
    """A run with a finished job of 300 tokens."""
    parent = replace(record("a", 300, {"logprobs": 1}), kept='{"metadata": {"k": "v"}}')
    return finished(tmp_path / "run", tiny_model, parent)


def _forks(run: Run, num_kept: int = 100, num_seeds: int = 3, text: str = "", name: str = "a@100") -> list[JobRecord]:
    return forks(run, "a", 0, num_kept, num_seeds, text, name, locate_model(run.manifest.model))


def test_forks_begin_with_the_job_s_tokens_and_have_seeds_of_their_own(run: Run) -> None:
    [parent] = run.jobs()
    made = _forks(run)
    kept = tuple(KeptLogs.of(run).read(parent.job_id).token_ids[:100].tolist())
    assert [each.custom_id for each in made] == ["a@100#1", "a@100#2", "a@100#3"]
    assert {each.job.begun_ids for each in made} == {kept}
    assert len({each.job.sampling.seed for each in (parent, *made)}) == 4
    assert {each.job.sampling.max_tokens for each in made} == {300}
    assert {each.kept for each in made} == {parent.kept} != {None}
    assert made == _forks(run)


def test_the_forks_share_what_a_worker_reads(run: Run) -> None:
    [one, other] = shared_prompts([each.prompt_keys for each in _forks(run, num_seeds=2)])
    assert one == other
    assert one.num_tokens == 64  # of 105


def test_forks_draw_what_verification_draws_again(run: Run, tiny_model: Path) -> None:
    made = _forks(run, text=" the quick")
    run.add_jobs(made)
    run_to_end(run, tiny_model, *made)
    again = Run.open(run.store.uri)
    found = verify_run(again, 1.0, 0)
    assert (found.verdict, found.num_jobs) == ("exact", 4)
    assert found.num_tokens == 300 + sum(300 - len(each.job.begun_ids or ()) for each in made)
    texts = [line["response"]["body"]["choices"][0]["text"] for line in again.joined_lines()]
    assert len(set(texts)) == 4
    beginnings = {text[: texts[1].index(" the quick") + 10] for text in texts[1:]}
    assert len(beginnings) == 1


def test_given_tokens_that_the_output_does_not_begin_with_are_found(run: Run, tmp_path: Path, tiny_model: Path) -> None:
    [made] = _forks(run, num_seeds=1)
    run.add_jobs([made])
    run_to_end(run, tiny_model, made)
    other = Run.planned(str(tmp_path / "other"), run.manifest).made()
    changed = (9, *(made.job.begun_ids or ())[1:])
    other.add_jobs([replace(made, job=made.job.model_copy(update={"begun_ids": changed}))])
    for folder in ("results", "tokens"):
        shutil.copytree(tmp_path / "run" / folder, tmp_path / "other" / folder)
    assert [each.what for each in verify_run(Run.open(other.store.uri), 1.0, 0).findings] == ["job", "log"]


def test_what_cannot_be_forked_is_refused_in_one_line(run: Run, tmp_path: Path, tiny_model: Path) -> None:
    with pytest.raises(ForkError, match="has 300 tokens, found --at 301: expected at most as many"):
        _forks(run, num_kept=301)
    with pytest.raises(ForkError, match="300 given tokens leave none to draw"):
        _forks(run, num_kept=300)
    run.add_jobs(_forks(run))
    with pytest.raises(ForkError, match="the run has another job 'a@100#1': expected another --name"):
        _forks(run, num_kept=99)
    for name in ("x" * 511, "two\nlines", "", "\t"):
        with pytest.raises(ForkError, match=r"--name: found .* expected a name of printable characters"):
            _forks(run, name=name)
    with pytest.raises(RunError, match="no job 'b'"):
        forks(run, "b", 0, 1, 1, "", "b", locate_model(run.manifest.model))
    rewinding = finished(tmp_path / "rewinding", tiny_model, record("a", 100, LOOPS_OF_80))
    with pytest.raises(ForkError, match="rewinds loops"):
        _forks(rewinding, num_kept=10)


SCHEMA = (
    '{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": false}'
)
FITS = '{"a": 5'


def test_a_wrong_engine_option_adds_no_fork(run: Run) -> None:
    num_jobs, line = len(run.job_ids()), refusal("fork", run.store.uri, "a", "--at", "3", "--engine-option", "x=1")
    assert "--engine-option x=1: engine suffix has no options" in line
    assert len(Run.open(run.store.uri).job_ids()) == num_jobs


@pytest.mark.parametrize(
    ("drawn", "fits", "breaks", "place"),
    [
        ({"structured_outputs": {"json": SCHEMA}}, FITS, '{"a": x', "character 7, 'x', breaks the structure"),
        ({"structured_outputs": {"json": SCHEMA}}, FITS, '{"a": 5}}', "character 9, '}', breaks the structure"),
        ({"structured_outputs": {"regex": "[a-z]{5,90}"}}, "thequick", "the quick", "character 4, ' ', breaks the"),
        ({"structured_outputs": {"choice": ["the quick fox", "so"]}}, "the q", "the z", "character 5, 'z', breaks"),
        ({"stop": ("zz", "qx")}, " the z", " the zz fox", r"character 7, 'z', ends the output \(stop\)"),
        ({"repetition_detection": {"max_pattern_size": 1, "min_count": 4}}, "q", "qqqqq", r"\(repetition\) of job 'a'"),
    ],
)
def test_a_given_text_that_breaks_or_ends_the_job_is_refused_with_its_character(
    tmp_path: Path, tiny_model: Path, drawn: dict[str, Any], fits: str, breaks: str, place: str
) -> None:
    run = finished(tmp_path / "run", tiny_model, record("a", 60, {"ignore_eos": False} | drawn))
    assert len(_forks(run, num_kept=0, text=fits)) == 3
    with pytest.raises(ForkError, match=f"^--replace: .*{place}.*; expected another text$"):
        _forks(run, num_kept=0, text=breaks)


def test_a_given_text_that_is_refused_may_break_a_kept_beginning(tmp_path: Path, tiny_model: Path) -> None:
    structure = {"structured_outputs": {"regex": "[a-z]{90,120}"}, "ignore_eos": False}
    run = finished(tmp_path / "run", tiny_model, record("a", 30, structure))
    assert len(_forks(run, num_kept=9, text="the")) == 3
    with pytest.raises(ForkError, match="character 3, '7', breaks the structure"):
        _forks(run, num_kept=9, text="th7")


def test_tokens_that_end_a_job_cannot_be_kept(tmp_path: Path, tiny_model: Path) -> None:
    stops = record(
        "a", 60, {"structured_outputs": {"regex": "[a-z]{5,9}"}, "ignore_eos": False, "return_token_ids": True}
    )
    run = finished(tmp_path / "run", tiny_model, stops)
    num_tokens = num_completion_tokens(next(run.joined_lines()))
    with pytest.raises(ForkError, match=rf"--at {num_tokens}: token {num_tokens} ends the output \(stop\) of job 'a'"):
        _forks(run, num_kept=num_tokens)
    assert len(_forks(run, num_kept=num_tokens - 1)) == 3


def test_a_given_text_behind_a_used_up_thought_is_refused(tmp_path: Path, tiny_model: Path) -> None:
    markers, budget = (" the", " lazy dog over it"), 8
    thinking = replace(
        record("a", 60, {"thinking_token_budget": budget, "return_token_ids": True}, prompt="fox so the"),
        last_marker="start",
    )
    run = finished(tmp_path / "run", tiny_model, thinking, thinking_markers=markers)
    run.manifest = run.manifest.model_copy(update={"thinking_markers": markers})
    assert len(_forks(run, num_kept=budget, text=" lazy dog over it quick")) == 3
    assert len(_forks(run, num_kept=budget - 1, text=" quick")) == 3
    with pytest.raises(ForkError, match=r"--replace: character \d, '.*', breaks the structure or thinking budget"):
        _forks(run, num_kept=budget, text=" quick")


def test_a_lenient_schema_is_followed_as_the_run_does(tmp_path: Path, tiny_model: Path) -> None:
    schema = SCHEMA[:-1] + ', "dependentSchemas": {}, "minProperties": 4, "patternProperties": {"x": {"if": {}}}}'
    run = finished(
        tmp_path / "run",
        tiny_model,
        record("a", 60, {"structured_outputs": {"json": schema}, "ignore_eos": False}),
        lenient_schemas=True,
    )
    run.manifest = run.manifest.model_copy(update={"lenient_schemas": True})
    assert len(_forks(run, num_kept=0, text=FITS)) == 3


def test_no_tokens_are_needed_to_keep_none(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swiftbatch.scheduler.runs.forking._tokens", None)
    assert [each.job.begun_ids for each in _forks(run, num_kept=0)] == [None] * 3


def test_a_job_whose_tokens_are_gone_is_refused(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    [parent] = run.jobs()
    KeptLogs.of(run).delete(parent.job_id)
    monkeypatch.setattr(TextCodec, "encode", lambda *_, **__: [5])  # another split than the text was drawn with
    with pytest.raises(ForkError, match="its tokens are not kept"):
        _forks(run)
