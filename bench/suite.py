"""`python -m bench all`: every benchmark in turn, a file of figures for each, and one page of tables."""

from __future__ import annotations

import datetime
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.agreement import AgreementOptions, run_agreement_bench
from bench.auto import AutoBenchOptions, run_auto_bench
from bench.checkpoints import CheckpointBenchOptions, run_checkpoint_bench
from bench.fields import FieldBenchOptions, run_field_bench
from bench.kernels import KernelBenchOptions, run_kernel_bench
from bench.long import LongBenchOptions, run_long_bench
from bench.speed_page import PAGE, draw_plots, page_of
from bench.stage_file import MadeWith, StageFile, known, made_with, sha256_of, write_whole
from swiftbatch.jobs.errors import ModelError, UserError
from swiftbatch.jobs.run.compute_options import Device
from swiftbatch.worker.bench_texts import text_tokens
from swiftbatch.worker.decode_bench import BenchOptions, DecodeBenchOptions, run_decode_bench
from swiftbatch.worker.drafters.catalogue import ENGINES, check_parts
from swiftbatch.worker.model.model_files import ModelFiles, locate_model
from swiftbatch.worker.training.training_lock import held

SMALL_MINUTES = 0.5  # of each stage, with few tokens
PLACES = ("positions", "lengths")  # options that hold positions

SAMPLED: dict[str, Any] = {"min_p": 0.1, "seed": 0}
PENALTY: dict[str, Any] = {"repetition_penalty": 1.2, "penalty_window": 1024}
ALL_ENGINES = ("autoregressive", *(name for name in ENGINES if name != "autoregressive"))
DECODE: dict[str, Any] = SAMPLED | {"engines": ALL_ENGINES, "repetition_penalty": 1.0}
AUTO: dict[str, Any] = SAMPLED | {"temperatures": (1.0,), "num_repetitions": 1}


@dataclass(frozen=True)
class StageKind:
    """A benchmark with what it is asked for, in full and, where that differs, in a small run."""

    name: str
    minutes: float  # in full, with the embedded model on two cores
    options: type[BenchOptions]
    run: Callable[[Any, Callable[[str], None]], object]
    num_behind: int  # most positions that it needs behind each of its places
    asked: dict[str, Any]
    small: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class SuiteStage:
    """A stage as it runs for one model: its options lack the file for the figures."""

    name: str
    minutes: float
    options: BenchOptions
    run: Callable[[Any, Callable[[str], None]], object]


STAGES = (
    StageKind(
        "kernels",
        0.5,
        KernelBenchOptions,
        run_kernel_bench,
        32,
        {"lengths": (0, 2048, 20_480, 102_400), "row_counts": (1, 8, 32), "num_rounds": 7},
        {"lengths": (0, 1024), "row_counts": (1, 8), "num_rounds": 1},
    ),
    StageKind(
        "decode",
        5,
        DecodeBenchOptions,
        run_decode_bench,
        512,
        DECODE | {"positions": (3000, 20_000, 50_000, 98_000), "num_tokens": 512, "temperature": 1.0},
        {"positions": (256, 1024), "num_tokens": 32},
    ),
    StageKind(
        "greedy",
        1.5,
        DecodeBenchOptions,
        run_decode_bench,
        256,
        DECODE | {"positions": (3000, 50_000), "num_tokens": 256, "temperature": 0.0},
        {"positions": (256,), "num_tokens": 32},
    ),
    StageKind(
        "auto",
        5,
        AutoBenchOptions,
        run_auto_bench,
        512,
        AUTO
        | {"engines": ("token-recycling", "triforce"), "positions": (2048, 16_384)}
        | {"slot_counts": (1, 8), "num_tokens": (256,)},
        {"positions": (256,), "slot_counts": (1,)},
    ),
    StageKind(
        "short-jobs",
        0.5,
        AutoBenchOptions,
        run_auto_bench,
        2048,
        AUTO
        | {"engines": ("token-recycling",), "positions": (2048,)}
        | {"slot_counts": (1,), "num_tokens": (64, 1024)},
        {"positions": (256,), "num_tokens": (64,)},
    ),
    StageKind(
        "slots",
        1.5,
        AutoBenchOptions,
        run_auto_bench,
        512,
        AUTO | {"engines": (), "positions": (512,), "slot_counts": (8, 16, 32), "num_tokens": (256,)},
        {"slot_counts": (1, 2)},
    ),
    StageKind(
        "fields",
        1.5,
        FieldBenchOptions,
        run_field_bench,
        4000,
        SAMPLED
        | {"engine": "autoregressive", "position": 2048, "temperature": 1.0}
        | {"num_tokens": 2000, "num_rounds": 50},
        {"position": 64, "num_tokens": 64, "num_rounds": 4},
    ),
    StageKind(
        "agreement",
        2,
        AgreementOptions,
        run_agreement_bench,
        256,
        SAMPLED
        | {"caches": ("streaming:512", "retrieval:4096", "summary:2048", "scan:256"), "temperatures": (1.0,)}
        | {"positions": (16_384, 60_000), "num_tokens": 256},
        {"positions": (1024,), "num_tokens": 16},
    ),
    StageKind(
        "checkpoints",
        1.5,
        CheckpointBenchOptions,
        run_checkpoint_bench,
        8192,
        {"engine": "auto", "positions": (4096, 20_000), "checkpoint_tokens": 1024, "num_rounds": 5},
        {"positions": (256,), "checkpoint_tokens": 512, "num_rounds": 1},
    ),
    StageKind(
        "long",
        7,
        LongBenchOptions,
        run_long_bench,
        100_000,
        {"engine": "auto", "prefill": 4096, "every": 20_000, "plain_every": 2500}
        | {"sampling": SAMPLED | PENALTY | {"temperature": 1.0, "max_tokens": 100_000, "ignore_eos": True}},
        {"prefill": 64, "every": 128, "plain_every": 64}
        | {"sampling": SAMPLED | PENALTY | {"temperature": 1.0, "max_tokens": 256, "ignore_eos": True}},
    ),
)


def stages_of(computing: dict[str, Any], files: ModelFiles, is_small: bool) -> Iterator[SuiteStage]:
    """Yield the stages of a model: places and lengths as far as it has positions, engines as far as it has parts.

    `computing` holds the fields that all have in common. A stage that has nothing left is left out.
    """
    for kind in STAGES:
        asked = kind.asked | (kind.small if is_small else {})
        num_behind = 0 if is_small else kind.num_behind
        fitted = _fitted(asked, files, num_behind)
        if fitted is not None:
            given = {name: value for name, value in computing.items() if name in kind.options.model_fields}
            minutes = SMALL_MINUTES if is_small else kind.minutes
            yield SuiteStage(kind.name, minutes, kind.options.model_validate(given | fitted), kind.run)


def _fitted(asked: dict[str, Any], files: ModelFiles, num_behind: int) -> dict[str, Any] | None:
    """Cut the options of a benchmark to this model; None where the model has no position that they need."""
    fitted = dict(asked)
    if "engines" in asked:
        fitted["engines"] = tuple(name for name in asked["engines"] if _has_parts(name, files))
    for name in PLACES:
        if name in asked:
            fitted[name] = tuple(place for place in asked[name] if place + num_behind <= files.max_positions)
            if not fitted[name]:
                return None
    if "position" in asked and asked["position"] + num_behind > files.max_positions:
        return None
    if "prefill" in asked:
        room = files.max_positions - asked["prefill"]
        if room < asked["every"]:
            return None
        sampling = asked["sampling"]
        fitted["sampling"] = sampling | {"max_tokens": min(room, sampling["max_tokens"])}
    return fitted


def _has_parts(engine: str, files: ModelFiles) -> bool:
    try:
        check_parts(engine, str(files.path), files.fingerprint, None)
    except ModelError:
        return False
    return True


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
