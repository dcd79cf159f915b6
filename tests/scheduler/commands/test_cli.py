from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

import swiftbatch
from swiftbatch.jobs.run.run import Run
from swiftbatch.scheduler.cli import main
from tests import ROOT
from tests.scheduler.commands.command_parts import COMMANDS, LEAVES, finish, invoke, refusal

pytestmark = pytest.mark.ray


@pytest.mark.parametrize("path", COMMANDS, ids=" ".join)
def test_every_command_has_help_with_an_example(path: tuple[str, ...]) -> None:
    result = invoke(*path[1:], "--help")
    assert result.exit_code == 0
    example = result.output.partition("Example:\n")[2].strip().splitlines()[0]
    words = example.split()
    assert words[0] == "swiftbatch"
    command = COMMANDS[path]
    if " ".join(path[1:]) not in LEAVES:
        return
    assert tuple(words[: len(path)]) == path
    command.make_parser(click.Context(command)).parse_args(words[len(path) :])  # its options exist


@pytest.mark.parametrize("words", [(), ("bench",), ("train",)], ids=" ".join)
def test_a_group_without_a_command_prints_its_help_as_it_is(words: tuple[str, ...]) -> None:
    result = invoke(*words)
    assert (result.exit_code, result.stdout, result.stderr) == (0, invoke(*words, "--help").stdout, "")


def test_python_runs_the_package_as_the_command() -> None:
    done = subprocess.run([sys.executable, "-m", "swiftbatch", "--version"], capture_output=True, text=True)
    assert (done.returncode, done.stdout.strip()) == (0, f"python -m swiftbatch, version {swiftbatch.__version__}")


@pytest.mark.parametrize("command", ["submit", "nightly", "serve", "resume", "extend", "fork"])
def test_help_is_a_screen_and_a_half_with_each_option_on_a_line_under_a_heading(command: str) -> None:
    width = 100 - 2  # click's width on a terminal of 100 columns
    lines = CliRunner().invoke(main, [command, "--help"], terminal_width=width).output.splitlines()
    assert len(lines) <= 90
    options = COMMANDS["swiftbatch", command].params
    shown = [line for line in lines if line.startswith(("  -", "      "))]
    assert sum(line.startswith("  -") for line in shown) == 1 + sum(isinstance(o, click.Option) for o in options)
    assert [line for line in shown if line.startswith("      ") and not line.strip().startswith("swiftbatch")] == []
    headings = [line for line in lines if line.endswith(":") and not line.startswith(" ")]
    assert headings[0] == "The run:"
    assert len(headings) >= 5


@pytest.mark.parametrize("args", [["submit", "--help"], ["status", "RUN", "--json"]])
def test_help_and_status_answer_at_once_and_import_nothing_heavy(args: list[str], run: Run) -> None:
    words = [run.store.uri if word == "RUN" else word for word in args]
    command = [sys.executable, "-X", "importtime", "-m", "swiftbatch.scheduler.cli", *words]
    process = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    modules = [line.rsplit("|", 1)[1].strip() for line in process.stderr.splitlines() if "|" in line]
    imported = {module.split(".")[0] for module in modules}
    assert "swiftbatch.scheduler.cli" in modules
    assert not imported & {"torch", "transformers", "ray", "tokenizers"}
    assert len(modules) < 700  # about 320 in 0.3 s; torch alone has 1,100 and takes 5 s


def test_shells_complete_commands_and_options(monkeypatch: pytest.MonkeyPatch) -> None:
    def answered(shell: str, *words: str) -> str:
        said = {"COMP_WORDS": " ".join(words), "COMP_CWORD": str(len(words) - 1), "_SWIFTBATCH_COMPLETE": shell}
        return CliRunner().invoke(main, [], prog_name="swiftbatch", env=said).stdout

    assert "complete -o nosort -F _swiftbatch_completion swiftbatch" in answered("bash_source", "")
    assert "plain,submit" in answered("bash_complete", "swiftbatch", "sub").splitlines()
    options = answered("bash_complete", "swiftbatch", "submit", "--work").splitlines()
    assert sorted(options) == ["plain,--worker-timeout", "plain,--workers"]


@pytest.mark.parametrize(
    ("args", "problem"),
    [
        (["submit"], "Missing argument"),
        (["submit", "-"], "expected --run with the run's folder"),
        (["submit", "a.jsonl", "b.jsonl"], "expected --run with the run's folder"),
        (["submit", "s3://bucket/a.jsonl"], "expected --run with the run's folder"),
        (["submit", "part-*.jsonl"], "expected --run with the run's folder"),
        (["submit", "/dev/null"], "expected --run with the run's folder"),
        (["submit", "/nowhere/jobs.jsonl"], "cannot read the job file /nowhere/jobs.jsonl: No such file"),
        (["submit", "/"], "cannot read the job file /: Is a directory"),
        (["submit", "JOBS", "--run", "R", "--workers", "0"], "--workers"),
        (["submit", "JOBS", "--run", "R", "--slots", "-1"], "--slots"),
        (["submit", "JOBS", "--run", "R", "--threads", "100000"], "--threads"),
        (["submit", "JOBS", "--run", "R", "--model", ""], "'--model': found an empty text"),
        (["submit", "JOBS", "--run", "R", "--kv-offload", ""], "'--kv-offload': found an empty text"),
        (["doctor", "--model", ""], "'--model': found an empty text"),
        (["submit", "JOBS", "--run", ""], "cannot use '' as a folder"),
        (["submit", "JOBS", "--run", "a\udcff"], r"found 'a\udcff', expected text in UTF-8"),
        (["submit", "JOBS", "--run", "R", "--slots", "many"], "found many, expected auto, or a whole number from 1 on"),
        (["submit", "JOBS", "--run", "R", "--thinking-markers", "<a>"], "requires 2 arguments"),
        (["submit", "JOBS", "--run", "R", "--thinking-markers", "<a>", ""], "found '', expected two texts in UTF-8"),
        (["submit", "", "--run", "R"], "cannot read the job file"),
        (["resume", "R", "--checkpoint-seconds", "nan"], "found nan, expected at most 1,000,000,000 seconds"),
        (["resume", "R", "--store-retry-seconds", "inf"], "found inf, expected at most 1,000,000,000 seconds"),
        (["resume", "R", "--grace-seconds", "-0.1"], "not in the range"),
        (["submit", "JOBS", "--run", "R", "--dtype", "x" * 100_000], "..."),
        (["submit", "JOBS", "--run", "R", "--dtype", "int4"], "bfloat16"),
        (["submit", "JOBS", "--run", "R", "--linear", "mine"], "'cublas', 'triton'"),
        (["submit", "JOBS", "--run", "R", "--device", "cpu", "--linear", "triton"], "--linear triton: a choice of"),
        (["doctor", "--device", "cpu", "--attention", "flash"], "--attention flash: a choice of kernels on a GPU"),
        (["submit", "JOBS", "--run", "R", "--colour", "red"], "No such option"),
        (["submit", "JOBS", "--run", "R", "--metrics-port", "70000"], "--metrics-port"),
        (["submit", "JOBS", "--run", "R", "--team", "a team"], "found 'a team', expected up to 64 letters, digits"),
        (["resume", "R", "--metrics-textfile", "a.txt"], "found 'a.txt', expected a name that ends in .prom"),
        (["resume", "R", "--deadline", "soon"], "found 'soon', expected a duration as 90m or 1d12h"),
        (["resume", "R", "--max-total-tokens", "0"], "not in the range"),
        (["resume", "R", "--max-worker-hours", "0"], "not in the range"),
        (["resume", "R", "--max-worker-hours", "nan"], "found nan, expected at most 1,000,000,000 hours"),
        (["resume", "R", "--price-per-worker-hour", "-1"], "not in the range"),
        (["resume", "R", "--price-per-worker-hour", "nan"], "found nan, expected at most 1,000,000,000 an hour"),
        (["resume", "R", "--webhook", "ftp://host/x"], "does not begin with http:// or https://"),
        (["resume", "R", "--webhook", "http://me:pw@host/"], "found a user or a password in the address"),
        (["resume", "R", "--webhook-jobs"], "--webhook-jobs: expected --webhook with it"),
        (["resume", "R", "--quiet", "--json"], "--quiet and --json: expected at most one of them"),
        (["extend", "R"], "Missing option '--max-tokens'"),
        (["extend", "R", "--max-tokens", "0"], "not in the range"),
        (["serve"], "Missing option '--runs'"),
        (["serve", "--runs", "R", "--port", "70000"], "--port"),
        (
            ["serve", "--runs", "R", "--metrics-port", "9400", "--max-running", "2"],
            "--metrics-port 9400 with --max-running 2: expected --metrics-port 0",
        ),
        (["serve", "--runs", "R", "--host", "0.0.0.0"], "--host 0.0.0.0: expected --api-keys FILE with it"),
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
    script = f"""swiftbatch() {{ "{sys.executable}" -m swiftbatch.scheduler.cli "$@"; echo "$?" >&3; }}
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


@pytest.mark.parametrize("command", ["status", "tail", "results", "report", "resume", "cancel", "extend", "prune"])
def test_a_folder_without_a_run_is_named(command: str, tmp_path: Path) -> None:
    more = {"tail": ["a"], "extend": ["--max-tokens", "9"]}
    args = [command, str(tmp_path), *more.get(command, [])]
    line = refusal(*args)
    assert "no run at" in line
    assert str(tmp_path) in line
