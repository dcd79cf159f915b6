"""The ablation of TokenSwift: all arms say the same, and the table has the paper's rows and columns."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from bench.ablation_commands import ablation
from bench.long_figures import LongFigures, LongRecord, LongResult
from bench.tokenswift_ablation import CACHES, AblationOptions, render, run_ablation
from swiftbatch.worker.bench_texts import BenchError
from swiftbatch.worker.drafters.tokenswift.decoding_heads import save_heads
from swiftbatch.worker.model.model_files import PARTS_FOLDER, locate_model
from tests.bench.bench_parts import words

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


def made_up() -> dict[str, LongResult]:
    """A result for each arm; every figure tells which arm and which length it is of."""
    results = {}
    for arm, label in enumerate(CACHES.values()):
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
        results[label] = LongResult(
            engine="tokenswift-paper",
            num_tokens=LENGTHS[-1],
            prefill_seconds=1.0,
            tokens_sha256="",
            records=records,
            plain_windows=[],
            marks=[],
            plain_seconds=[],
        )
    return results


def test_rows_are_lengths_and_columns_arms() -> None:
    lines = words(render(made_up(), LENGTHS))
    assert ["tokens", "full", "cache", "partial", "cache", "dynamic", "partial", "summary", "(ours)"] in lines
    assert ["4K", "alpha", "0.01", "1.01", "2.01", "3.01"] in lines
    assert ["x", "0.00", "1.00", "2.00", "3.00"] in lines
    assert ["20K", "alpha", "0.41", "1.41", "2.41", "3.41"] in lines


@pytest.mark.slow
@pytest.mark.long
def test_an_ablation_runs_all_arms_on_the_same_text(model: Path, text: Path, tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    options = ["--table", "5", "--model", str(model), "--tokens", "320", "--text", str(text), "--json", str(path)]
    result = CliRunner().invoke(ablation, ["tokenswift", *options])
    assert result.exit_code == 0, result.output
    assert "Table 5" in result.output
    document = json.loads(path.read_text())
    assert [arm["label"] for arm in document["arms"]] == list(CACHES.values())
    results = [LongResult.model_validate(arm["result"]) for arm in document["arms"]]
    assert len({result.tokens_sha256 for result in results}) == 1
    assert all(result.has_same_tokens and len(result.records) == 5 for result in results)


def test_an_ablation_beyond_the_model_is_refused_before_any_arm_runs(model: Path, text: Path) -> None:
    options = AblationOptions(model=str(model), num_tokens=13_000, seed=0, text=text)
    with pytest.raises(BenchError, match=r"4096 \+ 13000 tokens"):
        run_ablation(options)


def test_an_unknown_table_names_the_known_ones() -> None:
    result = CliRunner().invoke(ablation, ["tokenswift", "--table", "9"])
    assert result.exit_code == 2
    assert result.stderr.count("\n") == 1
    assert "'5'" in result.stderr


def test_too_few_tokens_are_refused_in_one_line() -> None:
    result = CliRunner().invoke(ablation, ["tokenswift", "--table", "5", "--tokens", "10"])
    assert result.exit_code == 2
    assert "num_tokens" in result.stderr
    assert result.stderr.count("\n") == 1
