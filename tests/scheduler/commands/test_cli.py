"""The command line: help, speed of start, bad input, and the commands that read and cancel a run."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import click
import numpy as np
import pytest
from click.testing import CliRunner, Result
from pyarrow import parquet

from jobs.checkpoints.store import CheckpointStore
from jobs.run.results import success_line
from jobs.run.run import Run, WorkerStatus
from scheduler.cli import main
from scheduler.driver.backlog import count_jobs
from scheduler.driver.heartbeat import current_progress
from scheduler.runs.settings import Settings
from scheduler.runs.tailing import follow_text
from tests import ROOT
from tests.scheduler.commands.submit_parts import submit_file
from worker.config import EngineConfig
from worker.drafters.names import ENGINE_NAMES
from worker.exactness.doctor import diagnose
from worker.model.files import locate_model
from worker.model.text import TextCodec


def invoke(*args: str) -> Result:
    return CliRunner().invoke(main, list(args))


def refusal(*args: str) -> str:
    """The one line on stderr of a command that is refused with exit code 2."""
    result = invoke(*args)
    assert result.exit_code == 2, result.output
    assert isinstance(result.exception, SystemExit)
    assert result.stderr.count("\n") == 1, result.stderr
    return result.stderr.strip()


def walk(command: click.Command, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    yield path, command
    if isinstance(command, click.Group):
        for name, child in command.commands.items():
            yield from walk(child, (*path, name))


def write_jobs(path: Path, *jobs: dict[str, object] | str) -> str:
    lines = [job if isinstance(job, str) else json.dumps(job) for job in jobs]
    path.write_text("".join(f"{line}\n" for line in lines))
    return str(path)


def job(custom_id: str, max_tokens: int = 20, **fields: object) -> dict[str, object]:
    return {"custom_id": custom_id, "prompt": "the quick brown fox", "max_tokens": max_tokens, **fields}


@pytest.fixture
def jobs_file(tmp_path: Path) -> str:
    return write_jobs(tmp_path / "jobs.jsonl", job("a"), job("b"), job("c"))


@pytest.fixture
def run(tmp_path: Path, tiny_model: Path, jobs_file: str) -> Run:
    """A run with three jobs of which none has run."""
    return submit_file(jobs_file, str(tmp_path / "run"), Settings(model=str(tiny_model)), False).run


def finish(run: Run, custom_id: str, text: str) -> None:
    record = next(record for record in run.jobs() if record.job.custom_id == custom_id)
    token_ids = np.arange(5, dtype=np.uint32)
    metrics = {"num_drafts": 2}
    line = success_line(record, "run", text, "length", model="tiny", token_ids=token_ids, metrics=metrics)
    assert run.write_result(record.job_id, line)


COMMANDS = dict(walk(main, ("swiftbatch",)))


def test_all_commands_are_there() -> None:
    names = {" ".join(path[1:]) for path, command in COMMANDS.items() if not isinstance(command, click.Group)}
    runs = {"submit", "nightly", "status", "tail", "results", "report", "resume", "cancel"}
    ablations = {"bench ablation tokenswift", "bench ablation triforce", "bench ablation griffin"}
    benches = {"bench decode", "bench checkpoints", "bench long"} | ablations
    trainings = {"train target", "train tokenswift", "train draft", "train griffin"}
    assert names == runs | benches | trainings | {"doctor", "chaos"}


@pytest.mark.parametrize("path", COMMANDS, ids=" ".join)
def test_every_command_has_help_with_an_example(path: tuple[str, ...]) -> None:
    result = invoke(*path[1:], "--help")
    assert result.exit_code == 0
    example = result.output.partition("Example:\n")[2].strip().splitlines()[0]
    words = example.split()
    assert words[0] == "swiftbatch"
    command = COMMANDS[path]
    if isinstance(command, click.Group):
        return
    assert tuple(words[: len(path)]) == path
    command.make_parser(click.Context(command)).parse_args(words[len(path) :])  # its options exist


@pytest.mark.parametrize("args", [["--help"], ["submit", "--help"], ["status", "RUN"], ["status", "RUN", "--json"]])
def test_help_and_status_answer_at_once_and_import_nothing_heavy(args: list[str], run: Run) -> None:
    command = [
        sys.executable,
        "-X",
        "importtime",
        "-m",
        "scheduler.cli",
        *(run.store.uri if a == "RUN" else a for a in args),
    ]
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        process = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
        seconds.append(time.perf_counter() - start)
    imported = {line.rsplit("|", 1)[1].strip().split(".")[0] for line in process.stderr.splitlines() if "|" in line}
    assert "scheduler" in imported
    assert not imported & {"torch", "transformers", "ray", "tokenizers"}
    # the best of three keeps a busy machine from telling tales
    assert min(seconds) < 2  # without torch and Ray 0.2 on an idle core, with them 5


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


def test_unknown_engine_names_the_known_ones(tmp_path: Path, jobs_file: str) -> None:
    line = refusal("submit", jobs_file, "--run", str(tmp_path / "run"), "--engine", "warp")
    assert "warp" in line
    assert all(name in line for name in ENGINE_NAMES)


def test_an_unknown_model_is_refused_in_one_line(tmp_path: Path, jobs_file: str) -> None:
    for model in ("./absent", "nobody/nothing", "absent"):
        assert model in refusal("submit", jobs_file, "--run", str(tmp_path / "run"), "--model", model)
    assert "config.json" in refusal("submit", jobs_file, "--run", str(tmp_path / "run"), "--model", str(tmp_path))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("args", "problem"),
    [
        (["submit"], "Missing argument"),
        (["submit", "JOBS"], "Missing option '--run'"),
        (["submit", "JOBS", "--run", "R", "--workers", "0"], "--workers"),
        (["submit", "JOBS", "--run", "R", "--slots", "-1"], "--slots"),
        (["submit", "JOBS", "--run", "R", "--threads", "100000"], "--threads"),
        (["submit", "JOBS", "--run", "R", "--model", ""], "'--model': found an empty text"),
        (["submit", "JOBS", "--run", "R", "--kv-offload", ""], "'--kv-offload': found an empty text"),
        (["doctor", "--model", ""], "'--model': found an empty text"),
        (["submit", "JOBS", "--run", ""], "cannot use '' as a folder"),
        (["submit", "", "--run", "R"], "cannot read the job file"),
        (["resume", "R", "--checkpoint-seconds", "nan"], "found nan, expected at most 1,000,000,000 seconds"),
        (["resume", "R", "--store-retry-seconds", "inf"], "found inf, expected at most 1,000,000,000 seconds"),
        (["resume", "R", "--grace-seconds", "-0.1"], "not in the range"),
        (["submit", "JOBS", "--run", "R", "--dtype", "x" * 100_000], "..."),
        (["submit", "JOBS", "--run", "R", "--dtype", "int4"], "bfloat16"),
        (["submit", "JOBS", "--run", "R", "--colour", "red"], "No such option"),
        (["submit", "JOBS", "--run", "R", "--metrics-port", "70000"], "--metrics-port"),
        (["launch"], "No such command"),
        (["bench", "decode", "--engines", "warp"], "expected some of"),
        (["bench", "decode", "--positions", "many"], "positions"),
        (["bench", "decode", "--positions", "100", "--temperature", "nan"], "temperature"),
        (["train", "target", "--data", "/nowhere", "--output", "/proc/model"], "no file matches"),
        (["doctor", "--model", "./absent"], "./absent"),
    ],
)
def test_wrong_usage_is_one_line_and_exit_code_2(args: list[str], problem: str) -> None:
    assert problem in refusal(*args)


def test_a_standard_output_that_takes_nothing_is_told_in_one_line_or_closed_on_purpose(run: Run) -> None:
    finish(run, "a", "text of a")
    script = f"""swiftbatch() {{ "{sys.executable}" -m scheduler.cli "$@"; echo "$?" >&3; }}
        exec 3>&1 4>&2
        swiftbatch status "$1" > /dev/full
        swiftbatch results "$1" > /dev/full
        swiftbatch results "$1" >&-
        swiftbatch status "$1" <&- >&- 2>&-"""
    done = subprocess.run(
        ["bash", "-c", script, "bash", run.store.uri], cwd=ROOT, capture_output=True, text=True, check=True, timeout=120
    )
    assert done.stderr == "swiftbatch: cannot write to standard output: No space left on device\n" * 2
    assert done.stdout.split() == ["2", "2", "0", "0"]


def test_what_is_shown_of_hostile_names_steers_no_terminal(tmp_path: Path) -> None:
    hostile = str(tmp_path / "a\nb\x1b[31m\x9b\u202e\udcff")
    for args in (["status", hostile], ["submit", hostile, "--run", "x"], [hostile], ["submit", hostile]):
        assert refusal(*args).isprintable()
    assert refusal("tail", hostile, hostile).isprintable()


@pytest.mark.parametrize("command", ["status", "tail", "results", "report", "resume", "cancel"])
def test_a_folder_without_a_run_is_named(command: str, tmp_path: Path) -> None:
    args = [command, str(tmp_path), *(["a"] if command == "tail" else [])]
    line = refusal(*args)
    assert "no run at" in line
    assert str(tmp_path) in line


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
    submission = submit_file(path, str(tmp_path / "run"), Settings(model=str(tiny_model)), False)
    assert [record.job.custom_id for record in submission.run.jobs()] == ["good", "../../etc/x"]
    rejects = submission.run.rejects()
    assert [reject.line_number for reject in rejects] == [2, 3, 4, 5]
    num_prompt_tokens = submission.records[0].num_prompt_tokens
    assert f"prompt ({num_prompt_tokens} tokens) and max_tokens (5000)" in rejects[1].reason
    assert f"need {num_prompt_tokens + 5000} positions, expected at most the model's 4096" in rejects[1].reason


def test_a_job_that_fills_the_positions_to_the_last_is_taken(tmp_path: Path, tiny_model: Path) -> None:
    num_prompt_tokens = len(TextCodec(locate_model(str(tiny_model))).encode("the quick brown fox"))
    path = write_jobs(
        tmp_path / "jobs.jsonl", job("fits", 4096 - num_prompt_tokens), job("not", 4097 - num_prompt_tokens)
    )
    submission = submit_file(path, str(tmp_path / "run"), Settings(model=str(tiny_model)), False)
    assert [record.job.custom_id for record in submission.records] == ["fits"]
    assert [reject.custom_id for reject in submission.rejects] == ["not"]


def test_a_file_of_rejects_only_ends_with_exit_code_1_and_their_reasons(tmp_path: Path, tiny_model: Path) -> None:
    path = write_jobs(tmp_path / "jobs.jsonl", *(job(f"j{i}", max_tokens=-1) for i in range(8)))
    result = invoke("submit", path, "--run", str(tmp_path / "run"), "--model", str(tiny_model))
    assert result.exit_code == 1
    assert "rejected line 1 (j0): field 'max_tokens': found -1" in result.stderr
    assert "and 3 more rejected lines" in result.stderr
    assert len(Run.open(str(tmp_path / "run")).rejects()) == 8
    assert "run finished; jobs: none" in result.stdout
    status = invoke("status", str(tmp_path / "run"))
    assert "finished; jobs: none" in status.stdout
    assert "rejected: 8 lines" in status.stdout
    assert "resume" not in status.stdout


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
    run = submit_file(jobs_file, place, Settings(model=str(model))).run
    parts_fit = locate_model(str(model)).fingerprint
    before = (model / name).read_text()
    (model / name).write_text(f"{before} ")
    for command in (["resume", place], ["submit", jobs_file, "--run", place]):
        line = refusal(*command)
        assert f"the run at {place} was made with model {model}" in line
        assert "use the same one, or another run folder" in line
    if name not in ("tokenizer_config.json", "config.json"):
        assert locate_model(str(model)).fingerprint == parts_fit  # drafts do not depend on it
        older = run.manifest.model_copy(update={"text_fingerprint": None})
        run.store.write("run.json", older.model_dump_json().encode())  # as an older version wrote it
        assert submit_file(jobs_file, place, Settings()).records
        run.store.write("run.json", run.manifest.model_dump_json().encode())
    (model / name).write_text(before)
    assert submit_file(jobs_file, place, Settings()).records


def test_results_reads_and_writes_nothing_into_the_run(run: Run, tmp_path: Path) -> None:
    finish(run, "a", "text of a")
    run.store.write("output.jsonl", b"what the driver wrote\n")
    files = {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*")}
    assert json.loads(invoke("results", run.store.uri).stdout)["custom_id"] == "a"
    assert invoke("results", run.store.uri, "--format", "parquet", "--output", str(tmp_path / "t")).exit_code == 0
    assert len(parquet.read_table(tmp_path / "t")) == 1
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*")} == files
    assert run.store.read("output.jsonl") == b"what the driver wrote\n"


def test_a_clock_that_went_back_makes_no_negative_time(run: Run) -> None:
    for record in run.jobs():
        finish(run, record.job.custom_id, "text")
    back = {"state": "finished", "updated": 5.0, "started": 90_000.0, "jobs": count_jobs(run)}
    run.write_progress(current_progress(run).model_copy(update=back))
    assert "took 0:00:00" in invoke("status", run.store.uri).stdout


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
    settings = Settings(model=str(tiny_model), dtype="float32", num_threads=1)
    assert submit_file(jobs_file, str(tmp_path / "before"), settings, False).run.manifest.exactness == "not probed"
    diagnosis = diagnose(EngineConfig(model=str(tiny_model), dtype="float32", num_threads=1), num_rows=40)
    assert submit_file(jobs_file, str(tmp_path / "after"), settings, False).run.manifest.exactness == diagnosis.verdict
    other = Settings(model=str(tiny_model), dtype="float32", num_threads=2)
    assert submit_file(jobs_file, str(tmp_path / "other"), other, False).run.manifest.exactness == "not probed"


@pytest.mark.parametrize("address", ["127.0.0.1:1", "nowhere", "host:many", "no.such.host.invalid:6379"])
def test_an_unreachable_cluster_is_refused_in_one_line(address: str, run: Run) -> None:
    assert address in refusal("resume", run.store.uri, "--address", address)


def test_what_belongs_to_a_run_cannot_change_under_it(run: Run, jobs_file: str, tiny_model: Path) -> None:
    place, model = run.store.uri, str(tiny_model)
    assert "was made with seed 0, found 5" in refusal(
        "submit", jobs_file, "--run", place, "--model", model, "--seed", "5"
    )
    assert "model" in refusal("submit", jobs_file, "--run", place, "--model", "embedded")
    assert "dtype" in refusal("submit", jobs_file, "--run", place, "--dtype", "float32")
    again = submit_file(jobs_file, place, Settings(), False)
    assert again.run.manifest == run.manifest
    assert again.run.jobs() == run.jobs()


def test_a_changed_job_under_a_known_custom_id_is_rejected(run: Run, tmp_path: Path) -> None:
    path = write_jobs(tmp_path / "more.jsonl", job("a", max_tokens=21), job("b"), job("d"))
    submission = submit_file(path, run.store.uri, Settings(), False)
    assert [record.job.custom_id for record in submission.run.jobs()] == ["a", "b", "c", "d"]
    assert [(reject.line_number, reject.custom_id) for reject in submission.rejects] == [(1, "a")]


def test_a_model_folder_is_found_by_workers_in_other_folders(
    tmp_path: Path, tiny_model: Path, jobs_file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tiny_model.parent)
    submission = submit_file(jobs_file, str(tmp_path / "run"), Settings(model=tiny_model.name), False)
    assert submission.run.manifest.model == str(tiny_model)
    assert submit_file(jobs_file, str(tmp_path / "run"), Settings(model=tiny_model.name), False).rejects == []


def test_status_json_has_the_promised_fields(run: Run) -> None:
    finish(run, "b", "text of b")
    result = invoke("status", run.store.uri, "--json")
    assert result.exit_code == 0
    status = json.loads(result.output)
    assert status["state"] == "interrupted"
    assert status["jobs"] == {"pending": 2, "running": 0, "finished": 1, "failed": 0, "cancelled": 0}
    assert {"num_generated_tokens", "tokens_per_second", "eta_seconds", "workers"} <= set(status)
    text = invoke("status", run.store.uri).output
    assert "swiftbatch resume" in text


def test_status_shows_each_running_job_with_its_tokens(run: Run) -> None:
    worker = WorkerStatus(id="w1", host="here", pid=7, jobs=("a", "c"), metrics_address="http://here:9")
    beat = current_progress(run).model_copy(
        update={
            "state": "running",
            "updated": time.time(),
            "driver_host": socket.gethostname(),
            "driver_pid": os.getpid(),
            "workers": (worker,),
            "running": {"a": 12_345},
        }
    )
    run.write_progress(beat)
    text = invoke("status", run.store.uri).output
    assert "w1 on here, process 7: a (12,345 tokens), c, metrics at http://here:9" in text
    assert json.loads(invoke("status", run.store.uri, "--json").output)["running"] == {"a": 12_345}


def test_results_come_in_input_order_in_both_formats(run: Run, tmp_path: Path) -> None:
    finish(run, "c", "text of c")
    finish(run, "a", "text of a")
    lines = [json.loads(line) for line in invoke("results", run.store.uri).output.splitlines()]
    assert [line["custom_id"] for line in lines] == ["a", "c"]
    target = tmp_path / "answers.parquet"
    assert invoke("results", run.store.uri, "--format", "parquet", "--output", str(target)).exit_code == 0
    assert parquet.read_table(target)["text"].to_pylist() == ["text of a", "text of c"]
    assert "/proc/x" in refusal("results", run.store.uri, "--output", "/proc/x")


def test_tail_reads_the_token_log_of_an_unfinished_job_and_the_text_of_a_finished_one(
    run: Run, tiny_model: Path
) -> None:
    record = run.jobs()[0]
    codec = TextCodec(locate_model(str(tiny_model)))
    checkpoints = CheckpointStore(run.store)
    token_ids = np.array(codec.encode("jumps over the lazy dog"), dtype=np.uint32)
    assert invoke("tail", run.store.uri, "a").output == "\n"
    checkpoints.write_tokens(record.job_id, checkpoints.claim(record.job_id, "w1"), token_ids)
    assert invoke("tail", run.store.uri, "a").output == "jumps over the lazy dog\n"
    finish(run, "a", "the whole text")
    assert invoke("tail", run.store.uri, "a", "--follow").output == "the whole text\n"
    assert "no job 'z'" in refusal("tail", run.store.uri, "z")


def test_tail_follows_a_running_job_to_its_end(run: Run, tiny_model: Path) -> None:
    alive = {
        "state": "running",
        "driver_host": "elsewhere",
        "driver_pid": 1,
        "driver_process": None,
        "updated": time.time(),
    }
    run.write_progress(current_progress(run).model_copy(update=alive))
    record = run.jobs()[0]
    checkpoints = CheckpointStore(run.store)
    attempt = checkpoints.claim(record.job_id, "w1")
    token_ids = np.array(TextCodec(locate_model(str(tiny_model))).encode("jumps over the lazy dog"), dtype=np.uint32)
    pieces = []
    for number, piece in enumerate(follow_text(run, "a", follow=True)):
        pieces.append(piece)
        if number == 0:
            checkpoints.write_tokens(record.job_id, attempt, token_ids)
        elif number == 1:
            finish(run, "a", "jumps over the lazy dog. The end.")
    assert pieces == ["", "jumps over the lazy dog", ". The end."]


def test_cancel_without_a_driver_takes_effect_at_once(run: Run) -> None:
    finish(run, "b", "text of b")
    assert "cancelled job a" in invoke("cancel", run.store.uri, "a").output
    assert "ended already" in invoke("cancel", run.store.uri, "b").output
    assert "no job 'z'" in refusal("cancel", run.store.uri, "z")
    assert "cancelled 1 jobs" in invoke("cancel", run.store.uri).output
    status = json.loads(invoke("status", run.store.uri, "--json").output)
    assert status["state"] == "cancelled"
    assert status["jobs"] == {"pending": 0, "running": 0, "finished": 1, "failed": 0, "cancelled": 2}
    lines = [json.loads(line) for line in invoke("results", run.store.uri).output.splitlines()]
    assert [(line["custom_id"], line["error"] and line["error"]["code"]) for line in lines] == [
        ("a", "cancelled"),
        ("b", None),
        ("c", "cancelled"),
    ]


def test_cancel_with_a_driver_only_asks_it(run: Run) -> None:
    alive = {
        "state": "running",
        "driver_host": "elsewhere",
        "driver_pid": 1,
        "driver_process": None,
        "updated": time.time(),
    }
    run.write_progress(current_progress(run).model_copy(update=alive))
    assert "asked the driver" in invoke("cancel", run.store.uri, "a").output
    assert run.cancel_requests() == (False, {run.jobs()[0].job_id})
    assert not run.failed()
    assert "held by another driver" in refusal("resume", run.store.uri)
