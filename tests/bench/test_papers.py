"""The frame of `bench papers`: tables in turn, runs, the first record, pictures."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import pytest
from click.testing import CliRunner

from bench.__main__ import main, paper_command
from bench.papers import PAPERS, over_runs
from bench.tables import Curve, Record
from swiftbatch.worker.decode_bench import BenchError, BenchOptions

MODULES = {name: importlib.import_module(place) for name, place in PAPERS.items()}


class MadeUpOptions(BenchOptions):
    table: str = "all"
    seed: int = 3


def made_up(**parts: Any) -> ModuleType:
    """A paper of two tables: one row for each place, whose figure is the seed times the place."""

    def run(options: MadeUpOptions) -> Iterator[Record]:
        """Repeat a table."""
        for place in (1, 2):
            yield {"table": options.table, "place": place, "figure": options.seed * place}

    def shown(records: list[Record], options: MadeUpOptions) -> Iterator[Record]:
        yield {"words": f"Table {options.table}"}
        yield from ({"place": each["place"], "figure": each["figure"]} for each in records)

    def each_table(options: MadeUpOptions) -> list[MadeUpOptions]:
        return [options.model_copy(update={"table": name}) for name in ("1", "2")]

    own = {"Options": MadeUpOptions, "run": run, "shown": shown, "each_table": each_table}
    return cast("ModuleType", SimpleNamespace(**own | {"CURVES": {"2": Curve("place", (("figure",),))}} | parts))


def test_all_tables_run_in_turn_and_their_records_follow_one_with_machine_and_date(tmp_path: Path) -> None:
    path, pictures = tmp_path / "tables.jsonl", tmp_path / "pictures"
    args = ["--json", str(path), "--runs", "2", "--plot", str(pictures)]
    result = CliRunner().invoke(paper_command("made-up", made_up()), args)
    assert result.exit_code == 0, result.output
    first, *records = [json.loads(line) for line in path.read_text().splitlines()]
    assert first["paper"] == "made-up"
    assert {"date", "cpu", "cores", "instructions", "torch", "model"} <= first.keys()
    assert first["options"]["seed"] == 3
    assert [(each["table"], each["run"], each["figure"]) for each in records] == [
        (table, number, (3 + number) * place) for table in "12" for number in (0, 1) for place in (1, 2)
    ]
    words = result.stdout.split()
    assert [word for word in words if word in ("1", "2", "3.5", "0.707", "7", "1.41")] == [
        *("1", "1", "3.5", "0.707", "2", "7", "1.41"),  # the title, then two rows
        *("2", "1", "3.5", "0.707", "2", "7", "1.41"),
    ]
    assert [each.name for each in pictures.iterdir()] == ["made-up-2.png"]
    assert (pictures / "made-up-2.png").read_bytes().startswith(b"\x89PNG")


def test_what_ran_before_a_failure_is_shown() -> None:
    def run(options: MadeUpOptions) -> Iterator[Record]:
        """Repeat a table."""
        yield {"place": 1, "figure": 5}
        raise BenchError("the text ended")

    result = CliRunner().invoke(paper_command("made-up", made_up(run=run)), [])
    assert isinstance(result.exception, BenchError)
    assert "5" in result.stdout


def test_runs_merge_numbers_that_differ_and_keep_what_is_equal() -> None:
    runs: list[list[Record]] = [
        [{"words": "Table"}, {"arm": "a", "x": 1.0, "y": None, "same": 4}],
        [{"words": "Table"}, {"arm": "a", "x": 2.0, "y": 3.0, "same": 4}],
    ]
    assert over_runs(runs) == [{"words": "Table"}, {"arm": "a", "x": "1.5 ± 0.707", "y": "3 ± 0", "same": 4}]
    assert over_runs(runs[:1]) == runs[0]
    words: list[list[Record]] = [[{"words": "first holds"}], [{"words": "second holds"}]]
    assert over_runs(words) == [{"words": "first holds; second holds"}]
    other: list[list[Record]] = [[{"arm": "a"}], [{"arm": "a"}, {"arm": "b"}]]
    assert over_runs(other) == [{"arm": "a"}, {"arm": "a"}, {"arm": "b"}]


@pytest.mark.parametrize("name", PAPERS)
def test_each_paper_has_its_tables_in_turn_or_the_one_that_is_named(name: str) -> None:
    module, given = (
        MODULES[name],
        {"griffin": dict.fromkeys(("data", "work", "text"), Path()), "triforce": {"text": Path()}},
    )
    options = module.Options(**given.get(name, {}))
    tables = [each.table for each in module.each_table(options)]
    assert len(set(tables)) == len(tables) > 0
    assert set(module.CURVES) <= set(tables) | {"3"}
    [one] = module.each_table(options.model_copy(update={"table": tables[-1]}))
    assert one.table == tables[-1]


def test_tables_that_need_more_than_is_given_are_left_out() -> None:
    triforce, griffin = MODULES["triforce"], MODULES["griffin"]
    text = triforce.Options(text=Path())
    assert "3" not in [each.table for each in triforce.each_table(text)]
    with_folder = triforce.each_table(text.model_copy(update={"kv_offload": Path("caches")}))
    assert [each.table for each in with_folder if each.kv_offload] == ["3"]
    assert len(with_folder) == len(triforce.each_table(text)) + 1
    books = griffin.Options(data=Path(), work=Path())
    assert [each.table for each in griffin.each_table(books)] == ["1", "1c", "10"]
    assert len(griffin.each_table(books.model_copy(update={"text": Path()}))) > 5


def test_papers_are_listed_with_what_all_of_them_take() -> None:
    listed = CliRunner().invoke(main, ["papers", "--help"]).output
    assert all(f"\n  {name}" in listed for name in PAPERS)
    for name in PAPERS:
        told = CliRunner().invoke(main, ["papers", name, "--help"]).output
        assert all(option in told for option in ("--table", "--runs", "--plot", "--json", "--seed"))
