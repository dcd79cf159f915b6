"""The Token Recycling paper's table and figures, over prompts by task."""

from __future__ import annotations

import copy
import math
import random
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import Field

from bench.options import ALL, one_of
from bench.recycling_baselines import DatastoreDrafter, LookaheadDrafter, medusa
from bench.tables import Curve, Record
from bench.tasks import OWN_TASKS, Task, chat_ids, read_tasks
from swiftbatch.jobs.job import Message
from swiftbatch.jobs.sampling_params import SamplingParams
from swiftbatch.metrics.counters import timed
from swiftbatch.worker.decode_bench import (
    BASELINE,
    BenchEngine,
    BenchError,
    BenchOptions,
    bench_slots,
    check_length,
    digest,
    drafter_factory,
    encode,
    read_text,
    read_tokens,
)
from swiftbatch.worker.drafters.drafter_interface import Drafter
from swiftbatch.worker.forward.step_costs import Costs, step_costs_of
from swiftbatch.worker.forward.target_model import TargetModel
from swiftbatch.worker.kv.full_cache import FullKVCache
from swiftbatch.worker.model.model_files import locate_model
from swiftbatch.worker.sampling.sequence import Sequence
from swiftbatch.worker.text.tokenizer import TextCodec

PAPER, LOOKAHEAD, REST, MEDUSA = "token-recycling-paper", "lookahead", "rest", "medusa"
TEMPLATE_ROOM = 64  # tokens that a chat template may add to a turn
PARTS = ("preparing", "retrieving", "forward", "verifying", "updating")
Layout = Literal["tasks", "arms", "parts"]
"""Columns are tasks; rows are arms; rows are the parts of a step."""


@dataclass(frozen=True)
class RecyclingArm:
    """An engine with its options NAME=VALUE. It keeps what it learned from one prompt to the next."""

    label: str
    engine: str = PAPER
    options: tuple[str, ...] = ()
    is_shuffled: bool = False


@dataclass(frozen=True)
class RecyclingTable:
    """A table or figure; `header` names its arms."""

    title: str
    header: str
    arms: tuple[RecyclingArm, ...]
    layout: Layout = "arms"


PLAIN = RecyclingArm(BASELINE, BASELINE)
NODES = (10, 20, 40, 60, 80, 100, 120)
DEPTHS = (1, 2, 3, 4, 5, 6, 8, 10)


def _varied(name: str, values: Iterable[Any], *fixed: str) -> tuple[RecyclingArm, ...]:
    return tuple(RecyclingArm(str(value), options=(*fixed, f"{name}={value}")) for value in values)


RECYCLING_TABLES = {
    "1": RecyclingTable(
        "Table 1: speed-up over plain decoding by task; prompt-lookup and token-recycling draft where it pays, all "
        "others at every step",
        "method",
        (
            RecyclingArm("prompt-lookup", "prompt-lookup"),
            RecyclingArm("lookahead", LOOKAHEAD),
            RecyclingArm("rest", REST),
            RecyclingArm("Medusa-1", MEDUSA),
            RecyclingArm("token-recycling", "token-recycling"),
            RecyclingArm(PAPER),
            RecyclingArm("the same, shuffled", is_shuffled=True),
        ),
        "tasks",
    ),
    "3a": RecyclingTable(
        "Figure 3a: breadth, nodes of a tree of depth 6", "nodes", _varied("max_nodes", NODES, "tree=measured")
    ),
    "3b": RecyclingTable(
        "Figure 3b: depth of a tree of 80 nodes", "depth", _varied("max_depth", DEPTHS, "tree=measured")
    ),
    "3c": RecyclingTable(
        "Figure 3c: which row of a repeated token counts", "update", _varied("update", ("first", "last", "merged"))
    ),
    "4": RecyclingTable("Figure 4: milliseconds of a step", "part", (RecyclingArm(PAPER),), "parts"),
    "k": RecyclingTable(
        "Candidates that the matrix keeps of a token; the paper has 8", "k", _varied("candidates", (1, 2, 4, 8))
    ),
}
CURVES = {name: Curve(RECYCLING_TABLES[name].header, (("MAT",), ("tokens/s",))) for name in ("3a", "3b", "3c", "k")}


class Options(BenchOptions):
    table: str = ALL  # a name in `RECYCLING_TABLES`
    prompts: Path = OWN_TASKS  # a file of SpecBench, MT-Bench, HumanEval, GSM8K or MBPP, or lines {category, prompt}
    per_category: int = Field(default=8, ge=1)  # prompts, drawn with the seed
    num_tokens: int = Field(default=128, ge=2)  # of an answer at most
    temperature: float = Field(default=0.0, ge=0.0)
    datastore: Path | None = None  # the text of `rest` in table 1
    medusa: Path | None = Field(default=None, description="Folder of Medusa's heads, for their row of table 1.")
    seed: int = 0

    def arms(self) -> list[RecyclingArm]:
        arms = one_of(RECYCLING_TABLES, self.table).arms
        needed = {REST: self.datastore, MEDUSA: self.medusa}
        return [arm for arm in arms if needed.get(arm.engine, self.prompts) is not None]

    def tasks(self) -> list[Task]:
        """Return prompts of each category, one category after the other. Raises BenchError."""
        chance, by_category = random.Random(self.seed), defaultdict[str, list[Task]](list)
        for task in read_tasks(self.prompts):
            by_category[task.category].append(task)
        return [
            task
            for tasks in by_category.values()
            for task in (tasks if len(tasks) <= self.per_category else chance.sample(tasks, self.per_category))
        ]


def each_table(options: Options) -> list[Options]:
    names = RECYCLING_TABLES if options.table == ALL else (options.table,)
    return [options.model_copy(update={"table": name}) for name in names]


def run(options: Options) -> Iterator[Record]:
    """Repeat a table or figure of the Token Recycling paper over prompts by task.

    Every engine answers the same prompts, as plain decoding does, and must give the same tokens. `shuffled` mixes the
    tasks. REST looks for matches in --datastore FILE.

    \b
    Example:
      python -m bench papers token-recycling --table 1 --prompts question.jsonl --runs 5 --json table1.jsonl
    """
    arms, tasks, files = options.arms(), options.tasks(), locate_model(options.model)
    longest = max(sum(len(encode(files, text)) + TEMPLATE_ROOM for text in task.turns) for task in tasks)
    num_answers = max(len(task.turns) for task in tasks)
    check_length(files, longest, num_answers * options.num_tokens)
    target = options.load(files, bench_slots([PAPER], longest + num_answers * options.num_tokens))
    costs = step_costs_of(target)
    store = [] if options.datastore is None else encode(files, read_text(options.datastore))
    for is_shuffled in sorted({arm.is_shuffled for arm in arms}):
        ordered = random.Random(options.seed).sample(tasks, len(tasks)) if is_shuffled else tasks
        alike = [PLAIN, *(arm for arm in arms if arm.is_shuffled == is_shuffled)]
        drafters = {arm.label: new_drafter(arm, target, costs, store, options.medusa) for arm in alike}
        engines = {label: TimedParts(target, drafter) for label, drafter in drafters.items()}
        yield from _answered(options, target, engines, ordered)


def shown(records: list[Record], options: Options) -> Iterator[Record]:
    table = RECYCLING_TABLES[options.table]
    yield {"words": table.title}
    if table.layout == "parts":
        total = _sum(records, PAPER)
        for part in PARTS:
            ms = 1000 * total[part] / total["num_steps"]
            yield {"part": part, "ms per step": ms, "share": total[part] / sum(total[name] for name in PARTS)}
        return
    categories = list(dict.fromkeys(record["category"] for record in records))
    for label in dict.fromkeys(record["arm"] for record in records):
        row: Record = {table.header: label}
        if table.layout == "tasks":
            row |= {category: _sum(records, label, category)["speed-up"] for category in categories}
        yield row | {name: _sum(records, label)[name] for name in ("MAT", "tokens/s", "speed-up")}


def _sum(records: list[Record], label: str, category: str | None = None) -> Record:
    """Add up an arm's records; speed-up is over plain decoding of the same answers."""
    own = [each for each in records if each["arm"] == label and category in (None, each["category"])]
    total = {name: math.fsum(each[name] for each in own) for name in SUMMED}
    return total | {
        "MAT": total["num_tokens"] / total["num_steps"],
        "tokens/s": total["num_tokens"] / total["seconds"],
        "speed-up": total["plain_seconds"] / total["seconds"],
    }


SUMMED = ("num_tokens", "num_steps", "seconds", "plain_seconds", *PARTS)


class TimedParts(BenchEngine):
    """An engine that also times the forward and the walk of each step."""

    def __init__(self, target: TargetModel, drafter: Drafter) -> None:
        super().__init__(copy.copy(target), drafter)
        self._own = {"forward": 0.0, "verifying": 0.0}
        for owner, name, part in ((self.target, "verify", "forward"), (self._batch_sampler, "walks", "verifying")):
            setattr(owner, name, self._timing(part, getattr(owner, name)))

    def _timing(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            with timed(self._own, part):
                return function(*arguments)

        return call

    def figures(self) -> dict[str, float]:
        """Return counts and seconds so far, by the parts of the paper's figure 4."""
        seconds, own = self.counters.step_seconds, self._own
        return own | {
            "num_tokens": self.counters.num_generation_tokens,
            "num_steps": self.counters.num_steps,
            "preparing": seconds["verify"] - own["forward"] - own["verifying"],
            "retrieving": seconds["propose"],
            "updating": seconds["commit"],
        }


def new_drafter(arm: RecyclingArm, target: TargetModel, costs: Costs, store: list[int], heads: Path | None) -> Drafter:
    if arm.engine == LOOKAHEAD:
        return LookaheadDrafter()
    if arm.engine == REST:
        return DatastoreDrafter(store)
    if arm.engine == MEDUSA:
        return medusa(target, heads)
    return drafter_factory(arm.engine, arm.options)(target, costs, None)


def _answered(
    options: Options, target: TargetModel, engines: dict[str, TimedParts], tasks: list[Task]
) -> Iterator[Record]:
    """Yield a record for each engine and turn; engines take turns in being first."""
    codec, number = TextCodec(target.files), 0
    for task in tasks:
        messages: list[Message] = []
        for text in task.turns:
            messages.append(Message(role="user", content=text))
            sequence, cache = _read(options, target, engines.values(), chat_ids(codec, messages))
            leader, found = number % len(engines), {}
            number += 1
            for label in [*engines][leader:] + [*engines][:leader]:
                found[label] = _answer(engines[label], sequence, cache)
            plain = found[BASELINE]
            for label in engines:
                _compare(label, found[label]["output"], plain["output"])
                place = {"table": options.table, "arm": label, "category": task.category, "turn": number}
                figures = {name: value for name, value in found[label].items() if name != "output"}
                sha256 = digest(plain["output"])
                yield place | figures | {"plain_seconds": plain["seconds"], "tokens_sha256": sha256}
            messages.append(Message(role="assistant", content=codec.decode(plain["output"].tolist())))


def _read(
    options: Options, target: TargetModel, engines: Iterable[TimedParts], prompt_ids: list[int]
) -> tuple[Sequence, FullKVCache]:
    sampling = SamplingParams(max_tokens=options.num_tokens, temperature=options.temperature, seed=options.seed)
    cache = target.new_cache(len(prompt_ids) + options.num_tokens)
    read_tokens(target, cache, prompt_ids, [engine.drafter for engine in engines])
    return Sequence("answer", prompt_ids, sampling, target.vocab_size, target.device), cache


def _answer(engine: TimedParts, asked: Sequence, cache: FullKVCache) -> Record:
    sequence, before = asked.with_output([]), engine.figures()
    started = time.perf_counter()
    engine.start(sequence, cache.prefix(len(asked) - 1))
    while sequence.finish_reason is None:
        engine.step()  # tokens are on the host then, also with a GPU
    seconds = time.perf_counter() - started
    engine.stop(sequence)
    figures = {name: value - before[name] for name, value in engine.figures().items()}
    return {"seconds": seconds, "output": sequence.output_ids} | figures


def _compare(label: str, found: np.ndarray, plain: np.ndarray) -> None:
    if not np.array_equal(found, plain):
        raise BenchError(
            f"{label}: its tokens are not those of plain decoding; see whether `swiftbatch doctor` says `exact` on "
            "this machine"
        )
