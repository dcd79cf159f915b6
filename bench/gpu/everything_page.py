"""The page of `bench gpu --everything`: what was proved, and every stage's figures, as tables for docs/gpu.md."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from bench.gpu.gpu_stages import GPUStage
from bench.gpu.stage_record import GPUStageRecord
from bench.speed_page import table
from swiftbatch.worker.exactness.gpu_doctor.findings import Result, Row, cell_of

PAGE = "summary.md"
Records = Mapping[str, GPUStageRecord | None]


REHEARSAL = "**This ran in Triton's interpreter: it shows that all stages run, and proves nothing about a GPU.**"


def page_of(stages: Sequence[GPUStage], records: Records, is_rehearsal: bool = False) -> str:
    """The page: a table of what is proved, one of stages, then the figures."""
    told = [REHEARSAL, ""] if is_rehearsal else []
    lines = ["# Everything on a GPU", "", *told, *_proved(stages, records), "", *_overview(stages, records)]
    for stage in stages:
        if record := records.get(stage.name):
            lines += ["", f"## {stage.name}", "", *_figures(record)]
    return "\n".join(lines) + "\n"


def _proved(stages: Sequence[GPUStage], records: Records) -> Iterator[str]:
    """An item is proved where all its stages have passed and nothing in them was left untried."""
    items = list(dict.fromkeys(item for stage in stages for item in stage.proves))
    rows = []
    for item in items:
        names = [stage.name for stage in stages if item in stage.proves]
        rows.append((item, ", ".join(names), _verdict([records.get(name) for name in names])))
    yield from table(("item", "stages", "proved"), rows)


def _verdict(records: list[GPUStageRecord | None]) -> str:
    if any(record is not None and record.state != "passed" and record.is_over for record in records):
        return "**no**"
    if any(record is None or not record.is_over for record in records):
        return "not reached"
    untried = [each for record in records if record for result in record.results if (each := result.finding.unproved)]
    return f"not tried: {untried[0]}" if untried else "yes"


def _overview(stages: Sequence[GPUStage], records: Records) -> Iterator[str]:
    rows = []
    for stage in stages:
        record = records.get(stage.name)
        state = "not reached" if record is None else f"{record.state} {record.words}".rstrip()
        rows.append((stage.name, state, "" if record is None else f"{record.seconds:.0f}"))
    yield from table(("stage", "state", "seconds"), rows)


def _figures(record: GPUStageRecord) -> Iterator[str]:
    if record.words:
        yield from (f"{record.state} {record.words}", "")
    for result in record.results:
        verdict = "" if result.finding.passed else "**FAILED** "
        yield from (f"{verdict}{result.name}: {result.finding.words} ({result.seconds:.1f} s)", "")
        if result.finding.rows:
            yield from (*_table(result), "")


def _table(result: Result) -> Iterable[str]:
    rows: list[Row] = result.finding.rows
    columns = list(rows[0])
    return table(columns, [[cell_of(row[column]) for column in columns] for row in rows])
