"""`auto` beside plain decoding, on prompts of six kinds."""

from __future__ import annotations

import contextlib
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise, product
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np

from bench.options import Floats, Ints
from bench.tables import Record, only
from bench.tasks import OWN_TASKS, Task, chat_ids, read_tasks
from swiftbatch.jobs.input.line_parsing import line_from_object
from swiftbatch.jobs.job import Message
from swiftbatch.jobs.sampling_params import SamplingParams
from swiftbatch.worker.decode_bench import (
    BASELINE,
    BY_NAME,
    BenchEngine,
    BenchError,
    BenchOptions,
    bench_slots,
    check_length,
    read_tokens,
    text_tokens,
)
from swiftbatch.worker.drafters.catalogue import DEFAULT_ENGINE
from swiftbatch.worker.drafters.drafter_interface import Drafter
from swiftbatch.worker.forward import step_costs
from swiftbatch.worker.forward.step_costs import ROW_COUNTS, Costs, StepCosts, seconds_now, step_costs_of
from swiftbatch.worker.forward.target_model import TargetModel
from swiftbatch.worker.kernels.kernel_sizes import BLOCK
from swiftbatch.worker.kv.full_cache import FullKVCache
from swiftbatch.worker.model.model_files import ModelFiles, locate_model
from swiftbatch.worker.sampling.sequence import Sequence
from swiftbatch.worker.text.spellings import spellings_in
from swiftbatch.worker.text.tokenizer import TextCodec

PROSE = "prose"
WRITING = "Write a long story."
TEMPLATE_ROOM = 64  # tokens that a chat template may add
TURN_TOKENS = 16  # least tokens of a turn, because machines change speed
COLUMNS = (
    *("category", "temperature", "num_tokens", "plain_tokens_per_second", "auto_to_plain", "first_answer"),
    *("tokens_per_step", "rows_per_step", "same_tokens"),
)


class Options(BenchOptions):
    """Answers of an otherwise new `auto` for each kind of prompts and temperature."""

    prompts: Path = OWN_TASKS
    categories: str = ""  # of the prompts, comma-separated; all by default
    per_category: int = 2  # prompts
    skip: int = 0  # prompts of each kind
    num_tokens: Ints = (64, 256, 1024)  # figures are of the first tokens of each answer
    temperatures: Floats = (0.0, 1.0)
    min_p: float = 0.1
    seed: int = 0
    text: Path | None = None  # answers of prose begin with `position` tokens of it
    position: int = 4096
    processor_time: bool = False  # measures, and steers `auto` by, CPU time instead of elapsed time
    row_costs: Floats = ()  # modelled seconds of forwards of 1, 2, 4, 8, 16, 32 rows, instead of any clock


def run(options: Options) -> Iterator[Record]:
    """Compare `auto` with plain decoding on prompts of six kinds, by the lengths of answers.

    For each kind and temperature a new `auto` answers one prompt after the other, in turns with plain decoding, and
    learns from each. The first answer stands by itself, too. Prompts are read before. With --row-costs, the clock
    counts nothing but forwards, each with the given seconds by its number of rows: speed-ups are then modelled, and the
    same on all machines.

    \b
    Example:
      python -m bench texts --model qwen.gguf --text book.txt --row-costs 1,1.03,1.1,1.25,1.7,2.6 --json texts.jsonl
    """
    if options.row_costs and len(options.row_costs) != len(ROW_COUNTS):
        raise BenchError(
            f"--row-costs: got {len(options.row_costs)} numbers, expected one for each of {ROW_COUNTS} rows"
        )
    if options.processor_time and (options.num_threads > 1 or options.device == "cuda"):
        raise BenchError("processor time is that of one thread; use it with --threads 1, on a CPU")
    files = locate_model(options.model)
    codec = TextCodec(files)
    asked = _asked(options, files, codec)
    longest = max(len(each.prompt_ids) for each in asked)
    check_length(files, longest, max(options.num_tokens))
    target = options.load(files, bench_slots([DEFAULT_ENGINE], longest + max(options.num_tokens), 2, files))
    with _clock(options, target) as costs:
        yield from _Answers(target, options, costs, codec).records(asked)


def shown(records: list[Record], options: Options) -> list[Record]:
    """Return a row for each kind, temperature and length that at least one answer reaches."""
    cells = defaultdict[tuple[str, float, int], list[Record]](list)
    for each in records:
        cells[each["category"], each["temperature"], each["num_tokens"]].append(each)
    rows = [_row(place, own) for place, own in cells.items()]
    kinds = "modelled" if options.row_costs else "processor time" if options.processor_time else "elapsed time"
    least = min((row["auto_to_plain"] for row in rows), default=0.0)
    return [*only(rows, COLUMNS), {"words": f"auto at worst: {least:.2f}x of plain decoding ({kinds})"}]


def _row(place: tuple[str, float, int], own: list[Record]) -> Record:
    total = {name: sum(each[name] for each in own) for name in own[0] if name.startswith(("auto_", "plain_"))}
    first = own[0]
    return {
        "category": place[0],
        "temperature": place[1],
        "num_tokens": place[2],
        "plain_tokens_per_second": total["plain_tokens"] / total["plain_seconds"],
        "auto_to_plain": _ratio(total),
        "first_answer": _ratio(first),
        "tokens_per_step": total["auto_tokens"] / total["auto_steps"],
        "rows_per_step": total["auto_rows"] / total["auto_steps"],
        "same_tokens": all(each["same_tokens"] for each in own),
    }


def _ratio(figures: Record) -> float:
    rates = [figures[f"{name}_tokens"] / figures[f"{name}_seconds"] for name in ("auto", "plain")]
    return float(rates[0] / rates[1])


@dataclass(frozen=True)
class _Asked:
    category: str
    prompt_ids: list[int]
    response_format: dict[str, Any] | None


def _asked(options: Options, files: ModelFiles, codec: TextCodec) -> list[_Asked]:
    """Return some prompts of each kind, one kind after the other."""
    by_category = defaultdict[str, list[Task]](list)
    for task in read_tasks(options.prompts):
        by_category[task.category].append(task)
    wanted = [name.strip() for name in options.categories.split(",") if name.strip()] or list(by_category)
    if unknown := [name for name in wanted if name not in by_category]:
        raise BenchError(f"--categories: got {', '.join(unknown)}; expected some of: {', '.join(by_category)}")
    numbers = range(options.skip, options.skip + options.per_category)
    chosen = {name: by_category[name][numbers.start : numbers.stop] for name in wanted}
    if options.text is not None and PROSE in chosen:
        size, opening = options.position, _prompt_ids(codec, WRITING)
        ids = text_tokens(options.text, files, numbers.stop * size)
        stretches = [opening + ids[number * size : (number + 1) * size] for number in numbers]
        chosen[PROSE] = []
    else:
        stretches = []
    asked = [
        _Asked(task.category, _prompt_ids(codec, task.turns[0]), task.response_format)
        for tasks in chosen.values()
        for task in tasks
    ]
    return [*asked, *(_Asked(PROSE, prompt_ids, None) for prompt_ids in stretches)]


def _prompt_ids(codec: TextCodec, text: str) -> list[int]:
    return chat_ids(codec, [Message(role="user", content=text)])


@contextlib.contextmanager
def _clock(options: Options, target: TargetModel) -> Iterator[Costs]:
    """Set the clock of drafters and figures; yield the costs of forwards by it."""
    if options.row_costs:
        modelled = _Modelled(StepCosts((BLOCK,), np.array([options.row_costs])))
        with mock.patch.object(step_costs, "time", modelled), modelled.counting(target):
            yield lambda: modelled.costs
        return
    costs = step_costs_of(target)
    clock = SimpleNamespace(perf_counter=time.thread_time if options.processor_time else time.perf_counter)
    with mock.patch.object(step_costs, "time", clock):
        yield costs


class _Modelled:
    """A clock that forwards alone move, by their numbers of rows."""

    def __init__(self, costs: StepCosts) -> None:
        self.costs, self._now = costs, 0.0

    def perf_counter(self) -> float:
        return self._now

    @contextlib.contextmanager
    def counting(self, target: TargetModel) -> Iterator[None]:
        forwards = target.forwards
        with contextlib.ExitStack() as stack:
            for name in ("verify", "check"):
                stack.enter_context(mock.patch.object(target, name, self._counted(getattr(target, name))))
            if forwards.draw_chains is not None:
                chains = self._counted_chains(forwards.draw_chains)
                stack.enter_context(mock.patch.object(type(forwards), "draw_chains", chains))
            yield

    def _counted(self, forward: Any) -> Any:
        def run(groups: list[Any], *given: Any) -> Any:
            self._now += self.costs.at(sum(map(len, groups)), 0)
            return forward(groups, *given)

        return run

    def _counted_chains(self, draw: Any) -> Any:
        def run(rows: list[Any], *given: Any) -> Any:
            drawn = draw(rows, *given)
            self._now += self.costs.at(len(rows), 0) * max(len(each.token_ids) for each in drawn)
            return drawn

        return property(lambda _: run)


class _Arm:
    """An engine that answers prompts; it keeps what it learned from one to the next."""

    def __init__(self, target: TargetModel, drafter: Drafter) -> None:
        self._target, self.engine = target, BenchEngine(target, drafter)

    def start(self, asked: Sequence, cache: FullKVCache) -> None:
        self.sequence, self._own = asked.with_output([]), self._target.new_cache(asked.max_length)
        if end := cache.copyable_end(cache.length):
            self._own.copy_from(cache, end)
        self._seconds, counters = 0.0, self.engine.counters
        self._before = counters.num_steps, counters.num_draft_tokens
        started = seconds_now()
        self.engine.start(self.sequence, self._own)
        self._seconds += seconds_now() - started

    def go_on_to(self, num_tokens: int) -> None:
        started = seconds_now()
        while self.sequence.finish_reason is None and self.sequence.num_generated_tokens < num_tokens:
            self.engine.step()
        self._seconds += seconds_now() - started

    def stop(self) -> None:
        self.engine.stop(self.sequence)

    def figures(self, name: str) -> Record:
        steps, drafts = self._before
        num_steps = self.engine.counters.num_steps - steps
        found = {"tokens": self.sequence.num_generated_tokens, "seconds": self._seconds, "steps": num_steps}
        found["rows"] = num_steps + self.engine.counters.num_draft_tokens - drafts
        return {f"{name}_{key}": value for key, value in found.items()}


class _Answers:
    def __init__(self, target: TargetModel, options: Options, costs: Costs, codec: TextCodec) -> None:
        self._target, self._options, self._costs, self._codec = target, options, costs, codec

    def records(self, asked: list[_Asked]) -> Iterator[Record]:
        """Yield a record for each answer and length."""
        categories = list(dict.fromkeys(each.category for each in asked))
        for category, temperature in product(categories, self._options.temperatures):
            arms = {
                name: _Arm(self._target, BY_NAME[engine](self._target, self._costs, None))
                for name, engine in (("plain", BASELINE), ("auto", DEFAULT_ENGINE))
            }
            own = [each for each in asked if each.category == category]
            for number, each in enumerate(own):
                place = {"category": category, "temperature": temperature, "answer": number}
                for record in self._answer(arms, self._sequence(each, temperature), number):
                    yield place | record

    def _answer(self, arms: dict[str, _Arm], sequence: Sequence, number: int) -> Iterator[Record]:
        cache = self._target.new_cache(len(sequence))
        read_tokens(self._target, cache, sequence.token_ids.tolist(), [arm.engine.drafter for arm in arms.values()])
        for arm in arms.values():
            arm.start(sequence, cache)
        order = list(arms.values())[:: -1 if number % 2 else 1]
        for before, end in pairwise((0, *sorted(self._options.num_tokens))):
            if all(arm.sequence.finish_reason for arm in order):
                break
            for num_tokens in (*range(before + TURN_TOKENS, end, TURN_TOKENS), end):
                for arm in order:
                    arm.go_on_to(num_tokens)
            first, second = (arm.sequence.output_ids[:end] for arm in order)
            figures = {"num_tokens": end, "same_tokens": np.array_equal(first, second)}
            yield figures | {key: value for name, arm in arms.items() for key, value in arm.figures(name).items()}
        for arm in order:
            arm.stop()

    def _sequence(self, asked: _Asked, temperature: float) -> Sequence:
        sampling = self._sampling(asked, temperature)
        rules, target = self._codec.rules(sampling), self._target
        sequence = Sequence("answer", asked.prompt_ids, sampling, target.vocab_size, target.device, rules=rules)
        sequence.spellings = spellings_in(self._codec, asked.prompt_ids) if rules else []
        return sequence

    def _sampling(self, asked: _Asked, temperature: float) -> SamplingParams:
        options = self._options
        line = {"custom_id": "answer", "messages": [{"role": "user", "content": "-"}], "temperature": temperature}
        line |= {"min_p": options.min_p, "seed": options.seed, "response_format": asked.response_format}
        [job] = line_from_object(line, 0).jobs([max(options.num_tokens)])
        return job.sampling
