"""Runs the benchmarks of docs/speed.md and makes one page of tables."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from bench import agreement, auto, checkpoints, fields, kernels, long
from bench.options import machine_facts
from bench.tables import Record, only, pivot, tables
from swiftbatch.jobs.errors import UserError
from swiftbatch.scheduler.commands.options.option_types import say
from swiftbatch.worker.decode_bench import BenchOptions, DecodeBenchOptions, run_decode_bench
from swiftbatch.worker.drafters.catalogue import ENGINES

MACHINE, PAGE = "machine.json", "speed.md"
BEGIN, END = "<!-- figures: {} -->", "<!-- end of the figures -->"
decode = SimpleNamespace(Options=DecodeBenchOptions, run=run_decode_bench)
DECODE = {"engines": tuple(ENGINES), "min_p": 0.1, "seed": 0, "repetition_penalty": 1.0}
PENALTY = {"repetition_penalty": 1.2, "penalty_window": 1024, "temperature": 1.0}


@dataclass(frozen=True)
class SuiteStage:
    """A benchmark with its options, in full and in a small run."""

    name: str
    module: Any
    asked: dict[str, Any] = field(default_factory=dict)
    small: dict[str, Any] = field(default_factory=dict)


STAGES = (
    SuiteStage("kernels", kernels, {}, {"lengths": (0, 1024), "rows": (1, 8), "num_rounds": 1}),
    SuiteStage(
        *(
            "decode",
            decode,
            DECODE | {"positions": (3000, 20_000, 50_000, 98_000), "num_tokens": 512, "temperature": 1.0},
        ),
        {"positions": (256, 1024), "num_tokens": 32},
    ),
    SuiteStage(
        *("greedy", decode, DECODE | {"positions": (3000, 50_000), "num_tokens": 256, "temperature": 0.0}),
        {"positions": (256,), "num_tokens": 32},
    ),
    SuiteStage(
        *("auto", auto, {"engines": ("token-recycling", "triforce"), "positions": (2048, 16_384), "slots": (1, 8)}),
        {"positions": (256,), "slots": (1,)},
    ),
    SuiteStage(
        *("short-jobs", auto, {"engines": ("token-recycling",), "positions": (2048,), "slots": (1,)}),
        {"num_tokens": (64,), "positions": (256,)},
    ),
    SuiteStage("slots", auto, {"engines": (), "positions": (512,), "slots": (8, 16, 32)}, {"slots": (1, 2)}),
    SuiteStage("fields", fields, {}, {"position": 64, "num_tokens": 64, "num_rounds": 4}),
    SuiteStage(
        "agreement",
        agreement,
        {
            "caches": ("streaming:512", "retrieval:4096", "summary:2048", "scan:256"),
            "positions": (16_384, 60_000),
        },
        {"positions": (1024,), "num_tokens": 16},
    ),
    SuiteStage(
        *("checkpoints", checkpoints, {"positions": (4096, 20_000), "checkpoint_tokens": 1024}),
        {"positions": (256,), "checkpoint_tokens": 512, "num_rounds": 1},
    ),
    SuiteStage("long", long, PENALTY, {"num_tokens": 256, "prefill": 64, "every": 128, "plain_every": 64}),
)


class Options(BenchOptions):
    text: Path | None = None
    output: Path
    small: bool = False
    page: Path | None = None  # a page that gets the folder's tables; nothing is measured


def run(options: Options) -> Iterator[Record]:
    """Run the other benchmarks one after the other, and write their tables to one page.

    With the embedded model on two cores it takes about 25 minutes. The text must have 100,000 tokens. Every stage
    leaves a file in the folder. The same command runs only what is missing. With --page docs/speed.md the folder's
    tables go to that page, and nothing is measured.

    \b
    Example:
      python -m bench all --text book.txt --output figures
    """
    if (page := options.page) is not None:
        place = options.output.resolve().relative_to(page.parent.resolve()).as_posix()
        page.write_text(with_figures(page.read_text(encoding="utf-8"), options.output, place), encoding="utf-8")
        return
    options.output.mkdir(parents=True, exist_ok=True)
    machine = machine_facts(options) | ({"small": "these say nothing about speed"} if options.small else {})
    (options.output / MACHINE).write_text(json.dumps(machine, indent=1) + "\n", encoding="utf-8")
    for stage in STAGES:
        path = options.output / f"{stage.name}.jsonl"
        if path.exists():
            continue
        given = options.model_dump(include={"model", "dtype", "num_threads", "text"})
        asked = {name: value for name, value in given.items() if name in stage.module.Options.model_fields}
        asked |= stage.asked | (stage.small if options.small else {})
        say(f"{stage.name}: {asked}")
        started, state = time.monotonic(), "measured"
        try:
            records = list(stage.module.run(stage.module.Options(**asked)))
        except UserError as error:
            records, state = [], f"left out: {error}"
        path.write_text("".join(f"{json.dumps(each, default=str)}\n" for each in records), encoding="utf-8")
        yield {"stage": stage.name, "seconds": time.monotonic() - started, "state": state}
    (options.output / PAGE).write_text("\n".join(["# Speed", "", *page_of(options.output)]) + "\n", encoding="utf-8")


def _place(record: Record) -> tuple[float, int]:
    return record["temperature"], record["position"]


def _decode(records: list[Record]) -> list[Record]:
    plain = {_place(each): each for each in records if each["engine"] == "autoregressive"}
    rows = pivot(records, ("temperature", "position"), "engine", ("speedup",))
    return [
        {"T": row["temperature"], "position": row["position"], "ms of plain decoding": plain[place]["ms_per_token"]}
        | {name: value for name, value in row.items() if name in ENGINES and name != "autoregressive"}
        | {"same tokens": len({each["tokens_sha256"] for each in records if _place(each) == place}) == 1}
        for row in rows
        for place in [_place(row)]
    ]


def _grid(records: list[Record]) -> list[Record]:
    names = dict.fromkeys(name for each in records for name in each["tokens_per_second"])
    places = ("position", "num_sequences", "num_tokens", "plain_tokens_per_second")
    return [
        {name: each[name] for name in places}
        | {
            name: found / each["plain_tokens_per_second"] if (found := each["tokens_per_second"].get(name)) else None
            for name in names
            if name != "autoregressive"
        }
        | {"same tokens": each["same_tokens"]}
        for each in records
    ]


def _forwards(records: list[Record]) -> list[Record]:
    whole = (each for each in records if "torch_ms" in each)
    return pivot(whole, ("length",), "num_rows", ("ms", "of_allowed", "speedup"))


SECTIONS: tuple[tuple[str, tuple[str, ...], str, Callable[[list[Record]], list[Record]]], ...] = (
    (
        "One long text",
        ("long",),
        "Plain decoding was sampled at places of the same run.",
        lambda found: only(found, long.COLUMNS),
    ),
    (
        *("The engines side by side", ("decode", "greedy")),
        "The speed-up over plain decoding in the same run; T = 0 is greedy, above that min-p is 0.1.",
        _decode,
    ),
    (
        *("Batches and short jobs", ("auto", "short-jobs", "slots")),
        "Plain decoding in tokens a second, all jobs together, and the speed-up over it. Jobs follow each other, and "
        "the time to start one counts. T = 1 with min-p 0.1.",
        _grid,
    ),
    (
        *("What fields of a line cost", ("fields",)),
        "One stream of plain decoding, the median of rounds beside a line that says nothing.",
        lambda found: only(found, ("field", "ms_per_token", "ratio")),
    ),
    (
        *("Partial caches", ("agreement",)),
        "The share of tokens that are drawn alike with a part of the keys, and the time of such a round.",
        lambda found: pivot(found, ("cache",), "position", ("share_alike", "round_ms", "plain_ms")),
    ),
    (
        *("Checkpoints", ("checkpoints",)),
        "A state every 1,024 tokens, and the seconds until a resumed job has its next token, from its state and from "
        "its tokens.",
        lambda found: only(
            found, ("position", "overhead", "segment_MiB", "kv_seconds", "replay_seconds", "same_tokens")
        ),
    ),
    (
        "Forwards",
        ("kernels",),
        "Whole forwards by rows: ms, of what the machine allows, times `transformers`' speed.",
        _forwards,
    ),
)


def page_of(folder: Path) -> Iterator[str]:
    made = json.loads((folder / MACHINE).read_text(encoding="utf-8"))
    yield "; ".join(f"{name} {value}" for name, value in made.items())
    for title, stages, words, layout in SECTIONS:
        files = [path for name in stages if (path := folder / f"{name}.jsonl").exists()]
        if records := [json.loads(line) for path in files for line in path.read_text(encoding="utf-8").splitlines()]:
            yield from ("", f"## {title}", "", words, "", tables(layout(records), is_markdown=True))


def with_figures(text: str, folder: Path, place: str) -> str:
    before, _, rest = text.partition(BEGIN.split("{}", maxsplit=1)[0])
    after = rest.partition(END)[2]
    return "\n".join([before + BEGIN.format(place), "", *page_of(folder), "", END]) + after
