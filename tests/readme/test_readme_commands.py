"""Every command on a page is valid; the tour's are run and compared."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shlex
import subprocess
import tomllib
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from bench.variants import VARIANTS
from swiftbatch.jobs.run.run_records import WorkerStatus
from swiftbatch.scheduler.cli import main
from swiftbatch.scheduler.display.events import WorkerReady
from swiftbatch.scheduler.display.progress_line import summary_line
from swiftbatch.worker.decode_bench import DecodeBenchOptions
from swiftbatch.worker.drafters.catalogue import PAPER_ENGINES
from swiftbatch.worker.model.model_files import EMBEDDED
from tests.jobs.run.run_parts import PROGRESS
from tests.k8s.chart import OVERLAYS
from tests.k8s.kubernetes_parts import render
from tests.readme.command_lines import (
    PAGES,
    ROOT,
    all_commands,
    blocks,
    commands,
    is_name,
    options,
    page,
    section,
    spans,
    table,
)
from tests.scheduler.commands.submit_parts import submit_file
from tests.scheduler.driver.dispatch_parts import idle_workers
from tests.scheduler.driving import DEADLINE_SECONDS, swiftbatch
from tests.scheduler.runs.extension_parts import run_all
from tests.worker.session.session_parts import PLAINLY

pytestmark = pytest.mark.ray

README = page("README.md")
KUBERNETES = page("k8s/README.md")
BLOCKS = [block for path in PAGES for block in blocks(page(path))]
CODE = "\n".join([*(span for path in PAGES for span in spans(page(path))), *BLOCKS])
TOUR = section(README, "Five minutes")
NUM_TOKENS = 40  # tokens per job, instead of the tour's
CHANGING = re.compile(r"run-[\w-]+|\d[\d,.:]*")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the files that the commands name."""
    for name in ("DIR", "WORK", "MODEL"):
        (tmp_path / name).mkdir()
    (tmp_path / "book.txt").write_text("Once upon a time")
    (tmp_path / "vllm/bin").mkdir(parents=True)
    (tmp_path / "vllm/bin/python").touch()
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("words", all_commands(), ids=" ".join)
def test_the_command_line_takes_every_command(words: list[str], folder: Path) -> None:
    assert is_name(words) or options(words) is not None


def test_commands_are_found_in_all_places_where_they_stand() -> None:
    found = {words[0] for words in commands(README)}
    assert found == main.commands.keys()
    assert {"status", "results"} <= {words[0] for words in commands(KUBERNETES)}
    assert len(all_commands()) > 50
    assert all(commands(page(f"docs/{name}.md")) for name in ("durability", "engines", "models", "speed", "watching"))


def leaves(command: click.Command, words: tuple[str, ...] = ()) -> set[tuple[str, ...]]:
    if not isinstance(command, click.Group):
        return {words}
    own = {words} if command.invoke_without_command else set()
    return own | {leaf for name, below in command.commands.items() for leaf in leaves(below, (*words, name))}


def test_every_command_is_shown() -> None:
    shown = {tuple(words[:length]) for words in all_commands() for length in (1, 2, 3)}
    assert len(leaves(main)) > 15
    assert leaves(main) - shown == set()


def test_the_engines_of_submit_and_those_for_comparison_are_listed() -> None:
    pages = table(page("docs/engines.md"), "variant"), table(page("docs/engines.md"), "paper's engine")
    listed = table(README, "engine"), *pages
    engines, variants, of_papers = ({row[0].split("`")[1] for row in rows} for rows in listed)
    (option,) = [each for each in main.commands["submit"].params if each.name == "engine"]
    assert isinstance(option.type, click.Choice)
    assert set(option.type.choices) == engines | of_papers
    assert of_papers == PAPER_ENGINES.keys()
    assert len(engines) <= 8
    assert variants == VARIANTS.keys()
    named = {"engines": tuple(engines | variants | of_papers), "positions": (64,), "num_tokens": 5, "seed": 0}
    DecodeBenchOptions(**named, temperature=0.0, min_p=0.1, repetition_penalty=1.0)  # takes every name


def test_a_command_with_a_wrong_option_is_refused() -> None:
    text = "Use `swiftbatch submit\njobs.jsonl --run R --wokers 2` or\n\n```\n$ swiftbatch statsu R | head\n```\n"
    (wrong_option, wrong_name) = commands(text)
    assert wrong_name == ["statsu", "R"]
    for words, problem in ((wrong_option, "wokers"), (wrong_name, "statsu")):
        assert not is_name(words)
        with pytest.raises(Exception, match=problem):
            options(words)


def transcript() -> list[tuple[list[str], list[str]]]:
    """Return the tour's commands with their output lines."""
    steps: list[tuple[list[str], list[str]]] = []
    for block in blocks(TOUR):
        for line in block.splitlines():
            if line.startswith("$ "):
                steps.append((shlex.split(line)[1:], []))
            elif steps and block.startswith("$ "):
                steps[-1][1].append(line)
    return steps


def shape(line: str) -> str:
    return CHANGING.sub("#", line)


def is_shown_as(shown: str, output: str) -> bool:
    """Return whether a page shows all lines of an output; `...` stands for some, and numbers may differ."""
    lines = [".+" if line == "..." else re.escape(shape(line)) for line in shown.splitlines()]
    found = "\n".join(shape(line) for line in output.splitlines())
    return re.fullmatch("\n".join(lines), found, re.DOTALL) is not None


def test_a_page_that_leaves_a_line_out_or_has_another_one_is_found() -> None:
    output = "2 jobs in jobs.run\nrun finished; jobs: 2 finished\nresults: jobs.run/output.jsonl\n"
    for shown, is_right in (
        ("3 jobs in jobs.run\n...\nresults: jobs.run/output.jsonl", True),
        ("2 jobs in jobs.run\nresults: jobs.run/output.jsonl", False),
        ("2 jobs in jobs.run\nthe run is over\nresults: jobs.run/output.jsonl", False),
        ("2 jobs in jobs.run\n...\nrun finished", False),
    ):
        assert is_shown_as(shown, output) is is_right


def give(words: list[str]) -> tuple[int, str]:
    """Return exit code and output; a command that runs jobs gets its own process."""
    if words[1] == "submit" and not Path("jobs.run").exists():
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        process = subprocess.run(
            swiftbatch(*words[1:]),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
            timeout=DEADLINE_SECONDS,
        )
        return process.returncode, process.stdout
    result = CliRunner().invoke(main, words[1:])
    return result.exit_code, result.output


def test_the_tour_shows_what_its_commands_show(folder: Path) -> None:
    lines = [json.loads(line) for line in blocks(TOUR)[0].splitlines()]
    short = [line | ({"max_tokens": NUM_TOKENS} if "max_tokens" in line else {}) for line in lines]
    (folder / "jobs.jsonl").write_text("".join(json.dumps(line) + "\n" for line in short))
    steps = transcript()
    assert [words[1] for words, _ in steps] == ["submit", "status", "tail", "results", "submit", "report"]
    for words, shown in steps:
        code, output = give(words)
        assert code == (1 if words[1] == "submit" else 0), output  # a line of the file is bad
        if words[1] == "tail":  # a CPU that rounds otherwise may have another text after some tokens
            assert output.startswith(shown[0][:24])
            continue
        assert is_shown_as("\n".join(shown), output), output
    assert {"answers.jsonl", "report.html", "jobs.run"} <= {path.name for path in folder.iterdir()}
    answers = (folder / "answers.jsonl").read_text().splitlines()
    assert [json.loads(line)["custom_id"] for line in answers] == [line["custom_id"] for line in lines[:2]]


def test_the_demo_s_lines_are_those_of_today() -> None:
    worker = WorkerStatus(id="w1", host="here", pid=1, jobs=("a",), last_checkpoint=1.0)
    update = {"jobs": {"running": 4}, "eta_seconds": 9.0, "mean_acceptance_length": 1.5, "workers": (worker,)}
    update |= {"num_preemptions": {"worker_died": 2}, "num_resumes": {"kv": 2}}
    shown = {shape(line) for line in blocks(section(README, "Two commands"))[1].splitlines()}
    assert shape(summary_line(PROGRESS.model_copy(update=update))) in shown
    assert shape(str(WorkerReady("w1", "here", 1))) in shown


def test_make_knows_the_targets_that_are_named() -> None:
    targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    named = set(re.findall(r"^make (\w+)", CODE, re.MULTILINE))
    assert named == {"demo", "test"}
    assert named <= set(targets)


def test_pip_and_python_find_what_they_are_given() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = set(re.findall(r"(?:swiftbatch|'\.)\[(\w+)\]", CODE))
    assert "gpu" in extras
    assert extras <= project["optional-dependencies"].keys()
    assert all((ROOT / name).is_file() for name in re.findall(r"pip install -c (\S+)", CODE))
    modules = re.findall(r"python -m ([\w.]+)", CODE)
    assert modules
    assert all(importlib.util.find_spec(module) is not None for module in modules)


def test_pytest_and_promtool_find_the_files_that_are_named() -> None:
    files = re.findall(r"pytest (?:-m slow )?(tests/\S+\.py)", CODE)
    files += re.findall(r"promtool (?:test|check) rules (\S+)", CODE)
    assert len(files) >= 3
    assert [name for name in files if not (ROOT / name).is_file()] == []


def test_ray_takes_the_commands_that_make_a_cluster() -> None:
    from ray.scripts.scripts import cli as ray_cli  # no other test needs it

    found = [line for block in BLOCKS for line in block.splitlines() if line.startswith("ray ")]
    assert len(found) == 2
    for line in found:
        words = shlex.split(line, comments=True)[1:]
        with ray_cli.commands[words[0]].make_context(words[0], words[1:]) as context:
            assert context.params["block"]


def test_kubectl_finds_the_objects_that_are_named() -> None:
    code = "\n".join(BLOCKS)
    named = set(re.findall(r"(?:patch |--from=)(\w+)[ /]([\w-]+)", code))
    assert {kind for kind, _ in named} == {"cronjob", "raycronjob", "raycluster"}
    for overlay in OVERLAYS:
        assert named <= {(each["kind"].lower(), each["metadata"]["name"]) for each in render(overlay)}
    patches = re.findall(r"-p '([^']+)'", code)
    assert all(json.loads(patch)["spec"].keys() == {"suspend"} for patch in patches)
    assert len(patches) == 3


def test_docker_finds_the_targets_that_are_named() -> None:
    named = set(re.findall(r"docker build --target ([\w-]+)", CODE))
    assert named == {"cuda", "cuda12", "cuda-flash"}  # the default is the one for CPUs
    assert named <= set(re.findall(r"^FROM \S+ AS ([\w-]+)$", page("Dockerfile"), re.MULTILINE))


def shown_outputs(name: str) -> dict[str, str]:
    """Return a page's outputs by the command before each."""
    text = [block.removeprefix("$ swiftbatch ").partition("\n") for block in blocks(page(name)) if block[:2] == "$ "]
    return {command: output.rstrip("\n") for command, _, output in text}


def test_pages_show_what_verify_and_extend_print(folder: Path) -> None:
    lines = [{"custom_id": name, "prompt": name, "max_tokens": 30, "ignore_eos": True} for name in "abc"]
    (folder / "jobs.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (verify, verified), *_ = shown_outputs("docs/verify.md").items()
    (extend, extended), *_ = shown_outputs("docs/durability.md").items()
    run = submit_file("jobs.jsonl", "my-run").run
    run_all(run, EMBEDDED, **PLAINLY)
    run.write_output()
    with idle_workers():
        for command, shown in ((verify, verified), (extend, extended)):
            found = CliRunner().invoke(main, shlex.split(command))
            assert found.exit_code == 0, found.output
            assert is_shown_as(shown, found.output), found.output
