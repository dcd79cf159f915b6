from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from swiftbatch.jobs.input.rejects import Reject
from swiftbatch.jobs.run.output_line import error_line
from swiftbatch.jobs.run.run import Run
from swiftbatch.jobs.run.run_records import RunError
from swiftbatch.scheduler.driver.attempt_numbers import Attempts
from swiftbatch.scheduler.driver.queued_job import Strikes
from swiftbatch.scheduler.driver.run_lease import RunLease
from swiftbatch.scheduler.runs.launch import Outcome
from swiftbatch.worker.config import Computation
from swiftbatch.worker.drafters.catalogue import ENGINES, PAPER_ENGINES
from swiftbatch.worker.exactness.doctor import diagnose
from swiftbatch.worker.model.model_files import locate_model
from swiftbatch.worker.text.tokenizer import TextCodec
from tests import ROOT
from tests.jobs.run.run_parts import MANIFEST
from tests.readme.command_lines import table
from tests.scheduler.commands.command_parts import finish, invoke, job, refusal, write_jobs
from tests.scheduler.commands.submit_parts import submit_file


def test_bad_job_files_are_refused_in_one_line(tmp_path: Path, tiny_model: Path) -> None:
    run, model = str(tmp_path / "run"), str(tiny_model)
    empty = write_jobs(tmp_path / "empty.jsonl")
    assert "holds no jobs" in refusal("submit", empty, "--run", run, "--model", model)
    assert "Is a directory" in refusal("submit", str(tmp_path), "--run", run, "--model", model)
    assert "No such file" in refusal("submit", str(tmp_path / "absent"), "--run", run, "--model", model)
    assert not (tmp_path / "run").exists()


def test_an_unwritable_run_folder_is_refused_in_one_line(tmp_path: Path, tiny_model: Path, jobs_file: str) -> None:
    for place in (f"{jobs_file}/run", "/proc/run"):
        assert place in refusal("submit", jobs_file, "--run", place, "--model", str(tiny_model))
    assert "expected a path" in refusal("submit", jobs_file, "--run", "ftp://host/run", "--model", str(tiny_model))


def test_a_default_folder_that_cannot_be_written_names_the_option_that_chooses_another(
    tmp_path: Path, tiny_model: Path
) -> None:
    jobs, drivers = write_jobs(tmp_path / "jobs.jsonl", job("fox")), tmp_path / "jobs.run/drivers"
    drivers.parent.mkdir()
    drivers.touch()
    assert refusal("submit", jobs, "--model", str(tiny_model)).endswith("; --run names another folder")
    assert "--run" not in refusal("submit", jobs, "--model", str(tiny_model), "--run", str(drivers.parent))


HINT = "nothing is lost, go on with: swiftbatch resume"


@pytest.mark.parametrize(
    ("error", "hint"),
    [
        (KeyboardInterrupt(), "nothing is lost, go on with the same command"),
        (RuntimeError("Error calling __set_name__"), "nothing is lost, go on with the same command"),
        (KeyboardInterrupt(HINT), HINT),
    ],
)
def test_an_interruption_of_submit_names_the_next_step(
    tmp_path: Path, jobs_file: str, monkeypatch: pytest.MonkeyPatch, error: BaseException, hint: str
) -> None:
    def interrupted(*_: object) -> None:
        raise error from KeyboardInterrupt()  # as Python does for a class

    monkeypatch.setattr("swiftbatch.scheduler.runs.submission.kept_or_new_manifest", interrupted)
    result = invoke("submit", jobs_file, "--run", str(tmp_path / "run"))
    assert (result.exit_code, result.stderr.strip()) == (130, f"interrupted; {hint}")


def test_a_job_file_in_place_of_a_run_is_told_with_its_run(tmp_path: Path) -> None:
    jobs, run = write_jobs(tmp_path / "jobs.jsonl", job("fox")), str(tmp_path / "jobs.run")
    for command in (["resume"], ["status"], ["submit", jobs, "--run"]):
        assert f"is a file, expected a run's folder; `swiftbatch submit {jobs}` makes" in refusal(*command, jobs)
    Run.planned(run, MANIFEST).made()
    assert refusal("resume", jobs).endswith(f"{jobs} is a file, expected a run's folder; its run is {run}")


def test_a_job_file_whose_name_begins_with_a_dash_is_told_how_to_name_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert refusal("submit", "-q.jsonl").endswith("No such option '-q'.")
    write_jobs(tmp_path / "-q.jsonl", job("fox"))
    assert refusal("submit", "-q.jsonl").endswith("No such option '-q'; name the file as ./-q.jsonl")


def test_unknown_engine_names_the_known_ones(tmp_path: Path, jobs_file: str) -> None:
    line = refusal("submit", jobs_file, "--run", str(tmp_path / "run"), "--engine", "warp")
    assert "warp" in line
    assert all(name in line for name in ENGINES)


def test_help_and_the_pages_say_what_each_engine_drafts_from() -> None:
    page = invoke("submit", "--help").output
    assert len(ENGINES) <= 8
    for name, entry in (ENGINES | PAPER_ENGINES).items():
        assert f"    {name:<21} {entry.drafts_from}\n" in page
    pages = [path.read_text(encoding="utf-8") for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))]
    [rows] = [table(text, "engine") for text in pages if "\n| engine |" in text]
    assert [row[0].split("`")[1] for row in rows] == list(ENGINES)


def test_a_run_that_was_made_with_a_variant_says_how_it_goes_on(
    tmp_path: Path, tiny_model: Path, jobs_file: str
) -> None:
    place, variant = str(tmp_path / "run"), "token-recycling-static"  # a choice of earlier versions of `submit`
    submit_file(jobs_file, place, model=str(tiny_model), engine="suffix")
    manifest = tmp_path / "run" / "run.json"
    manifest.write_text(manifest.read_text().replace('"suffix"', f'"{variant}"'))
    for line in (refusal("resume", place), refusal("submit", jobs_file, "--run", place)):
        assert f"unknown engine '{variant}'; expected one of: auto, autoregressive, " in line
        assert "`swiftbatch resume RUN --engine auto`" in line
    assert variant in invoke("status", place).output


def test_an_unknown_model_is_refused_in_one_line(tmp_path: Path, jobs_file: str) -> None:
    for model in ("./absent", "nobody/nothing", "absent"):
        assert model in refusal("submit", jobs_file, "--run", str(tmp_path / "run"), "--model", model)
    assert "config.json" in refusal("submit", jobs_file, "--run", str(tmp_path / "run"), "--model", str(tmp_path))
    assert not (tmp_path / "run").exists()


def test_a_damaged_manifest_is_not_overwritten(run: Run, jobs_file: str, tiny_model: Path) -> None:
    manifest = Path(run.store.uri) / "run.json"
    manifest.write_text("{torn")
    assert "run.json" in refusal("submit", jobs_file, "--run", run.store.uri, "--model", str(tiny_model))
    assert manifest.read_text() == "{torn"


def test_bad_lines_are_shown_and_kept_and_stop_no_other_job(tmp_path: Path, tiny_model: Path) -> None:
    path = write_jobs(
        tmp_path / "jobs.jsonl",
        job("good"),
        "{broken",
        job("too-long", max_tokens=5000),
        job("good"),
        job("odd", colour="red"),
        job("../../etc/x"),
    )
    submission = submit_file(path, str(tmp_path / "run"), model=str(tiny_model))
    assert [record.job.custom_id for record in submission.run.jobs()] == ["good", "../../etc/x"]
    rejects = submission.run.rejects()
    assert [reject.line_number for reject in rejects] == [2, 3, 4, 5]
    num_prompt_tokens = submission.jobs.entry(0).num_prompt_tokens
    assert f"prompt ({num_prompt_tokens} tokens) and max_tokens (5000)" in rejects[1].reason
    assert f"need {num_prompt_tokens + 5000} positions, expected at most the model's 4096" in rejects[1].reason


def test_a_job_that_names_tokens_that_the_model_does_not_have_is_rejected(tmp_path: Path, tiny_model: Path) -> None:
    vocab_size = locate_model(str(tiny_model)).vocab_size
    path = write_jobs(
        tmp_path / "jobs.jsonl",
        job("good", logit_bias={str(vocab_size - 1): 1}, stop_token_ids=[vocab_size - 1], bad_words=["fox"]),
        job("bias", logit_bias={"3": 1, str(vocab_size): 1}),
        job("stop", stop_token_ids=[3, vocab_size + 7]),
    )
    submission = submit_file(path, str(tmp_path / "run"), model=str(tiny_model))
    assert list(submission.jobs.custom_ids()) == ["good"]
    assert [(reject.line_number, reject.reason) for reject in submission.rejects] == [
        (2, f"field 'logit_bias': found token {vocab_size}, the model's are 0 to {vocab_size - 1}"),
        (3, f"field 'stop_token_ids': found token {vocab_size + 7}, the model's are 0 to {vocab_size - 1}"),
    ]


def test_a_job_that_fills_the_positions_to_the_last_is_taken(tmp_path: Path, tiny_model: Path) -> None:
    num_prompt_tokens = len(TextCodec(locate_model(str(tiny_model))).encode("the quick brown fox"))
    path = write_jobs(
        tmp_path / "jobs.jsonl", job("fits", 4096 - num_prompt_tokens), job("not", 4097 - num_prompt_tokens)
    )
    submission = submit_file(path, str(tmp_path / "run"), model=str(tiny_model))
    assert list(submission.jobs.custom_ids()) == ["fits"]
    assert [reject.custom_id for reject in submission.rejects] == ["not"]


def test_a_file_of_rejects_only_ends_with_exit_code_1_and_their_reasons(tmp_path: Path, tiny_model: Path) -> None:
    path = write_jobs(tmp_path / "jobs.jsonl", *(job(f"j{i}", max_tokens=-2) for i in range(8)))
    result = invoke("submit", path, "--run", str(tmp_path / "run"), "--model", str(tiny_model))
    assert result.exit_code == 1
    assert "rejected line 1 (j0): field 'max_tokens': found -2" in result.stderr
    assert "and 3 more rejected lines" in result.stderr
    assert len(Run.open(str(tmp_path / "run")).rejects()) == 8
    assert "run finished; jobs: none" in result.stdout
    status = invoke("status", str(tmp_path / "run"))
    assert "finished; jobs: none" in status.stdout
    assert "rejected: 8 lines" in status.stdout
    assert "resume" not in status.stdout


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    "name",
    [
        *("chat_template.jinja", "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt"),
        *("tokenizer.model", "additional_chat_templates/tools.jinja", "tokenizer_config.json", "config.json"),
    ],
)
def test_a_changed_file_of_the_model_s_text_is_another_model(
    tmp_path: Path, tiny_model: Path, jobs_file: str, name: str
) -> None:
    model, place = tmp_path / "model", str(tmp_path / "run")
    shutil.copytree(tiny_model, model)
    (model / name).parent.mkdir(exist_ok=True)
    if not (model / name).exists():
        (model / name).write_text("{}")
    submit_file(jobs_file, place, model=str(model))
    parts_fit = locate_model(str(model)).fingerprint
    before = (model / name).read_text()
    (model / name).write_text(f"{before} ")
    for command in (["resume", place], ["submit", jobs_file, "--run", place]):
        line = refusal(*command)
        assert f"the run at {place} was made with model {model}" in line
        assert "use the same one, or another run folder" in line
    if name not in ("tokenizer_config.json", "config.json"):
        assert locate_model(str(model)).fingerprint == parts_fit  # drafts do not depend on it
    (model / name).write_text(before)
    assert len(submit_file(jobs_file, place).jobs)


def test_strict_refuses_the_whole_file_and_makes_no_run(tmp_path: Path, tiny_model: Path) -> None:
    path = write_jobs(tmp_path / "jobs.jsonl", job("good"), job("bad", max_tokens=0))
    line = refusal("submit", path, "--run", str(tmp_path / "run"), "--model", str(tiny_model), "--strict")
    assert "line 2" in line
    assert "max_tokens" in line
    assert not (tmp_path / "run").exists()


def test_weights_that_were_cut_off_are_refused_in_one_line_before_anything_is_run(
    tmp_path: Path, tiny_model: Path, jobs_file: str
) -> None:
    model = shutil.copytree(tiny_model, tmp_path / "model")
    weights = model / "model.safetensors"
    os.truncate(weights, weights.stat().st_size // 2)
    for args in (["doctor"], ["submit", jobs_file, "--run", str(tmp_path / "run")]):
        line = refusal(*args, "--model", str(model))
        assert f"{weights} is damaged or cut off" in line
    assert not (tmp_path / "run").exists()


def test_a_new_run_records_what_doctor_found_here(
    tmp_path: Path, tiny_model: Path, jobs_file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def exactness(name: str, num_threads: int) -> str:
        said = {"model": str(tiny_model), "dtype": "float32", "num_threads": num_threads}
        return submit_file(jobs_file, str(tmp_path / name), **said).run.manifest.exactness

    assert exactness("before", 1) == "not probed"
    diagnosis = diagnose(Computation(model=str(tiny_model), dtype="float32", num_threads=1), num_rows=40)
    assert exactness("after", 1) == diagnosis.verdict
    assert exactness("other", 2) == "not probed"


def test_what_belongs_to_a_run_cannot_change_under_it(run: Run, jobs_file: str, tiny_model: Path) -> None:
    place, model = run.store.uri, str(tiny_model)
    finish(run, "a", "text")
    assert "was made with seed 0, found 5" in refusal(
        "submit", jobs_file, "--run", place, "--model", model, "--seed", "5"
    )
    assert "model" in refusal("submit", jobs_file, "--run", place, "--model", "embedded")
    assert "dtype" in refusal("submit", jobs_file, "--run", place, "--dtype", "float32")
    assert "was made with linear cublas, found triton" in refusal(
        "submit", jobs_file, "--run", place, "--linear", "triton"
    )
    again = submit_file(jobs_file, place)
    assert again.run.manifest == run.manifest
    assert again.run.jobs() == run.jobs()


def test_a_changed_job_under_a_known_custom_id_is_rejected(run: Run, tmp_path: Path) -> None:
    path = write_jobs(tmp_path / "more.jsonl", job("a", max_tokens=21), job("b"), job("d"))
    submission = submit_file(path, run.store.uri)
    assert [record.job.custom_id for record in submission.run.jobs()] == ["a", "b", "c", "d"]
    assert [(reject.line_number, reject.custom_id) for reject in submission.rejects] == [(1, "a")]


def test_a_model_folder_is_found_by_workers_in_other_folders(
    tmp_path: Path, tiny_model: Path, jobs_file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tiny_model.parent)
    submission = submit_file(jobs_file, str(tmp_path / "run"), model=tiny_model.name)
    assert submission.run.manifest.model == str(tiny_model)
    assert submit_file(jobs_file, str(tmp_path / "run"), model=tiny_model.name).rejects == []


@pytest.mark.parametrize("address", ["127.0.0.1:1", "nowhere", "host:many", "no.such.host.invalid:6379"])
def test_an_unreachable_cluster_is_refused_in_one_line(address: str, run: Run) -> None:
    assert address in refusal("resume", run.store.uri, "--address", address)


@pytest.mark.parametrize("options", [("--address", "127.0.0.1:1"), ("--address", "nowhere"), ("--device", "cuda")])
def test_a_submit_that_cannot_start_leaves_nothing_behind(
    tmp_path: Path, jobs_file: str, options: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("swiftbatch.scheduler.runs.launch.has_cuda", lambda: False)
    assert options[-1] in refusal("submit", jobs_file, "--run", str(tmp_path / "run"), *options)
    assert not (tmp_path / "run").exists()


def test_settings_of_a_run_change_until_a_job_has_run(tmp_path: Path, tiny_model: Path, jobs_file: str) -> None:
    place, model = str(tmp_path / "run"), str(tiny_model)
    first = submit_file(jobs_file, place, model=model, num_threads=1, dtype="bfloat16", seed=5)
    changed = submit_file(jobs_file, place, model=model, num_threads=2, dtype="float32")
    assert Run.open(place).manifest == changed.run.manifest
    assert (changed.run.manifest.num_threads, changed.run.manifest.dtype) == (2, "float32")
    kept = {"run_id", "created", "seed", "clock"}
    assert changed.run.manifest.model_dump(include=kept) == first.run.manifest.model_dump(include=kept)
    assert changed.run.jobs() == first.run.jobs()
    with pytest.raises(RunError, match="was made with seed 5, found 6"):  # the stored jobs have it
        submit_file(jobs_file, place, model=model, seed=6)
    finish(changed.run, "a", "text")
    with pytest.raises(RunError, match="was made with num_threads 2, found 1"):
        submit_file(jobs_file, place, model=model, num_threads=1)


def test_resume_finishes_a_run_with_rejected_lines_with_the_exit_code_of_submit(run: Run) -> None:
    for name in ("a", "b", "c"):
        finish(run, name, "text")
    assert invoke("resume", run.store.uri).exit_code == 0
    run.write_rejects([Reject(4, None, "not JSON")])
    assert invoke("resume", run.store.uri).exit_code == 1


def test_resume_with_retry_failed_gives_jobs_all_their_attempts_where_a_killed_driver_did_not(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed, [failed, *_] = Attempts(run.store, 1, {}), run.jobs()
    killed.begin(failed.job_id)
    killed.note_strikes(failed.job_id, Strikes(4, 10))
    killed.end()
    run.write_error(failed.job_id, error_line(failed, "attempts_failed", "given up"))
    found: list[Strikes | None] = []

    def launched(hold: RunLease, *_: object) -> Outcome:
        found.append(Attempts.read(run.store, hold.epoch.number).strikes(failed.job_id))
        return Outcome("finished", {"finished": 3}, 0)

    monkeypatch.setattr("swiftbatch.scheduler.commands.resume.launch_shown", launched)
    for options, strikes in (((), Strikes(4, 10)), (("--retry-failed",), None)):
        assert invoke("resume", run.store.uri, *options).exit_code == 0
        assert found.pop() == strikes


@pytest.mark.parametrize("said", ["tomorrow", "2026-11-28", "2026-11-28T00:00:00", "10:00+01:00", ""])
def test_a_clock_that_is_no_time_with_an_offset_is_refused_in_one_line(
    tmp_path: Path, jobs_file: str, said: str
) -> None:
    result = invoke("submit", jobs_file, "--run", str(tmp_path / "run"), "--clock", said)
    expected = "expected a time with its offset, as 2026-11-28T00:00:00+01:00"
    assert (result.exit_code, result.stderr.splitlines()[-1]) == (
        2,
        f"swiftbatch: Invalid value for '--clock': found {said!r}, {expected}",
    )


@pytest.mark.parametrize(
    "command", [["submit", "JOBS"], ["serve", "--runs", "RUNS"], ["nightly", "INBOX", "--runs", "RUNS"]]
)
def test_a_wrong_engine_option_is_refused_before_anything_is_made(
    tmp_path: Path, jobs_file: str, command: list[str]
) -> None:
    (tmp_path / "inbox").mkdir()
    places = {"JOBS": jobs_file, "INBOX": str(tmp_path / "inbox"), "RUNS": str(tmp_path / "runs")}
    args = [places.get(word, word) for word in command]
    for engine, message in (("griffin", "'breadth': found"), ("suffix", "engine suffix has no options")):
        assert message in refusal(*args, "--engine", engine, "--engine-option", "breadth=0")
    assert not (tmp_path / "runs").exists()
