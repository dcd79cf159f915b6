"""The ablations run and differ, and have the paper's rows and columns."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from bench.__main__ import main
from bench.compared_caches import PARTIAL_CACHES
from bench.tables import Record
from bench.tokenswift_ablation import ABLATIONS, Options, run, shown
from swiftbatch.worker.decode_bench import BenchError
from swiftbatch.worker.drafters.tokenswift.decoding_heads import save_heads
from swiftbatch.worker.model.model_files import PARTS_FOLDER, locate_model

LENGTHS = [4000, 8000, 12_000, 16_000, 20_000]


@pytest.fixture
def model(tiny_model: Path, tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    shutil.copytree(tiny_model, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 16_384}))
    heads = torch.zeros(3, config["hidden_size"], config["hidden_size"])
    save_heads(folder / PARTS_FOLDER, heads, locate_model(str(folder)).fingerprint)
    return folder


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("".join(f"the lazy fox number {n} jumps over the dog. " for n in range(800)))
    return path


def made_up(table: str) -> list[Record]:
    """Made-up records whose figures name their arm and length."""
    return [
        {"arm": arm.label, "tokens": length, "speedup": number + index / 10, "alpha": number + index / 10 + 0.01}
        | {"beta": number + index / 10 + 0.02, "average": number}
        | {f"distinct_{n}": number + n / 100 for n in range(1, 5)}
        for number, arm in enumerate(ABLATIONS[table].arms)
        for index, length in enumerate(LENGTHS)
    ]


def table_of(table: str) -> list[Record]:
    return list(shown(made_up(table), Options(table=table)))


@pytest.mark.parametrize("table", ABLATIONS)
def test_every_arm_is_a_generation_that_can_run(table: str) -> None:
    options = Options(table=table)
    for arm in ABLATIONS[table].arms:
        long = options.arm_options(arm)
        assert long.record_stops() == LENGTHS
        assert long.sampling.ignore_eos
        drafting, new_cache = options.drafting(arm)
        assert (drafting.rounds, drafting.cache) == (1, "importance")
        assert new_cache is (PARTIAL_CACHES[arm.options["cache"]] if table == "5" else None)
        assert options.model_copy(update={"engine": "tokenswift"}).drafting(arm)[0].rounds == 0
    labels = [arm.label for arm in ABLATIONS[table].arms]
    assert len(set(labels)) == len(labels) > 1


@pytest.mark.parametrize("table", ABLATIONS)
def test_arms_differ_in_what_the_table_is_about_and_in_nothing_else(table: str) -> None:
    options = Options(table=table)
    arms = ABLATIONS[table].arms
    about = {
        "5": {"cache"},
        "6": {"min_p", "top_p", "eta", "repetition_penalty"},
        "7": {"tree"},
        "8": {"repetition_penalty"},
        "12": {"min_p", "top_p", "eta"},
        "13": {"temperature"},
        "14": {"prefill", "budget"},
        "15": {"penalty_window"},
        "fig3": {"num_ngrams"},
        "fig4": {"num_ngrams"},
    }
    everything = [
        dict(options.drafting(arm)[0])
        | {"cache": arm.options.get("cache")}
        | options.arm_options(arm).sampling.model_dump()
        | {"prefill": options.arm_options(arm).prefill}
        for arm in arms
    ]
    assert {name for name in everything[0] if len({str(arm[name]) for arm in everything}) > 1} == about[table]
    without_reuse = {arm["num_ngrams"] == 0 for arm in everything}
    if "num_ngrams" not in about[table]:
        assert without_reuse == {table in ("5", "7", "12", "14")}


def test_rows_are_lengths_and_columns_arms() -> None:
    [title, first, *_, last] = table_of("5")
    assert title["words"].startswith("Table 5")
    assert first | {"tokens": 4000, "full cache alpha": 0.01, "dynamic partial alpha": 2.01} == first
    assert last | {"tokens": 20_000, "full cache speedup": 0.4, "summary (ours) alpha": pytest.approx(3.41)} == last


def test_rows_are_arms_and_columns_lengths() -> None:
    rows = {row["arm"]: row for row in table_of("15") if "4000 alpha" in row}
    assert rows["W 50"] | {"4000 alpha": 1.01, "20000 speedup": 1.4} == rows["W 50"]
    assert len(rows) == 7
    assert {row["words"] for row in table_of("15") if "words" in row} == {
        *("Table 15: penalty window", "Table 16: penalty window and diversity")
    }


def test_diversity_is_shown_at_the_end_with_its_average() -> None:
    rows = {row["arm"]: row for row in table_of("6") if "arm" in row}
    expected = {"tokens": 20_000, "distinct_1": 1.01, "average": 1, "speedup": 1.4}
    assert rows["top-p 0.9 w/o penalty"] | expected == rows["top-p 0.9 w/o penalty"]


@pytest.mark.slow
@pytest.mark.long
def test_an_ablation_runs_all_arms_on_the_same_text(model: Path, text: Path, tmp_path: Path) -> None:
    path = tmp_path / "table.jsonl"
    options = ["--table", "fig3", "--model", str(model), "--tokens", "320", "--text", str(text), "--json", str(path)]
    result = CliRunner().invoke(main, ["papers", "tokenswift", *options])
    assert result.exit_code == 0, result.output
    assert "Figure 3" in result.output
    _, *records = [json.loads(line) for line in path.read_text().splitlines()]
    assert [record["arm"] for record in records] == ["k = 20"] * 5 + ["k = 0"] * 5
    assert len({record["tokens_sha256"] for record in (records[4], records[9])}) == 1
    assert all(record["same_tokens"] for record in records)
    assert records[9]["beta"] == 0.0


def test_an_ablation_beyond_the_model_is_refused_before_any_arm_runs(model: Path, text: Path) -> None:
    with pytest.raises(BenchError, match=r"17192 \+ 0 tokens"):
        next(run(Options(table="14", model=str(model), num_tokens=9000, text=text)))


def test_an_unknown_table_names_the_known_ones() -> None:
    result = CliRunner().invoke(main, ["papers", "tokenswift", "--table", "9"])
    assert result.exit_code == 2
    assert result.stderr.count("\n") == 1
    assert "fig3" in result.stderr
