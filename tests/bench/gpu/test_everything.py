"""All that a GPU has to show, in one command: whatever breaks costs one stage, and what was found stays."""

from __future__ import annotations

import importlib
import math
import os
import re
import sys
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from bench.commands import gpu
from bench.gpu import everything as command
from bench.gpu.everything import EverythingOptions, run_everything
from bench.gpu.everything_page import PAGE, REHEARSAL, page_of
from bench.gpu.family_weights import FAMILIES, Family, shapes_of
from bench.gpu.gpu_stages import STAGES, GPUStage
from bench.gpu.stage_process import tried
from bench.gpu.stage_record import GPUStageRecord, read_record
from bench.gpu.trial import SMALL_SIZES, Trial
from bench.sizing import EXPERTS, WINDOWED
from swiftbatch.jobs.errors import UserError
from swiftbatch.worker.bench_texts import BenchError
from swiftbatch.worker.exactness.gpu_doctor.findings import Finding, Result
from swiftbatch.worker.model.decoder_config import read_decoder_config
from tests import ROOT
from tests.bench.gpu import broken_stages, interpreted_stages

pytestmark = pytest.mark.long

CPU = torch.device("cpu")
BROKEN = (sys.executable, "-m", broken_stages.__name__)
NEEDS_COMMANDS = (  # start processes of their own
    *("bits", "rows of kinds", "kinds of models", "tests", "Ray", "second process", "restart"),
)
PUBLISHED_NUMBERS = {  # of models that docs/gpu.md has tables of; that of the first follows from its config
    "Qwen3.5 27B": 26_895_998_464,
    "Qwen3 30B A3B": EXPERTS["Qwen3 30B A3B"][0].num_parameters,
    "gpt-oss 20B": EXPERTS["gpt-oss-20b"][0].num_parameters,
    "GLM 4.7 Flash": EXPERTS["GLM 4.7 Flash"][0].num_parameters,
    "Gemma 3 27B": WINDOWED["Gemma 3 27B"].num_parameters,
}
ITEMS = {item for stage in STAGES for item in stage.proves}
QUICK = ("host", "graph memory", "loading", "flash")


@pytest.fixture(autouse=True)
def _found_by_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))


def result(name: str, **finding: object) -> Result:
    fields = {"passed": True, "words": "fine", "rows": []} | finding
    return Result(name=name, proves="", seconds=1.0, finding=Finding.model_validate(fields))


def test_an_error_a_hang_and_a_sudden_end_cost_one_stage_each(tmp_path: Path) -> None:
    said: list[str] = []
    options = EverythingOptions(tmp_path / "found", 30, broken_stages.STAGES, BROKEN)
    assert not run_everything(options, said.append)
    records = {stage.name: read_record(options.output, stage.name) for stage in broken_stages.STAGES}
    assert all(records.values())
    found = {name: record for name, record in records.items() if record is not None}
    assert {name: record.state for name, record in found.items()} == {
        "raising": "failed", "unprepared": "ended", "hanging": "killed", "dying": "ended", "good": "passed"
    }  # fmt: skip
    assert [each.finding.passed for each in found["raising"].results] == [False, True]
    assert "ZeroDivisionError" in found["raising"].results[0].finding.words
    assert [each.name for each in found["dying"].results] == ["before"], "what was found until then stays"
    assert found["unprepared"].words.startswith("with exit code 1: ")
    assert found["unprepared"].words.endswith("ValueError: no such model")
    assert found["dying"].words.startswith("with exit code 7: ")
    assert found["dying"].words.endswith("an illegal memory access was encountered")
    page = (options.output / PAGE).read_text()
    assert "| the item of good | good | yes |" in page
    assert "| the item of dying | dying | **no** |" in page
    assert (REHEARSAL in page) != torch.cuda.is_available()
    assert not (options.output / command.SCRATCH).exists()


def test_what_is_over_is_not_run_again_and_what_was_interrupted_is(tmp_path: Path) -> None:
    *_, good = broken_stages.STAGES
    over, begun, late = (GPUStage(name, good.place, 300, ()) for name in ("over", "begun", "late"))
    GPUStageRecord(stage="over", state="killed", words="after 3 s").write(tmp_path)
    GPUStageRecord(stage="begun", state="running").write(tmp_path)
    said: list[str] = []
    stages = (over, begun, late)
    code = (
        "from bench.gpu.gpu_stages import GPUStage; "
        "from bench.gpu.stage_process import main; "
        f"main({stages!r}, lambda scratch: None)"
    )
    assert not run_everything(EverythingOptions(tmp_path, 30, stages, (sys.executable, "-c", code)), said.append)
    assert [line.split(":")[0] for line in said] == ["begun", "begun", "late", "late"]
    assert [getattr(read_record(tmp_path, each.name), "state", None) for each in stages] == [
        "killed", "passed", "passed"
    ]  # fmt: skip
    assert run_everything(EverythingOptions(tmp_path, 30, (begun, late), ("false",)), said.append)
    assert len(said) == 4, "nothing is left to do"


def test_stages_that_have_no_time_left_are_said_to_be_unreached(tmp_path: Path) -> None:
    said: list[str] = []
    assert not run_everything(EverythingOptions(tmp_path, 0.1, STAGES, ("false",)), said.append)
    assert said == [f"{stage.name}: not reached; the same command goes on from here" for stage in STAGES]
    assert "| products | not reached |  |" in (tmp_path / PAGE).read_text()


def test_another_file_in_the_place_of_a_record_is_named(tmp_path: Path) -> None:
    (tmp_path / "kept-rows.json").write_text("{}")
    with pytest.raises(UserError, match=r"kept-rows\.json: no record of"):
        read_record(tmp_path, "kept rows")


def test_the_page_says_what_is_proved_and_what_is_not() -> None:
    stages = [GPUStage(name, "", 1, ("both", name)) for name in ("one", "two", "three")]
    rows = [{"kernel": "cublas", "ms": 0.5}, {"kernel": "triton", "ms": 1234.5}]
    records = {
        "one": GPUStageRecord(stage="one", state="passed", seconds=3, results=(result("a", rows=rows),)),
        "two": GPUStageRecord(stage="two", state="passed", results=(result("b", unproved="no such thing here"),)),
        "three": None,
    }
    lines = page_of(stages, records).splitlines()
    assert {"| both | one, two, three | not reached |", "| one | one | yes |"} < set(lines)
    assert "| two | two | not tried: no such thing here |" in lines
    assert {"| one | passed | 3 |", "| cublas | 0.5 |", "| triton | 1,234 |", "a: fine (1.0 s)"} < set(lines)
    failed = {**records, "one": GPUStageRecord(stage="one", state="ended", words="with exit code 1")}
    assert "| both | one, two, three | **no** |" in page_of(stages, failed)


def test_every_item_that_no_gpu_has_shown_is_named_by_a_stage_or_said_to_have_none() -> None:
    page = (ROOT / "docs" / "gpu.md").read_text(encoding="utf-8")
    section = page.partition("## Unproved")[2]
    proved_by = {item: ", ".join(stage.name for stage in STAGES if item in stage.proves) for item in ITEMS}
    found = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("| ")]
    named = dict(cells for cells in found if cells[0] != "item")
    assert {item: names for item, names in named.items() if not names.startswith("none")} == proved_by
    bold = {item.rstrip(".:") for item in re.findall(r"^- \*\*(.+?)\*\*", section, re.MULTILINE)}
    assert len(bold) > 5
    assert bold <= set(named)


def test_a_machine_without_a_gpu_is_told_how_to_rehearse(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(BenchError, match=r"no GPU to measure.*TRITON_INTERPRET=1"):
        run_everything(EverythingOptions(tmp_path, 1))


def test_every_stage_has_a_name_and_a_function_of_its_own() -> None:
    places = [stage.module_and_function for stage in STAGES]
    assert len({stage.name for stage in STAGES}) == len(set(places)) == len(STAGES)
    assert all(callable(getattr(importlib.import_module(module), name)) for module, name in places)


@pytest.mark.parametrize(
    "stage",
    [
        pytest.param(stage, id=stage.name, marks=() if stage.name in QUICK else pytest.mark.slow)
        for stage in STAGES
        if stage.name not in NEEDS_COMMANDS
    ],
)
def test_a_stage_passes_in_the_interpreter(stage: GPUStage, tmp_path: Path) -> None:
    module, function = stage.module_and_function
    trial = Trial(CPU, tmp_path, SMALL_SIZES)
    record = tried(stage, getattr(importlib.import_module(module), function)(trial), tmp_path)
    assert record.state == "passed", record
    assert record.results


@pytest.mark.slow
@pytest.mark.parametrize("name", ["restart", "bits", "rows of kinds", "kinds of models", "tests"])
def test_a_stage_that_starts_processes_passes_too(name: str, tmp_path: Path) -> None:
    test_a_stage_passes_in_the_interpreter(next(stage for stage in STAGES if stage.name == name), tmp_path)


@pytest.mark.slow
def test_all_stages_pass_in_the_interpreter_one_after_the_other_without_ray(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    stages = [stage for stage in command.stages_here() if stage.name != "second process"]  # which has no such sums
    process = (sys.executable, "-m", interpreted_stages.__name__)
    has_passed = run_everything(EverythingOptions(tmp_path, 300, stages, process), print)
    records = [read_record(tmp_path, stage.name) for stage in stages]
    assert [record.state for record in records if record is not None] == ["passed"] * len(stages)
    assert has_passed


def test_the_command_says_where_its_tables_are_and_by_its_exit_code_whether_all_passed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[EverythingOptions] = []
    monkeypatch.setattr(command, "run_everything", lambda options, report: given.append(options) or len(given) > 1)
    asked = ["--everything", "--minutes", "9", "--output", str(tmp_path)]
    for exit_code in (1, 0):
        ran = CliRunner().invoke(gpu, asked)
        assert (ran.exit_code, ran.output) == (exit_code, f"tables: {tmp_path / PAGE}\n")
    assert (given[0].output, given[0].minutes) == (tmp_path, 9)
    assert CliRunner().invoke(gpu, ["--everything"]).exit_code == 2


@pytest.mark.parametrize("family", FAMILIES, ids=[each.name for each in FAMILIES])
def test_the_tensors_of_a_family_are_those_of_its_config_and_as_many_numbers_as_are_published(family: Family) -> None:
    dense = read_decoder_config(family.text_config)
    shapes = dict(shapes_of(dense))
    assert dense.tensor_names(set(shapes)) == set(shapes)
    counts = [0] * dense.num_layers
    for name, shape in shapes.items():
        if name.startswith("model.layers."):
            counts[int(name.split(".")[2])] += math.prod(shape)
    once = sum(math.prod(shape) for name, shape in shapes.items() if not name.startswith("model.layers."))
    first, repeated = counts[: family.num_first], counts[family.num_first :]
    in_layers = sum(first) + sum(repeated[each % len(repeated)] for each in range(family.num_layers - len(first)))
    assert once + in_layers == PUBLISHED_NUMBERS[family.name]


def test_the_page_of_gpus_lists_the_stages_in_their_order_with_their_times() -> None:
    page = (ROOT / "docs" / "gpu.md").read_text(encoding="utf-8")
    section = page.partition("## Everything in one command")[2].partition("\n## ")[0]
    cells = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("| ")][1:]
    assert [(name, int(seconds)) for name, _, seconds in cells] == [(stage.name, stage.seconds) for stage in STAGES]
