"""A broken stage costs only itself, and found records stay."""

from __future__ import annotations

import json
import math
import os
import re
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from bench.__main__ import main
from bench.gpu import everything
from bench.gpu.everything import (
    FIRST,
    PAGE,
    REHEARSAL,
    STAGES,
    GPUStage,
    last_of,
    page_of,
    records_of,
    run_everything,
    tried,
)
from bench.gpu.first import starts_of
from bench.gpu.trial import FAMILIES, LLAMA_8B, SMALL_SIZES, Family, Trial, shapes_of
from bench.sizing import DENSE, EXPERTS, WINDOWED
from bench.tables import Record
from swiftbatch.worker.decode_bench import BenchError
from swiftbatch.worker.model.decoder_config import read_decoder_config
from tests import ROOT
from tests.bench.gpu import broken_stages
from tests.readme.command_lines import page, section, table

pytestmark = pytest.mark.long

CPU = torch.device("cpu")
NEEDS_COMMANDS = (  # they start processes
    *("bits", "rows of kinds", "kinds of models", "tests", "Ray", "a model over Ray", "second process"),
)
PUBLISHED_NUMBERS = {  # models in docs/gpu_lab_book.md; Qwen3.5's follows from its config
    "Llama 3.1 8B": DENSE["Llama 3.1 8B"].num_parameters - 128_256 * 4096,  # embedding and head share a matrix
    "Qwen3.5 27B": 26_895_998_464,
    "Qwen3 30B A3B": EXPERTS["Qwen3 30B A3B"][0].num_parameters,
    "gpt-oss 20B": EXPERTS["gpt-oss-20b"][0].num_parameters,
    "GLM 4.7 Flash": EXPERTS["GLM 4.7 Flash"][0].num_parameters,
    "Gemma 3 27B": WINDOWED["Gemma 3 27B"].num_parameters,
}
LAB_BOOK = page("docs/gpu_lab_book.md")
ITEMS = {item for stage in STAGES for item in stage.proves}
QUICK = ("host", "graph memory", "loading", "flash")


@pytest.fixture(autouse=True)
def _found_by_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(everything, "INTERPRETED", 1)


def run_all(folder: Path, *stages: GPUStage, minutes: float = 30) -> tuple[bool, list[Record]]:
    found: list[Record] = []
    try:
        for record in run_everything(folder, minutes, stages):
            found.append(record)
    except SystemExit as end:
        return not end.code, found
    return True, found


def test_an_error_a_hang_and_a_sudden_end_cost_one_stage_each(tmp_path: Path) -> None:
    folder = tmp_path / "found"
    has_passed, found = run_all(folder, *broken_stages.STAGES)
    assert not has_passed
    assert {record["stage"]: record["state"] for record in found} == {
        "raising": "failed", "unprepared": "ended", "hanging": "killed", "dying": "ended", "good": "passed"
    }  # fmt: skip
    raising, unprepared, _, dying, _ = broken_stages.STAGES
    assert [each["passed"] for each in records_of(raising, folder)[:-1]] == [False, True]
    assert "ZeroDivisionError" in records_of(raising, folder)[0]["words"]
    assert [each["try"] for each in records_of(dying, folder)[:-1]] == ["before"], "what was found until then stays"
    assert last_of(unprepared, folder)["words"].startswith("with exit code 1: ")
    assert last_of(unprepared, folder)["words"].endswith("ValueError: no such model")
    assert last_of(dying, folder)["words"].startswith("with exit code 7: ")
    assert last_of(dying, folder)["words"].endswith("an illegal memory access was encountered")
    written = (folder / PAGE).read_text()
    assert "| the item of good | good | yes |" in written
    assert "| the item of dying | dying | **no** |" in written
    assert (REHEARSAL in written) != torch.cuda.is_available()
    assert not (folder / everything.SCRATCH).exists()


def test_what_is_over_is_not_run_again_and_what_was_interrupted_is(tmp_path: Path) -> None:
    over, begun, late = (GPUStage(name, broken_stages.STAGES[-1].place, 300) for name in ("over", "begun", "late"))
    over.path(tmp_path).write_text('{"stage": "over", "state": "killed"}\n')
    begun.path(tmp_path).write_text('{"try": "one", "passed": true}\n')
    has_passed, found = run_all(tmp_path, over, begun, late)
    assert not has_passed
    assert [(record["stage"], record["state"]) for record in found] == [("begun", "passed"), ("late", "passed")]
    assert run_all(tmp_path, begun, late) == (True, [])


def test_stages_that_have_no_time_left_are_said_to_be_unreached(tmp_path: Path) -> None:
    has_passed, found = run_all(tmp_path, *STAGES, minutes=0.1)
    assert (has_passed, {record["state"] for record in found}) == (False, {"not reached"})


def test_the_page_says_what_is_proved_and_what_is_not(tmp_path: Path) -> None:
    stages = [GPUStage(name, "", 1, ("both", name)) for name in ("one", "two", "three")]
    found = '{"try": "a", "passed": true, "words": "fine", "seconds": 1.0, "unproved": %s, "rows": [{"ms": 1234.5}]}\n'
    passed = '{"stage": "one", "state": "passed", "words": "", "seconds": 3}\n'
    stages[0].path(tmp_path).write_text(found % "null" + passed)
    stages[1].path(tmp_path).write_text(found % '"no such thing here"' + passed)
    lines = page_of(stages, tmp_path).splitlines()
    assert {"| both | one, two, three | not reached |", "| one | one | yes |"} < set(lines)
    assert "| two | two | not tried: no such thing here |" in lines
    assert {"| one | passed | 3 | - |", "| 1,234 |", "a: fine (1.0 s)"} < set(lines)
    stages[0].path(tmp_path).write_text(
        '{"stage": "one", "state": "ended", "words": "with exit code 1", "seconds": 1}\n'
    )
    assert "| both | one, two, three | **no** |" in page_of(stages, tmp_path)


def test_the_lab_book_lists_the_stages_in_their_order_with_what_they_prove_and_their_times() -> None:
    told = [(name, items, int(seconds)) for name, _, items, seconds in table(LAB_BOOK, "stage")]
    assert told == [(stage.name, ", ".join(stage.proves), stage.seconds) for stage in STAGES]


def test_every_item_that_no_gpu_has_shown_is_proved_by_a_stage_or_by_hand() -> None:
    unproved = section(LAB_BOOK, "Unproved until a GPU has run it")
    items = set(re.findall(r"^- \*\*(.+?)\.?\*\*", unproved, re.MULTILINE))
    assert len(items) > 5
    assert items - ITEMS == {"The image", "The manifests"}


def test_a_machine_without_a_gpu_is_told_how_to_rehearse(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(BenchError, match=r"no GPU to measure.*TRITON_INTERPRET=1"):
        next(run_everything(tmp_path, 1))


@pytest.mark.parametrize(
    "stage",
    [
        pytest.param(stage, id=stage.name, marks=() if stage.name in QUICK else pytest.mark.slow)
        for stage in STAGES
        if stage.name not in NEEDS_COMMANDS
    ],
)
def test_a_stage_passes_in_the_interpreter(stage: GPUStage, tmp_path: Path) -> None:
    record = tried(stage, Trial(CPU, tmp_path, SMALL_SIZES), tmp_path)
    assert record["state"] == "passed", records_of(stage, tmp_path)
    assert len(records_of(stage, tmp_path)) > 1


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Ray", "a model over Ray", "bits", "rows of kinds", "kinds of models", "tests"])
def test_a_stage_that_starts_processes_passes_too(name: str, tmp_path: Path) -> None:
    test_a_stage_passes_in_the_interpreter(next(stage for stage in STAGES if stage.name == name), tmp_path)


def test_the_command_tells_by_its_exit_code_whether_all_passed(tmp_path: Path) -> None:
    ran = CliRunner().invoke(main, ["gpu", "--everything", "--minutes", "0.1", "--output", str(tmp_path)])
    assert ran.exit_code == 1
    assert "not reached" in ran.output


def test_the_first_stages_take_less_than_a_quarter_of_an_hour_and_everything_goes_on_behind_them(
    tmp_path: Path,
) -> None:
    assert sum(stage.seconds for stage in FIRST) < 15 * 60
    assert STAGES[: len(FIRST)] == FIRST
    ran = CliRunner().invoke(main, ["gpu", "--first", "--minutes", "0.1", "--output", str(tmp_path)])
    assert ran.exit_code == 1
    assert ran.output.count('"not reached"') == len(FIRST)


def test_stages_without_a_folder_for_what_they_find_are_refused() -> None:
    ran = CliRunner().invoke(main, ["gpu", "--first"])
    assert (ran.exit_code, "--output found" in ran.output) == (2, True)


def test_a_driver_s_log_tells_when_its_workers_were_ready(tmp_path: Path) -> None:
    log = tmp_path / "driver-1.log"
    told = [
        {"event": "run_opened", "time": 10.0},
        {"event": "worker_ready", "time": 15.5, "worker": "w1", "seconds": {"imports": 2.0, "weights": 1.25}},
    ]
    log.write_text("".join(json.dumps(each) + "\n" for each in told) + '{"event": "worker_lost", "ti')
    ready = {"driver": "driver-1", "event": "worker_ready", "s": 5.5, "a worker's start, s": "imports 2.0, weights 1.2"}
    assert list(starts_of(log)) == [ready]


@pytest.mark.parametrize("family", [LLAMA_8B, *FAMILIES], ids=lambda each: each.name)
def test_the_tensors_of_a_family_are_those_of_its_config_and_as_many_numbers_as_are_published(family: Family) -> None:
    dense = read_decoder_config(family.text_config)
    shapes = dict(shapes_of(family.text_config))
    assert dense.tensor_names(set(shapes)) == set(shapes)
    counts = [0] * dense.num_layers
    for name, shape in shapes.items():
        if name.startswith("model.layers."):
            counts[int(name.split(".")[2])] += math.prod(shape)
    once = sum(math.prod(shape) for name, shape in shapes.items() if not name.startswith("model.layers."))
    first, repeated = counts[: family.num_first], counts[family.num_first :]
    in_layers = sum(first) + sum(repeated[each % len(repeated)] for each in range(family.num_layers - len(first)))
    assert once + in_layers == PUBLISHED_NUMBERS[family.name]
