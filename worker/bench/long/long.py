"""`swiftbatch bench long`: one long generation against plain decoding, measured on the way at the same positions."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from pydantic import Field, field_validator

from swiftbatch.jobs.sampling import SamplingParams
from swiftbatch.worker.bench.bench_engine import own_tokens, text_tokens
from swiftbatch.worker.bench.bench_variants import bench_slots, known_engine
from swiftbatch.worker.bench.long.generation import LongGeneration, ReuseTally, metered_drafter
from swiftbatch.worker.bench.long.long_figures import LongRecord, LongResult, plot
from swiftbatch.worker.bench.long.plain_windows import PlainWindows
from swiftbatch.worker.bench.options import BenchOptions, check_length
from swiftbatch.worker.drafters.base import Drafter
from swiftbatch.worker.drawing.filters.filter_list import FILTERS
from swiftbatch.worker.model.files import locate_model
from swiftbatch.worker.target.step_costs import step_costs_of
from swiftbatch.worker.target.target import TargetModel

NUM_PLAIN_TOKENS = 24  # of one window

Report = Callable[[str], None]


class LongBenchOptions(BenchOptions):
    """The measurement asked for: `sampling.max_tokens` tokens behind `prefill` tokens of text.

    There is a record every `every` tokens. Every `plain_every` tokens, plain decoding generates `NUM_PLAIN_TOKENS`,
    which are counted neither as output nor in the time.
    """

    draft_model: Path | None = None
    engine: str
    sampling: SamplingParams
    prefill: int = Field(ge=1)
    every: int = Field(ge=1)
    plain_every: int = Field(ge=1)
    text: Path | None = None
    plot_path: Path | None = None

    _known_engine = field_validator("engine")(known_engine)

    @property
    def num_tokens(self) -> int:
        return self.sampling.max_tokens

    def record_stops(self) -> list[int]:
        """Numbers of tokens at which figures are taken, ascending; the last one is the end."""
        return [*range(self.every, self.num_tokens, self.every), self.num_tokens]

    def plain_stops(self) -> list[int]:
        """Numbers of tokens at which plain decoding is timed, the last time over the last tokens."""
        last = max(0, self.num_tokens - NUM_PLAIN_TOKENS)
        grid = {*range(0, last, self.plain_every), *self.record_stops(), last}
        return sorted(stop for stop in grid if stop <= last)

    def title(self) -> str:
        sampling = self.sampling
        parts = [f"{self.engine} on {Path(self.model).name}", f"{self.prefill:,} tokens of prompt"]
        parts.append(f"T = {sampling.temperature:g}")
        if sampling.temperature > 0:
            asked = [each.field for each in FILTERS if each.is_on(sampling)]
            parts += [f"{field.replace('_', '-')} {getattr(sampling, field):g}" for field in asked]
        if sampling.repetition_penalty != 1.0:
            parts.append(f"penalty {sampling.repetition_penalty:g} over {sampling.penalty_window:,} tokens")
        return ", ".join(parts)


def run_long_bench(options: LongBenchOptions, report: Report = lambda line: None) -> LongResult:
    """Generate, and write JSON and plot at every record. `report` gets a line at each pause.

    Raises BenchError, ModelError.
    """
    files = locate_model(options.model)
    check_length(files, options.prefill, options.num_tokens)
    target = options.load(files, bench_slots([options.engine], options.prefill + options.num_tokens))
    report(f"reading {options.prefill:,} tokens, then {options.num_tokens:,} with {options.engine}")

    def save(result: LongResult) -> None:
        options.write(result.model_dump(), target)
        if options.plot_path is not None:
            plot(result, options.title(), options.plot_path)

    metered = metered_drafter(options.engine, target, step_costs_of(target), options.draft_model)
    return generate_long(options, target, *metered, report, save)


def generate_long(
    options: LongBenchOptions,
    target: TargetModel,
    drafter: Drafter,
    reuse: ReuseTally | None,
    report: Report,
    save: Callable[[LongResult], None] = lambda result: None,
) -> LongResult:
    """Generate with a given drafter, whose n-grams bring `reuse`; `save` gets the figures so far at every record.

    Raises BenchError.
    """
    generation = LongGeneration(options.engine, target, drafter, _prompt(options, target), options.sampling, reuse)
    plain = PlainWindows(target, NUM_PLAIN_TOKENS)
    plain_stops, record_stops = set(options.plain_stops()), set(options.record_stops())
    num_recorded = 0
    for stop in sorted(plain_stops | record_stops):
        generation.run_to(stop)
        if stop in plain_stops:
            plain.measure(generation.sequence, generation.cache)
        num_tokens = generation.num_tokens
        if stop in record_stops and num_tokens > num_recorded:  # a step may have run past two stops
            num_recorded = num_tokens
            report(record_line(generation.record(plain)))
            save(generation.result(plain))
        elif stop:
            report(f"{num_tokens:,} of {options.num_tokens:,} tokens in {generation.seconds / 60:.1f} min")
    return generation.result(plain)


def record_line(record: LongRecord) -> str:
    total, alpha = record.total, record.total.alpha
    return (
        f"{record.num_tokens:,} tokens in {total.seconds / 60:.1f} min, plain decoding {total.plain_seconds / 60:.1f} "
        f"min: {total.speedup:.2f}x ({record.window.speedup:.2f}x in the latest window), "
        f"alpha {'-' if alpha is None else f'{alpha:.2f}'}"
    )


def _prompt(options: LongBenchOptions, target: TargetModel) -> list[int]:
    if options.text is None:
        return own_tokens(target, options.prefill)
    return text_tokens(options.text, target.files, options.prefill)
