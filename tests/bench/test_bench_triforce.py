"""The table of TriForce: every arm says what plain decoding says, and what is shown is what was measured."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result

from bench.ablation_arms import PromptFigures
from bench.ablation_commands import ablation
from bench.triforce_ablation import PromptAblationOptions, arms_of, render, run_prompt_ablation, triforce_options
from bench.variants import TRIFORCE_PAPER
from swiftbatch.worker.kv.sparse_cache import SummaryKVCache
from tests.bench.bench_parts import words


@pytest.fixture(autouse=True)
def _one_thread(_fixed_threads: None) -> None:
    torch.set_num_threads(1)  # two would wait for each other on a busy machine, and clocks are read here


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("".join(f"the lazy fox number {n} jumps over the dog. " for n in range(40)))
    return path


def bench(*args: str) -> Result:
    return CliRunner().invoke(ablation, ["triforce", *args])


@pytest.mark.parametrize("prefill", [300, 32_768, 100_000])
def test_every_arm_can_run_behind_a_prompt_longer_than_its_cache(prefill: int) -> None:
    arms = arms_of(prefill)
    assert [t for _, t in arms][:7] == ["0.0", "0.2", "0.4", "0.6", "0.8", "1.0", "1.2"]
    assert all(triforce_options(arm).budget < prefill for arm in arms.values())


def test_draft_caches_are_those_that_rows_are_named_after() -> None:
    options = {row: triforce_options(arm) for row, arm in arms_of(32_768).items()}
    assert options["TriForce", "0.6"].cache is SummaryKVCache
    assert options["TriForce, retrieval cache", "0.6"].cache is options["the same, gammas 2 and 6", "0.6"].cache
    assert options["the same, gammas 2 and 6", "0.6"] == replace(TRIFORCE_PAPER, budget=4096)


def made_up(key: int) -> PromptFigures:
    """Figures that tell which arm they are of."""
    return PromptFigures(
        num_tokens=256,
        num_plain_tokens=64,
        ms_per_token=1234.5 + key,
        plain_ms_per_token=2345.6 + key,
        speedup=10 + key,
        acceptance=key / 100,
        middle_acceptance=None if key % 2 else key / 1000,
        tokens_per_step=12.34,
        drafted_per_step=23.45,
        rounds_per_step=34.56,
        first_step_ms=123_456.7,
        step_ms={"propose": 1.0, "verify": 1234.5, "commit": 0.01},
        draft_ms={"follow": 1234.5, "propose": 1234.5, "check": 1234.5},
        tokens_sha256="",
    )


def test_rows_show_the_paper_s_measures() -> None:
    arms = arms_of(122_880)
    figures = {(*row, arm.plan): made_up(10 * n) for n, (row, arm) in enumerate(arms.items())}
    naive = {(*row, "naive"): made_up(10 * n + 1) for n, row in enumerate(arms) if row[0] == "TriForce"}
    lines = words(render(arms, figures | naive))
    assert ["TriForce", "0.6", "40.00x", "(0.300)", "0.030", "41.00x", "(0.310)"] in lines
    assert ["retrieval", "w/o", "hierarchy", "0.6", "100.00x", "(0.900)", "0.090", "-"] in lines


@pytest.mark.slow
def test_a_run_shows_what_its_json_holds(tiny_model: Path, text: Path, tmp_path: Path) -> None:
    path, said = tmp_path / "table.json", list[str]()
    options = PromptAblationOptions(
        model=str(tiny_model), prefill=300, num_tokens=40, seed=0, text=text, json_path=path
    )
    lines = words(run_prompt_ablation(options, said.append))
    figures = {
        (*arm["row"], arm["plan"]): PromptFigures.model_validate(arm["figures"])
        for arm in json.loads(path.read_text())["arms"]
    }
    assert len(figures) == 7 + 11
    naive = figures["TriForce", "0.6", "naive"].speedup
    assert any(line[:2] == ["TriForce", "0.6"] and f"{naive:.2f}x" in line for line in lines)
    assert said[0].startswith("reading 300 tokens; each arm generates 40")


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--table", "2", "--tokens", "20"], "num_tokens"),
        (["--table", "2", "--prefill", "256"], "prefill"),
        (["--table", "2", "--prefill", "4090"], "4090 + 40 tokens"),
        (["--table", "7"], "'2'"),
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
