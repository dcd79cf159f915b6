from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

from bench.__main__ import MODULES, main, papers
from bench.papers import PAPERS
from bench.tables import only, pivot, tables
from tests import ROOT
from tests.readme.command_lines import PAGES, commands, page

COMMANDS = {name: group.get_command(click.Context(group), name) for group, names in (
    (main, MODULES), (papers, PAPERS)
) for name in names}  # fmt: skip
BENCH = re.compile(r"python -m bench ([a-z].*)")


def invoke(*args: str) -> Result:
    return CliRunner().invoke(main, list(args))


def test_all_benchmarks_are_listed() -> None:
    listed = subprocess.run([sys.executable, "-m", "bench"], cwd=ROOT, capture_output=True, text=True)
    found = [line.split()[0] for line in listed.stdout.partition("Commands:\n")[2].splitlines()]
    assert found == sorted([*MODULES, "decode", "digests", "papers"])


@pytest.mark.parametrize("name", COMMANDS)
def test_every_benchmark_has_help_with_an_example_whose_options_exist(name: str) -> None:
    command = COMMANDS[name]
    assert command is not None
    example = (command.help or "").partition("Example:\n")[2].strip().splitlines()[0].split()
    command.make_parser(click.Context(command)).parse_args(example[example.index(name) + 1 :])


def test_every_benchmark_that_a_page_shows_is_one_that_can_be_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = [words for path in PAGES for words in commands(page(path), BENCH)]
    (tmp_path / "DIR").mkdir()
    (tmp_path / "book.txt").touch()
    monkeypatch.chdir(tmp_path)
    for words in shown:
        name, given = (words[1], words[2:]) if words[0] == "papers" else (words[0], words[1:])
        command = COMMANDS.get(name) or main.commands[name]
        if given:
            command.make_parser(click.Context(command)).parse_args(list(given))
    assert {words[0] for words in shown} >= {*MODULES, "papers"}


def test_a_mistake_is_one_line_and_exit_code_2() -> None:
    for args, problem in (
        (["auto", "--slots", "1"], "Missing option '--text'"),
        (["auto", "--text", "book.txt", "--slots", "many"], "slots"),
        (["long", "--json", "/nowhere/long.jsonl"], "expected a file in a folder"),
        (["decode", "--engines", "warp"], "expected some of"),
    ):
        result = invoke(*args)
        assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
        assert problem in result.stderr


def test_records_are_json_lines_and_a_table(tmp_path: Path) -> None:
    result = invoke("sizing", "--json", str(tmp_path / "sizing.jsonl"))
    records = [json.loads(line) for line in (tmp_path / "sizing.jsonl").read_text().splitlines()]
    assert result.stdout == tables(records) + "\n"
    assert result.stderr == ""
    assert invoke("sizing").stderr.splitlines() == [json.dumps(record) for record in records]


def test_records_with_the_same_fields_stand_in_one_table() -> None:
    records = [
        {"engine": "auto", "step": {"verify": 1.5}, "same": True, "sha256": "ab"},
        {"engine": "suffix", "step": {"verify": 1234.0}, "same": False, "sha256": "cd"},
        {"words": "a sentence"},
        {"length": 2000, "of": [1], "least": None},
    ]
    assert tables(records).splitlines() == [
        "engine  step.verify  same",
        "auto            1.5  yes",
        "suffix        1,234  NO",
        "",
        "a sentence",
        "",
        "length  least",
        " 2,000      -",
    ]
    assert tables(only(records[:1], ("same", "engine")), is_markdown=True).splitlines() == [
        "| same | engine |",
        "| --- | --- |",
        "| yes | auto |",
    ]


def test_a_pivot_sets_values_side_by_side_and_leaves_a_dash_for_what_is_not_there() -> None:
    records = [{"place": 1, "arm": "a", "x": 1, "y": 2}, {"place": 2, "arm": "b", "x": 3, "y": 4}]
    assert pivot(records, ["place"], "arm", ["x"]) == [{"place": 1, "a": 1, "b": None}, {"place": 2, "a": None, "b": 3}]
    [both, _] = pivot(records, ["place"], "arm", ["x", "y"])
    assert both == {"place": 1, "a x": 1, "a y": 2, "b x": None, "b y": None}
