"""The ablations: every arm can run, arms differ in one thing, and the tables have the paper's rows and columns."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from rich.console import Console

from bench.ablation_commands import ablation
from bench.compared_caches import PARTIAL_CACHES, ImportanceKVCache
from bench.long_figures import LongFigures, LongRecord, LongResult
from bench.tokenswift_ablation import LAYOUTS, MEASURES, AblationOptions, render, run_ablation
from bench.tokenswift_tables import ABLATIONS
from swiftbatch.worker.bench_texts import BenchError
from swiftbatch.worker.drafters.tokenswift.decoding_heads import save_heads
from swiftbatch.worker.model.model_files import PARTS_FOLDER, locate_model

LENGTHS = [4000, 8000, 12_000, 16_000, 20_000]


@pytest.fixture
def model(tiny_model: Path, tmp_path: Path) -> Path:
    """The tiny model with more positions, and heads that say what the language model head says."""
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


def made_up(table: str) -> list[LongResult]:
    """A result for each arm; every figure tells which arm and which length it is of."""
    results = []
    for arm in range(len(ABLATIONS[table].arms)):
        records = []
        for index, length in enumerate(LENGTHS):
            figures = LongFigures(
                first_token=0,
                last_token=length,
                seconds=1.0,
                plain_seconds=2.0,
                ms_per_token=1.0,
                plain_ms_per_token=2.0,
                speedup=arm + index / 10,
                alpha=arm + index / 10 + 0.01,
                beta=arm + index / 10 + 0.02,
                tokens_per_step=1.0,
                mean_draft_depth=4.0,
                rounds_per_step=1.0,
                step_ms={},
                draft_ms={},
            )
            distinct = {f"distinct_{n}": arm + n / 100 for n in range(1, 5)}
            records.append(LongRecord(num_tokens=length + 3, window=figures, total=figures, distinct=distinct))
        results.append(
            LongResult(
                engine="tokenswift-paper",
                num_tokens=LENGTHS[-1],
                prefill_seconds=1.0,
                tokens_sha256="",
                records=records,
                plain_windows=[],
                marks=[],
                plain_seconds=[],
            )
        )
    return results


def printed(table: str) -> list[list[str]]:
    """The words of every line, as on a terminal of 80 columns."""
    console = Console(width=80, record=True)
    console.print(render(ABLATIONS[table], made_up(table), LENGTHS))
    text = console.export_text()
    assert "…" not in text
    return [line.split() for line in text.splitlines()]


@pytest.mark.parametrize("table", ABLATIONS)
def test_every_arm_is_a_generation_that_can_run(table: str) -> None:
    options = AblationOptions(table=table, engine="tokenswift-paper", num_tokens=20_000, seed=0)
    for arm in options.ablation.arms:
        long = options.arm_options(arm)
        assert long.record_stops() == LENGTHS
        assert long.sampling.ignore_eos
        drafter = options.tokenswift_options(arm)
        assert drafter.draft_rounds == 1
        assert drafter.cache is (PARTIAL_CACHES[arm.options["cache"]] if table == "5" else ImportanceKVCache)
        assert options.model_copy(update={"engine": "tokenswift"}).tokenswift_options(arm).draft_rounds is None
    labels = [arm.label for arm in options.ablation.arms]
    assert len(set(labels)) == len(labels) > 1


@pytest.mark.parametrize("table", ABLATIONS)
def test_arms_differ_in_what_the_table_is_about_and_in_nothing_else(table: str) -> None:
    options = AblationOptions(table=table, engine="tokenswift-paper", num_tokens=20_000, seed=0)
    arms = options.ablation.arms
    about = {
        "5": {"cache"},
        "6": {"min_p", "top_p", "eta", "repetition_penalty"},
        "7": {"digits"},
        "8": {"repetition_penalty"},
        "12": {"min_p", "top_p", "eta"},
        "13": {"temperature"},
        "14": {"prefill", "budget"},
        "15": {"penalty_window"},
        "fig3": {"num_ngrams"},
        "fig4": {"num_ngrams"},
    }
    everything = [
        vars(options.tokenswift_options(arm))
        | options.arm_options(arm).sampling.model_dump()
        | {"prefill": options.arm_options(arm).prefill}
        for arm in arms
    ]
    assert {name for name in everything[0] if len({str(arm[name]) for arm in everything}) > 1} == about[table]
    without_reuse = {arm["num_ngrams"] == 0 for arm in everything}
    if "num_ngrams" not in about[table]:
        assert without_reuse == {table in ("5", "7", "12", "14")}


@pytest.mark.parametrize("table", ABLATIONS)
def test_views_name_what_exists(table: str) -> None:
    for view in ABLATIONS[table].views:
        assert view.layout in LAYOUTS
        assert set(view.measures) <= MEASURES.keys()


def test_rows_are_lengths_and_columns_arms() -> None:
    lines = printed("5")
    assert ["tokens", "full", "cache", "partial", "cache", "dynamic", "partial", "summary", "(ours)"] in lines
    assert ["4K", "alpha", "0.01", "1.01", "2.01", "3.01"] in lines
    assert ["x", "0.00", "1.00", "2.00", "3.00"] in lines
    assert ["20K", "alpha", "0.41", "1.41", "2.41", "3.41"] in lines
    assert ["beta", "0.42", "1.42"] in printed("fig3")


def test_rows_are_arms_and_columns_lengths() -> None:
    lines = printed("15")
    assert ["4K", "4K", "8K", "8K", "12K", "12K", "16K", "16K", "20K", "20K"] in lines
    assert ["W", "50", "1.01", "1.00", "1.11", "1.10", "1.21", "1.20", "1.31", "1.30", "1.41", "1.40"] in lines
    assert ["W", "50", "1.01", "1.02", "1.03", "1.04", "1.02"] in lines  # table 16 stands below
    assert printed("14")[5][:5] == ["2,048", "0.01", "0.00", "0.11", "0.10"]


def test_diversity_is_shown_at_the_end_with_its_average() -> None:
    lines = printed("6")
    assert ["1", "2", "3", "4", "AVG.", "x"] in lines
    assert ["top-p", "0.9", "w/o", "penalty", "1.01", "1.02", "1.03", "1.04", "1.02", "1.40"] in lines
    assert ["theta", "1.1", "1.01", "1.02", "1.03", "1.04", "1.02"] in printed("8")
    assert ["k", "=", "5", "1.41", "1.42", "1.40"] in printed("fig4")


@pytest.mark.slow
@pytest.mark.long
def test_an_ablation_runs_all_arms_on_the_same_text(model: Path, text: Path, tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    options = ["--table", "fig3", "--model", str(model), "--tokens", "320", "--text", str(text), "--json", str(path)]
    result = CliRunner().invoke(ablation, ["tokenswift", *options])
    assert result.exit_code == 0, result.output
    assert "Figure 3" in result.output
    document = json.loads(path.read_text())
    assert [(arm["label"], arm["options"]) for arm in document["arms"]] == [
        ("k = 20", {"num_ngrams": 20}),
        ("k = 0", {"num_ngrams": 0}),
    ]
    results = [LongResult.model_validate(arm["result"]) for arm in document["arms"]]
    assert len({result.tokens_sha256 for result in results}) == 1
    assert all(result.has_same_tokens and len(result.records) == 5 for result in results)
    betas = [result.records[-1].total.beta for result in results]
    assert betas[1] == 0.0
    assert document["settings"]["table"] == "fig3"


def test_an_ablation_beyond_the_model_is_refused_before_any_arm_runs(model: Path, text: Path) -> None:
    options = AblationOptions(
        table="14", engine="tokenswift-paper", model=str(model), num_tokens=9000, seed=0, text=text
    )
    with pytest.raises(BenchError, match=r"8192 \+ 9000 tokens"):
        run_ablation(options)


def test_an_unknown_table_names_the_known_ones() -> None:
    result = CliRunner().invoke(ablation, ["tokenswift", "--table", "9"])
    assert result.exit_code == 2
    assert result.stderr.count("\n") == 1
    assert "'fig3'" in result.stderr


def test_too_few_tokens_are_refused_in_one_line() -> None:
    result = CliRunner().invoke(ablation, ["tokenswift", "--table", "5", "--tokens", "10"])
    assert result.exit_code == 2
    assert "num_tokens" in result.stderr
    assert result.stderr.count("\n") == 1
