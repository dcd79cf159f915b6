"""All benchmarks in one go: every stage leaves its figures, what is there stays, and the page is made of it alone."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from bench import auto as auto_bench
from bench import kernel_operations as roofline
from bench import suite
from bench.speed_page import NAMES, PAGE, SECTIONS, page_of, with_figures
from bench.stage_file import MadeWith, StageFile, cpu_name, read_stage_file
from bench.suite import STAGES, SuiteOptions, SuiteStage, run_suite, stages_of
from swiftbatch.jobs.errors import ModelError
from swiftbatch.worker import decode_bench
from swiftbatch.worker.bench_texts import BenchError
from swiftbatch.worker.decode_bench import BenchOptions
from swiftbatch.worker.model.model_files import ModelFiles, locate_model
from swiftbatch.worker.training.training_lock import held
from tests.worker.kernels.kernel_parts import needs_kernels

pytestmark = [pytest.mark.long, needs_kernels]

CODE = "0" * 64


@pytest.fixture(autouse=True)
def _few_tokens(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(auto_bench, "CELL_TOKENS", 64)
    monkeypatch.setattr(decode_bench, "NUM_WARMUP_TOKENS", 256)
    for name, value in {"LARGEST": 1 << 20, "NUM_READ": 1 << 20, "NUM_MULTIPLIED": 100, "NUM_ROUNDS": 1}.items():
        monkeypatch.setattr(roofline, name, value)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def options(tmp_path: Path) -> SuiteOptions:
    text = tmp_path / "book.txt"
    text.write_text("".join(f"The {number}th night was colder than the {number - 1}th. " for number in range(400)))
    return SuiteOptions(text=text, output=tmp_path / "figures", is_small=True, num_threads=1)


@pytest.fixture(scope="module")
def figures() -> dict[str, tuple[str, list[str]]]:
    """The first measurement of each stage and its lines, by its name."""
    return {}


@pytest.fixture
def only_two(monkeypatch: pytest.MonkeyPatch, figures: dict[str, tuple[str, list[str]]]) -> list[str]:
    """The two quickest stages alone; returns the names of those that were measured, as they are.

    Each is really run once for all tests, and leaves the same figures again from then on.
    """
    measured: list[str] = []

    def few(*asked: object) -> Iterator[SuiteStage]:
        for stage in stages_of(*asked):  # type: ignore[arg-type]
            if stage.name in ("greedy", "agreement"):
                yield dataclasses.replace(stage, run=noted(stage))

    def noted(stage: SuiteStage) -> Callable[[Any, Callable[[str], None]], object]:
        def run(options: BenchOptions, report: Callable[[str], None]) -> None:
            measured.append(stage.name)
            assert options.json_path is not None
            if stage.name not in figures:
                said: list[str] = []
                stage.run(options, said.append)
                figures[stage.name] = options.json_path.read_text(), said
            text, lines = figures[stage.name]
            options.json_path.write_text(text)
            for line in lines:
                report(line)

        return run

    monkeypatch.setattr(suite, "stages_of", few)
    return measured


def told(options: SuiteOptions, code: str = CODE) -> list[str]:
    """Lines about a run."""
    lines: list[str] = []
    run_suite(options, code, lines.append)
    return [line for line in lines if not line.startswith("  ")]


@pytest.mark.slow  # the stages have tests of their own; those below run two of them
def test_every_stage_leaves_its_figures_and_the_page_has_a_table_of_each(options: SuiteOptions) -> None:
    lines = told(options)
    assert [line for line in lines if "left out" in line] == []
    assert [line.split(":")[0] for line in lines] == [
        f"stage {number} of {len(STAGES)}, {kind.name}" for number, kind in enumerate(STAGES, 1)
    ]
    assert lines[-1].endswith("about 0.5 minutes, 0.5 with all that follows; embedded model, 2 cores")
    files = {name: read_stage_file(options.output / f"{name}.json") for name in NAMES}
    assert {path.name for path in options.output.iterdir()} == {
        *(f"{name}.json" for name in NAMES),
        *("kernels.png", "long.png", PAGE),
    }
    for file in files.values():
        assert str(options.text.parent) not in file.model_dump_json()
    page = (options.output / PAGE).read_text()
    assert [line for line in page.splitlines() if line.startswith("## ")] == [f"## {each.title}" for each in SECTIONS]
    assert "NOT" not in page
    assert f"{files['long'].figures['records'][-1]['window']['ms_per_token']:.2f}" in page
    assert max(map(len, page.splitlines())) <= 160
    assert cpu_name() in page


def test_what_is_there_is_not_measured_again_and_the_page_is_made_of_it(
    options: SuiteOptions, only_two: list[str]
) -> None:
    told(options)
    page = (options.output / PAGE).read_text()
    (options.output / PAGE).unlink()
    assert told(options) == [f"stage {n} of 2, {name}: its figures are there" for n, name in enumerate(only_two, 1)]
    assert only_two == ["greedy", "agreement"]
    assert (options.output / PAGE).read_text() == page


def test_damaged_and_foreign_figures_are_told_and_measured_again(options: SuiteOptions, only_two: list[str]) -> None:
    told(options)
    greedy, agreement = (options.output / f"{name}.json" for name in only_two)
    whole = greedy.read_text()
    for damaged in (whole[: len(whole) // 2], whole.replace('"stage":', '"stages":'), agreement.read_text()):
        greedy.write_text(damaged)
        first, *_ = told(options)
        assert first.startswith(f"{greedy}: ")
        assert first.endswith("; the stage is measured again")
        assert StageFile.model_validate_json(greedy.read_text()).stage == "greedy"
    assert only_two == ["greedy", "agreement", *["greedy"] * 3]
    lines = told(options, code="1" * 64)
    assert lines[:2] == [
        f"{path}: measured with other code; the stage is measured again" for path in (greedy, agreement)
    ]
    lines = told(options.model_copy(update={"dtype": "float32"}), code="1" * 64)
    assert lines[0] == f"{greedy}: measured with other options; the stage is measured again"


def test_figures_of_another_text_model_or_machine_are_foreign(options: SuiteOptions, only_two: list[str]) -> None:
    told(options)
    found = read_stage_file(options.output / "greedy.json").made_with
    for name in MadeWith.model_fields:
        value: object = {"other": "1"} if isinstance(getattr(found, name), dict) else "other"
        assert found.differences(found.model_copy(update={name: value})) == [name]
    assert found.differences(found) == []


def test_an_interrupted_run_goes_on_behind_its_whole_stages(options: SuiteOptions, only_two: list[str]) -> None:
    def interrupt(line: str) -> None:
        if line.startswith("  position") and only_two[-1] == "agreement":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_suite(options, CODE, interrupt)
    assert [path.name for path in options.output.iterdir()] == ["greedy.json"]
    assert told(options)[0] == "stage 1 of 2, greedy: its figures are there"
    assert only_two == ["greedy", "agreement", "agreement"]


def test_a_stage_that_cannot_run_is_left_out_and_the_others_run(
    options: SuiteOptions,
    only_two: list[str],
    figures: dict[str, tuple[str, list[str]]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: object) -> None:
        raise BenchError("not on this model")

    monkeypatch.setattr(decode_bench, "warm_drafters", refuse)
    monkeypatch.delitem(figures, "greedy", raising=False)
    assert told(options)[1] == "stage 1 of 2, greedy: left out: not on this model"
    assert not (options.output / "greedy.json").exists()
    assert "Not measured: long, decode, greedy, auto," in (options.output / PAGE).read_text()


def test_a_text_that_is_too_short_is_told_before_anything_is_measured(
    options: SuiteOptions, only_two: list[str]
) -> None:
    options.text.write_text("short")
    with pytest.raises(BenchError, match="the highest position needs 1024"):
        told(options)
    assert only_two == []


def test_a_model_with_few_positions_is_measured_as_far_as_it_goes(
    tiny_model: Path, options: SuiteOptions, embedded_files: ModelFiles
) -> None:
    computing = {"model": "embedded", "text": options.text}
    assert [stage.name for stage in stages_of(computing, embedded_files, False)] == [kind.name for kind in STAGES]
    fitting = {
        stage.name: stage.options.model_dump() for stage in stages_of(computing, locate_model(str(tiny_model)), False)
    }
    assert fitting["decode"]["positions"] == (3000,)
    assert fitting["auto"]["positions"] == (2048,)
    assert fitting["kernels"]["lengths"] == (0, 2048)
    assert not {"long", "agreement", "checkpoints", "fields"} & fitting.keys()


def test_a_page_takes_the_tables_between_its_marks_and_keeps_the_rest(
    options: SuiteOptions, only_two: list[str]
) -> None:
    told(options)
    text = "before\n<!-- figures: old -->\nstale\n<!-- end of the figures -->\nafter\n"
    once = with_figures(text, options.output, "figures/new")
    assert once.startswith("before\n<!-- figures: figures/new -->\n\n")
    assert once.endswith("\n\n<!-- end of the figures -->\nafter\n")
    assert with_figures(once, options.output, "figures/new") == once
    assert page_of(options.output).split("\n", 2)[2].strip() in once
    with pytest.raises(BenchError, match="the page has no place for figures"):
        with_figures("no marks", options.output, "figures/new")


def test_figures_without_a_table_and_empty_folders_are_told(options: SuiteOptions, only_two: list[str]) -> None:
    told(options)
    path = options.output / "greedy.json"
    document = json.loads(path.read_text())
    document["figures"]["results"][0].pop("speedup")
    path.write_text(json.dumps(document))
    with pytest.raises(BenchError, match=r"no table in greedy\.json; delete them and measure again"):
        page_of(options.output)
    with pytest.raises(BenchError, match="no figures of `python -m bench all`"):
        page_of(options.output.parent)


def test_a_processor_without_a_name_has_its_kind(tmp_path: Path) -> None:
    assert cpu_name(tmp_path / "none")
    (tmp_path / "cpuinfo").write_text("model name\t: Some CPU @ 3 GHz\nflags\t: a\n")
    assert cpu_name(tmp_path / "cpuinfo") == "Some CPU @ 3 GHz"


def test_a_folder_that_another_process_measures_into_is_refused(options: SuiteOptions, tmp_path: Path) -> None:
    options.output.mkdir(parents=True)
    holding = f"import time; from pathlib import Path; from {held.__module__} import held\n"
    holding += f"with held(Path({str(options.output)!r})): print('held', flush=True); time.sleep(600)"
    with subprocess.Popen([sys.executable, "-c", holding], stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"held\n"
        with pytest.raises(ModelError, match="another process is at work there"):
            told(options)
        other.kill()
    assert not list(options.output.glob("*.json"))
