"""The page of a folder of figures, and how docs/speed.md takes its tables in.

`python -m swiftbatch.worker.bench.suite.speed_page docs/figures/NAME` writes them between the marks of docs/speed.md.
"""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from swiftbatch.worker.bench.bench_engine import BenchError
from swiftbatch.worker.bench.kernels.kernel_figures import KernelResult
from swiftbatch.worker.bench.kernels.kernel_figures import plot as plot_kernels
from swiftbatch.worker.bench.long.long import LongBenchOptions
from swiftbatch.worker.bench.long.long_figures import LongResult
from swiftbatch.worker.bench.long.long_figures import plot as plot_long
from swiftbatch.worker.bench.suite.speed_tables import (
    Figures,
    agreement_table,
    checkpoints_table,
    decode_table,
    fields_table,
    grid_table,
    kernels_table,
    long_table,
)
from swiftbatch.worker.bench.suite.stage_file import StageFile, read_stage_file, write_whole

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
        raise BenchError(f"{folder}: no figures of `swiftbatch bench all`")
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
