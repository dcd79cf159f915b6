"""The page of a folder of figures, and how docs/speed.md takes its tables in.

`python -m bench speed-page docs/figures/NAME` writes them between the marks of docs/speed.md.
"""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from bench.agreement import AgreementRecord
from bench.auto import BASELINE, AutoRecord
from bench.checkpoints import MIB, CheckpointRecord
from bench.fields import FieldRecord
from bench.kernels import KernelResult
from bench.kernels import plot as plot_kernels
from bench.long import LongBenchOptions
from bench.long_figures import LongResult
from bench.long_figures import plot as plot_long
from bench.stage_file import StageFile, read_stage_file, write_whole
from swiftbatch.worker.bench_texts import BenchError
from swiftbatch.worker.decode_bench import DecodeRecord

Figures = dict[str, Any]  # as a benchmark writes them to its file
NUM_FIELD_COLUMNS = 3


def table(headers: Iterable[str], rows: Iterable[Iterable[str]]) -> list[str]:
    """The lines of a Markdown table."""
    first = list(headers)
    return [_line(first), "|" + "---|" * len(first), *map(_line, rows)]


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def drawn_with(settings: Figures) -> str:
    """The sampling of a stage."""
    temperatures = settings.get("temperatures") or [settings["temperature"]]
    drawn = " and ".join(f"T = {temperature:g}" for temperature in temperatures)
    return drawn if max(temperatures) == 0 else f"{drawn} with min-p {settings['min_p']:g}"


def same(is_same: bool, what: str) -> str:
    """A sentence about the promise, which stands below every comparison."""
    return f"{what} gave the same tokens." if is_same else f"**{what} did NOT give the same tokens.**"


def decode_table(parts: list[Figures]) -> Iterator[str]:
    """A row for each temperature and position, a column for each engine."""
    records = [DecodeRecord.model_validate(each) for figures in parts for each in figures["results"]]
    places = list(dict.fromkeys((record.temperature, record.position) for record in records))
    engines = list(dict.fromkeys(record.engine for record in records))
    rows = {place: [each for each in records if (each.temperature, each.position) == place] for place in places}
    is_same = all(len({record.tokens_sha256 for record in row}) == 1 for row in rows.values())
    settings = parts[0]["settings"]
    yield "Plain decoding in milliseconds a token; for the other engines the speed-up over it in the same run, with the"
    yield f"tokens per step. {_counts(parts)} tokens each; T = 0 is greedy, above that min-p is {settings['min_p']:g}."
    yield same(is_same, "All engines")
    yield ""
    headers = ["T", "position", *(f"{name} (ms)" if name == BASELINE else name for name in engines)]
    cells = [[f"{place[0]:g}", f"{place[1]:,}", *_decode_cells(row)] for place, row in rows.items()]
    yield from table(headers, cells)


def _counts(parts: list[Figures]) -> str:
    return " and ".join(dict.fromkeys(f"{figures['settings']['num_tokens']:,}" for figures in parts))


def _decode_cells(records: list[DecodeRecord]) -> Iterator[str]:
    fastest = min(records, key=lambda record: record.ms_per_token)
    for record in records:
        if record.engine == BASELINE or record.speedup is None:
            yield f"{record.ms_per_token:.2f}"
            continue
        speedup = f"{record.speedup:.2f}x"
        yield f"{f'**{speedup}**' if record is fastest else speedup} ({record.num_tokens / record.num_steps:.1f})"


def grid_table(parts: list[Figures]) -> Iterator[str]:
    """A row for each cell of all grids, a column for each engine that is in one of them."""
    records = [AutoRecord.model_validate(each) for figures in parts for each in figures["results"]]
    engines = list(dict.fromkeys(name for record in records for name in record.tokens_per_second if name != BASELINE))
    yield "Plain decoding in tokens a second, all jobs together; for the other engines the speed-up over it."
    yield f"{drawn_with(parts[0]['settings'])}. Jobs follow each other, and the time to start one counts."
    yield same(all(record.has_same_tokens for record in records), "All engines")
    yield ""
    rows = [
        [
            *(f"{record.position:,}", str(record.num_sequences), f"{record.num_tokens:,}"),
            f"{record.tokens_per_second[BASELINE]:,.0f}",
            *(f"{record.ratio(name, BASELINE):.2f}x" if name in record.tokens_per_second else "" for name in engines),
        ]
        for record in records
    ]
    yield from table(["position", "jobs at a time", "tokens a job", f"{BASELINE} (tokens/s)", *engines], rows)


def fields_table(parts: list[Figures]) -> Iterator[str]:
    """Pairs of a field and its cost, side by side."""
    [figures] = parts
    records, settings = [FieldRecord.model_validate(each) for each in figures["results"]], figures["settings"]
    nothing, *others = records
    yield f"One stream with `{settings['engine']}` behind {settings['position']:,} tokens, {drawn_with(settings)},"
    yield f"{settings['num_tokens']:,} tokens with each field, the median of {settings['num_rounds']} rounds beside a"
    yield f"line that says nothing ({nothing.ms_per_token:.2f} ms a token):"
    yield ""
    num_rows = -(-len(others) // NUM_FIELD_COLUMNS)
    columns = [others[first : first + num_rows] for first in range(0, len(others), num_rows)]
    cells = [[(f"`{each.field}`", f"{each.ratio:.2f}x") for each in column] for column in columns]
    cells = [column + [("", "")] * (num_rows - len(column)) for column in cells]
    rows = [[cell for pair in row for cell in pair] for row in zip(*cells, strict=True)]
    yield from table(["field", "time"] * len(columns), rows)


def agreement_table(parts: list[Figures]) -> Iterator[str]:
    """A row for each cache: the share of tokens drawn alike and the time of a round, position by position."""
    [figures] = parts
    records, settings = [AgreementRecord.model_validate(each) for each in figures["results"]], figures["settings"]
    positions = sorted({record.position for record in records})
    plain = ", ".join(f"{_first(records, position).plain_ms:.1f}" for position in positions)
    yield f"The share of {settings['num_tokens']} tokens that are drawn alike with a part of the keys,"
    yield f"{drawn_with(settings)}, and the time of such a round beside a plain step ({plain} ms):"
    yield ""
    headers = ["cache", *(each for position in positions for each in (f"{position:,}", "round"))]
    rows = [
        [f"`{cache}`", *(cell for record in records if record.cache == cache for cell in _agreement_cells(record))]
        for cache in settings["caches"]
    ]
    yield from table(headers, rows)


def _first(records: list[AgreementRecord], position: int) -> AgreementRecord:
    return next(record for record in records if record.position == position)


def _agreement_cells(record: AgreementRecord) -> tuple[str, str]:
    return f"{record.share_alike:.3f}", f"{record.round_ms / record.plain_ms:.0%}"


def checkpoints_table(parts: list[Figures]) -> Iterator[str]:
    """A row for each position."""
    [figures] = parts
    records, settings = [CheckpointRecord.model_validate(each) for each in figures["results"]], figures["settings"]
    is_same = all(record.has_same_tokens for record in records)
    yield f"A state every {settings['checkpoint_tokens']:,} tokens with `{settings['engine']}`, T = 1 with min-p 0.1,"
    yield "and the seconds until a resumed job has its next token. " + same(
        is_same, "Both resumes and an undisturbed job"
    )
    yield ""
    headers = ["position", "time with states", "largest segment, MiB", "resume from state, s", "from tokens, s"]
    rows = [
        [
            *(f"{record.position:,}", f"{1 + record.overhead:.2f}x", f"{record.segment_bytes / MIB:.1f}"),
            *(f"{record.kv_seconds:.2f}", f"{record.replay_seconds:.2f}"),
        ]
        for record in records
    ]
    yield from table(headers, rows)


def long_table(parts: list[Figures]) -> Iterator[str]:
    """A row for each record of the generation."""
    [figures] = parts
    result = LongResult.model_validate({name: figures[name] for name in LongResult.model_fields})
    settings, total = figures["settings"], result.records[-1].total
    sampling = settings["sampling"]
    yield f"{result.num_tokens:,} tokens with `{result.engine}` behind a prompt of {settings['prefill']:,},"
    yield f"{drawn_with(sampling)}, penalty {sampling['repetition_penalty']:g} over the newest"
    yield f"{sampling['penalty_window']:,} tokens: **{total.seconds / 60:.1f} minutes, plain decoding"
    yield f"{total.plain_seconds / 60:.1f}**, sampled at {len(result.plain_windows)} places of the same run."
    yield same(result.has_same_tokens, "Both")
    yield ""
    headers = ["tokens up to", "ms per token", "plain", "speed-up there", "since the start", "tokens per step"]
    rows = [
        [
            *(f"{record.num_tokens:,}", f"{record.window.ms_per_token:.2f}", f"{record.window.plain_ms_per_token:.2f}"),
            *(f"{record.window.speedup:.2f}x", f"{record.total.speedup:.2f}x", f"{record.window.tokens_per_step:.1f}"),
        ]
        for record in result.records
    ]
    yield from table(headers, rows)


def kernels_table(parts: list[Figures]) -> Iterator[str]:
    """Whole forwards alone: a row for each length, columns for each number of rows."""
    [figures] = parts
    result = KernelResult.model_validate({name: figures[name] for name in KernelResult.model_fields})
    forwards = {(each.length, each.num_rows): each for each in result.records if each.torch_ms is not None}
    lengths, counts = (sorted({place[part] or 0 for place in forwards}) for part in (0, 1))
    yield f"Whole forwards, logits included, on {result.num_threads} threads, which read"
    yield f"{result.memory_gigabytes_per_second:.1f} GB/s and multiply {result.gigaflops_per_second:.0f} GFLOP/s:"
    yield "milliseconds, the share of this limit, and the speed-up over `transformers`."
    yield ""
    rows = [[f"{length:,}", *(_forward(forwards[length, count]) for count in counts)] for length in lengths]
    yield from table(["position", *(f"{count} row{'s' if count > 1 else ''}" for count in counts)], rows)


def _forward(record: Any) -> str:
    return f"{record.ms:.2f} ({record.allowed_ms / record.ms:.0%}, {record.torch_ms / record.ms:.1f}x)"


PAGE = "speed.md"
DOCS_PAGE = Path("docs") / PAGE
WIDTH = 120
BEGIN, END = "<!-- figures: {} -->", "<!-- end of the figures -->"


@dataclass(frozen=True)
class Section:
    """A heading, and the stages whose figures stand below it in one table."""

    title: str
    stages: tuple[str, ...]
    lines: Callable[[list[Figures]], Iterator[str]]  # sentences, an empty line, a table


SECTIONS = (
    Section("One long text", ("long",), long_table),
    Section("The engines side by side", ("decode", "greedy"), decode_table),
    Section("Batches and short jobs", ("auto", "short-jobs", "slots"), grid_table),
    Section("What fields of a line cost", ("fields",), fields_table),
    Section("Partial caches", ("agreement",), agreement_table),
    Section("Checkpoints", ("checkpoints",), checkpoints_table),
    Section("Forwards", ("kernels",), kernels_table),
)
NAMES = tuple(name for section in SECTIONS for name in section.stages)
CURVES = "Curves of this text: minutes, accepted drafts and speed-up over plain decoding, by generated tokens"


def stage_files(folder: Path) -> dict[str, StageFile]:
    """The files of all stages that a folder has, in the order of the page. Raises BenchError."""
    return {name: read_stage_file(path) for name in NAMES if (path := folder / f"{name}.json").is_file()}


def page_of(folder: Path) -> str:
    """The page of a folder. Raises BenchError."""
    return "\n".join(["# Speed", "", *tables_of(folder, ".")]) + "\n"


def tables_of(folder: Path, place: str) -> Iterator[str]:
    """The lines of a folder's tables; `place` is where its pictures are, as the page names it. Raises BenchError."""
    files = stage_files(folder)
    if not files:
        raise BenchError(f"{folder}: no figures of `python -m bench all`")
    yield from _wrapped([*_measured_on(files), ""])[:-1]
    for section in SECTIONS:
        if found := [name for name in section.stages if name in files]:
            yield from ("", f"## {section.title}", "")
            try:
                yield from _wrapped(list(section.lines([files[name].figures for name in found])))
            except (ValidationError, LookupError, TypeError, ValueError) as error:
                names = " and ".join(f"{name}.json" for name in found)
                raise BenchError(f"{folder}: no table in {names}; delete them and measure again") from error
        if "long" in found:
            yield from ("", f"![{CURVES}]({place}/long.png)")


def _wrapped(lines: list[str]) -> list[str]:
    """Sentences in lines as wide as a page, and the table as it is."""
    end = lines.index("")
    return [*textwrap.wrap(" ".join(lines[:end]), WIDTH, break_on_hyphens=False), *lines[end:]]


def _measured_on(files: dict[str, StageFile]) -> Iterator[str]:
    made = [file.made_with for file in files.values()]
    machine, versions = made[0].machine, made[0].versions
    dates = sorted({file.date for file in files.values()})
    numerics = sorted({file.figures["machine"]["numerics"] for file in files.values() if "machine" in file.figures})
    minutes = sum(file.seconds for file in files.values()) / 60
    told = ", ".join(f"{name} {version}" for name, version in versions.items())
    yield f"{machine['cpu']}, {machine['cores']} cores, instructions `{machine['instructions']}`, numerics"
    yield f"{', '.join(f'`{each}`' for each in numerics)}; {' to '.join(dict.fromkeys((dates[0], dates[-1])))},"
    yield f"{minutes:.0f} minutes in all; {told}; model `{made[0].weights[:12]}`, code `{made[0].code[:12]}`."
    if any(file.is_small for file in files.values()):
        yield "**These are from `--small`: they show that all of it runs, and say nothing about speed.**"
    if missing := [name for name in NAMES if name not in files]:
        yield f"Not measured: {', '.join(missing)}."


def draw_plots(folder: Path) -> None:
    """Draw the plots of a folder's figures."""
    for name, file in stage_files(folder).items():
        if name == "kernels":
            fields = {field: file.figures[field] for field in KernelResult.model_fields}
            plot_kernels(KernelResult.model_validate(fields), folder / f"{name}.png")
        elif name == "long":
            fields = {field: file.figures[field] for field in LongResult.model_fields}
            title = LongBenchOptions.model_validate(file.figures["settings"]).title()
            plot_long(LongResult.model_validate(fields), title, folder / f"{name}.png")


def with_figures(text: str, folder: Path, place: str) -> str:
    """The text of a page with a folder's tables between its marks. Raises BenchError where it has no marks."""
    before, begin, rest = text.partition(BEGIN.split("{}", maxsplit=1)[0])
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise BenchError(f"the page has no place for figures: expected `{BEGIN.format('NAME')}` and `{END}`")
    return "\n".join([before + BEGIN.format(place), "", *tables_of(folder, place), "", END]) + after


def main() -> None:
    """Write the tables of the folder that is named into docs/speed.md of the current folder."""
    folder = Path(sys.argv[1])
    place = folder.resolve().relative_to(DOCS_PAGE.parent.resolve()).as_posix()
    write_whole(DOCS_PAGE, with_figures(DOCS_PAGE.read_text(encoding="utf-8"), folder, place))


if __name__ == "__main__":
    main()
