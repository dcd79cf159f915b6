from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from bench.__main__ import main
from bench.compared_caches import PARTIAL_CACHES
from bench.prompt_arms import NEEDLE, Prompts, make_prompts, num_plain_tokens
from bench.triforce_ablation import PROMPT_TABLES, Options, drafting, run, shown
from swiftbatch.worker.decode_bench import encode
from swiftbatch.worker.drafters.engine_options import TRIFORCE_PAPER, TriForceOptions
from swiftbatch.worker.model.model_files import locate_model

pytestmark = pytest.mark.usefixtures("one_thread")

PREFILL = 300
NUM_TOKENS = 40


def bench(*args: str) -> Result:
    return CliRunner().invoke(main, ["papers", "triforce", *args])


@pytest.mark.parametrize("table", PROMPT_TABLES)
@pytest.mark.parametrize("prefill", [300, 32_768, 100_000])
def test_every_arm_can_run_and_every_column_has_an_arm(table: str, prefill: int) -> None:
    layout = PROMPT_TABLES[table](prefill, "embedded")
    assert len(layout.rows) >= 1
    for row in layout.rows:
        assert len(row.labels) == len(layout.label_headers)
        for arm in row.arms.values():
            options, new_cache = drafting(arm)
            assert (new_cache is None) == ("cache" not in arm.options)
            assert options.budget < prefill or table == "4"
    for column in layout.columns:
        assert any(column.arm in row.arms for row in layout.rows)


@pytest.mark.parametrize(
    ("table", "about"),
    [
        ("1", {"cache", "prompts"}),
        ("2", {"temperature", "plan", "cache", "gamma_1", "at_every_step", "budget"}),
        ("3", {"temperature"}),
        ("4", {"temperature", "plan", "prompts", "budget"}),
        ("5", {"plan", "prompts", "budget"}),
        ("6a", {"budget"}),
        ("6b", {"chunk_size"}),
        ("6c", {"plan", "width"}),
    ],
)
def test_arms_differ_in_what_the_table_is_about_and_in_nothing_else(table: str, about: set[str]) -> None:
    layout = PROMPT_TABLES[table](100_000, "embedded")
    everything = [
        dict(TriForceOptions())
        | arm.options
        | {"temperature": arm.temperature, "plan": arm.plan, "prompts": arm.prompts}
        for row in layout.rows
        for arm in row.arms.values()
    ]
    assert {name for name in everything[0] if len({str(arm[name]) for arm in everything}) > 1} == about


def test_draft_caches_are_those_that_rows_are_named_after() -> None:
    table_2 = {row.labels: drafting(row.arms["triforce"]) for row in PROMPT_TABLES["2"](32_768, "m").rows}
    assert table_2["TriForce", "0.6"] == (TriForceOptions(), None)
    assert table_2["TriForce, retrieval cache", "0.6"][1] is PARTIAL_CACHES["retrieval"]
    assert table_2["the same, gammas 2 and 6", "0.6"] == (TRIFORCE_PAPER, None)
    sizes = [drafting(row.arms["triforce"])[0] for row in PROMPT_TABLES["6b"](32_768, "m").rows]
    assert [(options.cache, options.chunk_size) for options in sizes[:2]] == [("retrieval", 1), ("retrieval", 2)]


def test_tables_have_the_rows_of_the_paper() -> None:
    labels = {table: [row.labels for row in make(100_000, "embedded").rows] for table, make in PROMPT_TABLES.items()}
    assert [label[0] for label in labels["1"]] == ["Top-K (ref.)", "StreamingLLM", "H2O", "retrieval", "summary (ours)"]
    assert [label[1] for label in labels["2"]][:7] == ["0.0", "0.2", "0.4", "0.6", "0.8", "1.0", "1.2"]
    assert [label[0] for label in labels["5"]] == ["6,250", "12,500", "25,000", "50,000", "100,000"]
    assert labels["6c"] == [("1", "6"), ("2", "12"), ("4", "24"), ("8", "48")]
    assert labels["3"] == [("embedded", "0.6"), ("embedded", "0.0")]
    assert labels["4"][::2] == [
        ("(2, 56.0K)", "(2, 1024)", "0.0"),
        ("(6, 19.0K)", "(6, 768)", "0.0"),
        ("(10, 12.0K)", "(10, 768)", "0.0"),
    ]
    assert [label[0] for label in labels["6a"]] == ["256", "512", "1,024", "2,048", "4,096", "8,192", "16,384"]
    assert [label[0] for label in labels["6b"]] == [f"{2**power:,}" for power in range(12)]


def test_a_short_prompt_leaves_out_budgets_and_chunks_that_hold_all_of_it() -> None:
    labels = {table: [row.labels[0] for row in PROMPT_TABLES[table](2048, "embedded").rows] for table in ("6a", "6b")}
    assert labels["6a"] == ["256", "512", "1,024"]
    assert labels["6b"] == ["1", "2", "4", "8", "16", "32", "64", "128"]


@pytest.mark.parametrize("prefill", [32_768, 122_880])
@pytest.mark.parametrize("table", PROMPT_TABLES)
def test_a_table_has_a_row_for_each_of_the_paper_s_with_its_arms_figures(table: str, prefill: int, text: Path) -> None:
    options = Options(table=table, prefill=prefill, text=text)
    layout = options.layout()
    measures = {column.measure for column in layout.columns}
    records = [
        {"row": " ".join(row.labels), "arm": name} | dict.fromkeys(measures, 100 * number + place)
        for number, row in enumerate(layout.rows)
        for place, name in enumerate(row.arms)
    ]
    title, *rows = list(shown(records, options))[: 1 + len(layout.rows)]
    assert title == {"words": layout.title}
    for number, (row, found) in enumerate(zip(layout.rows, rows, strict=True)):
        assert [found[header] for header in layout.label_headers] == list(row.labels)
        for column in layout.columns:
            place = list(row.arms).index(column.arm) if column.arm in row.arms else None
            assert found[column.header] == (None if place is None else 100 * number + place)


@pytest.mark.slow
@pytest.mark.parametrize(
    "table", ["1", *(pytest.param(each, marks=pytest.mark.slow) for each in ("3", "4", "5", "6a", "6c"))]
)
def test_a_run_has_a_record_of_every_arm(table: str, tiny_model: Path, text: Path, tmp_path: Path) -> None:
    extra = {"3": {"kv_offload": tmp_path}}.get(table, {})
    sizes = {"prefill": PREFILL, "num_tokens": NUM_TOKENS}
    options = Options(model=str(tiny_model), table=table, text=text, **sizes, **extra)
    found = {(record["row"], record["arm"]) for record in run(options)}
    assert found == {(" ".join(row.labels), name) for row in options.layout().rows for name in row.arms}


def test_the_needle_lies_behind_a_tenth_and_the_prompt_ends_as_it_begins(tiny_model: Path) -> None:
    files = locate_model(str(tiny_model))
    needle, text_ids = encode(files, NEEDLE), [7] * 1000
    [prompt] = make_prompts(Prompts("needle"), 1000, text_ids, files)
    cue = len(needle) // 3
    assert len(prompt.token_ids) == 1000
    assert prompt.token_ids[100 : 100 + len(needle)] == needle
    assert prompt.token_ids[-cue:] + prompt.expected_ids == needle
    assert set(prompt.token_ids[:100] + prompt.token_ids[100 + len(needle) : -cue]) == {7}


def test_sequences_of_a_batch_read_different_stretches(tiny_model: Path) -> None:
    files = locate_model(str(tiny_model))
    prompts = make_prompts(Prompts("books", 6, 0.19), 1000, list(range(1140)), files)
    assert [prompt.token_ids for prompt in prompts] == [list(range(i * 190, (i + 1) * 190)) for i in range(6)]


def test_long_prompts_have_fewer_tokens_of_plain_decoding() -> None:
    assert num_plain_tokens(256, 32_768) == 256
    assert num_plain_tokens(256, 100_000) == 64
    assert num_plain_tokens(40, 100_000) == 40


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--table", "3"], "table 3 needs it"),
        (["--table", "2", "--kv-offload", "."], "--kv-offload DIR belongs to table 3"),
        (["--table", "2", "--prefill", "4090"], "4090 + 40 tokens"),
        (["--table", "4", "--prefill", "1500"], "the highest position needs 1800"),
        (["--table", "7"], "6b"),
        (["--table", "3", "--kv-offload", "/proc/none"], "/proc/none"),
    ],
)
def test_what_cannot_run_is_refused_in_one_line(args: list[str], says: str, tiny_model: Path, text: Path) -> None:
    shared = ["--model", str(tiny_model), "--prefill", "300", "--tokens", "40", "--threads", "1", "--text", str(text)]
    result = bench(*shared, *args)
    assert result.exit_code == 2
    assert says in result.stderr
    assert result.stderr.count("\n") == 1


def test_a_model_without_a_draft_model_is_refused_before_anything_is_read(
    tiny_model: Path, text: Path, tmp_path: Path
) -> None:
    shutil.copytree(tiny_model, tmp_path / "model", ignore=shutil.ignore_patterns("draft"))
    result = bench(
        "--table", "2", "--prefill", "300", "--threads", "1", "--model", str(tmp_path / "model"), "--text", str(text)
    )
    assert result.exit_code == 2
    assert "no draft model" in result.stderr
    assert result.stderr.count("\n") == 1
