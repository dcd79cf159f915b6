from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from swiftbatch.jobs.checkpoints.kept_logs import KeptLogs
from swiftbatch.jobs.job import JobRecord
from swiftbatch.jobs.run.run import Run
from swiftbatch.jobs.run.run_records import RunError
from swiftbatch.jobs.shared_prompts import shared_prompts
from swiftbatch.scheduler.runs.forking import ForkError, forks
from swiftbatch.scheduler.runs.verification import verify_run
from swiftbatch.worker.model.model_files import locate_model
from swiftbatch.worker.text.tokenizer import TextCodec
from tests.scheduler.runs.verification_parts import finished
from tests.worker.session.session_parts import LOOPS_OF_80, claimed, record, session, to_the_end


@pytest.fixture
def run(tmp_path: Path, tiny_model: Path) -> Run:
    """A run with a finished job of 300 tokens."""
    return finished(tmp_path / "run", tiny_model, record("a", 300, {"logprobs": 1}))


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
    assert made == _forks(run)


def test_the_forks_share_what_a_worker_reads(run: Run) -> None:
    [one, other] = shared_prompts([each.prompt_keys for each in _forks(run, num_seeds=2)])
    assert one == other
    assert one.num_tokens == 64  # of 105


def test_forks_draw_what_verification_draws_again(run: Run, tiny_model: Path) -> None:
    made = _forks(run, text=" the quick")
    run.add_jobs(made)
    to_the_end(session(run, tiny_model), *(claimed(run, each) for each in made))
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
    to_the_end(session(run, tiny_model), claimed(run, made))
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
    for name in ("x" * 511, "two\nlines", ""):
        with pytest.raises(ForkError, match=r"--name: found .* expected a name of printable characters"):
            _forks(run, name=name if name else "\t")
    with pytest.raises(RunError, match="no job 'b'"):
        forks(run, "b", 0, 1, 1, "", "b", locate_model(run.manifest.model))
    rewinding = finished(tmp_path / "rewinding", tiny_model, record("a", 100, LOOPS_OF_80))
    with pytest.raises(ForkError, match="rewinds loops"):
        _forks(rewinding, num_kept=10)


def test_a_job_whose_tokens_are_gone_is_refused(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    [parent] = run.jobs()
    KeptLogs.of(run).delete(parent.job_id)
    monkeypatch.setattr(TextCodec, "encode", lambda *_, **__: [5])  # another split than the text was drawn with
    with pytest.raises(ForkError, match="its tokens are not kept"):
        _forks(run)
