"""`swiftbatch bench all`: every benchmark in turn, a file of figures for each, and one page of tables."""

from __future__ import annotations

import datetime
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from swiftbatch.jobs.errors import UserError
from swiftbatch.jobs.run.option_values import Device
from swiftbatch.worker.bench.bench_engine import text_tokens
from swiftbatch.worker.bench.bench_options import BenchOptions
from swiftbatch.worker.bench.suite.speed_page import PAGE, draw_plots, page_of
from swiftbatch.worker.bench.suite.stage_file import MadeWith, StageFile, known, made_with, sha256_of, write_whole
from swiftbatch.worker.bench.suite.suite_stages import SuiteStage, stages_of
from swiftbatch.worker.model.model_files import ModelFiles, locate_model
from swiftbatch.worker.training.held_folder import held

Report = Callable[[str], None]


class SuiteOptions(BenchOptions):
    """A book, the folder for figures and page, and how much is measured."""

    device: Device = "cpu"
    text: Path
    output: Path
    is_small: bool = False


def run_suite(options: SuiteOptions, code: str, report: Report = lambda line: None) -> None:
    """Measure what the folder lacks, and write its page. `report` gets a line about each stage.

    `code` tells versions of the program apart. A stage that this model cannot run is told in a line and left out.
    Raises BenchError, ModelError, the latter where another process measures into the same folder, too.
    """
    with held(options.output):
        _run(options, code, report)


def _run(options: SuiteOptions, code: str, report: Report) -> None:
    files = locate_model(options.model)
    stages = list(stages_of(options.model_dump(exclude={"json_path", "output", "is_small"}), files, options.is_small))
    sha256 = sha256_of(options.text)
    asked = {stage.name: made_with(stage.options, sha256, files.fingerprint, code) for stage in stages}
    missing = [stage for stage in stages if not known(_path(options, stage), asked[stage.name], report)]
    if missing:
        text_tokens(options.text, files, max(_text_length(stage) for stage in missing))
    for number, stage in enumerate(stages, 1):
        name = f"stage {number} of {len(stages)}, {stage.name}"
        if stage not in missing:
            report(f"{name}: its figures are there")
            continue
        left = sum(each.minutes for each in missing[missing.index(stage) :])
        report(f"{name}: about {stage.minutes:g} minutes, {left:g} with all that follows; embedded model, 2 cores")
        try:
            _measure(stage, options, asked[stage.name], files, report)
        except UserError as error:
            report(f"{name}: left out: {error}")
            _path(options, stage).unlink(missing_ok=True)  # what another model or text left there
    draw_plots(options.output)
    write_whole(options.output / PAGE, page_of(options.output))


def _measure(stage: SuiteStage, options: SuiteOptions, asked: MadeWith, files: ModelFiles, report: Report) -> None:
    """Run one benchmark, which writes to a file aside, and put its figures in place once they are whole."""
    path = _path(options, stage)
    aside = path.with_name(f"{path.name}.running")
    started = time.monotonic()
    try:
        stage.run(stage.options.model_copy(update={"json_path": aside}), lambda line: report(f"  {line}"))
        figures = json.loads(aside.read_text(encoding="utf-8"))
    finally:
        aside.unlink(missing_ok=True)
    figures["settings"] = _without_places(figures["settings"], files)
    StageFile(
        stage=stage.name,
        date=datetime.datetime.now(datetime.UTC).date().isoformat(),
        seconds=round(time.monotonic() - started, 1),
        is_small=options.is_small,
        made_with=asked,
        figures=figures,
    ).write(path)


def _without_places(settings: dict[str, Any], files: ModelFiles) -> dict[str, Any]:
    """Settings without folders of this machine."""
    return settings | {
        "model": Path(files.name).name,
        "text": Path(settings["text"]).name if settings.get("text") else None,
    }


def _text_length(stage: SuiteStage) -> int:
    """Tokens of the book that a stage reads."""
    settings = stage.options.model_dump()
    longest: int = max(*settings.get("positions", ()), settings.get("position", 0), settings.get("prefill", 0))
    return longest


def _path(options: SuiteOptions, stage: SuiteStage) -> Path:
    return options.output / f"{stage.name}.json"
