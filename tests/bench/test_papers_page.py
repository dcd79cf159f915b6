"""Every command of the papers' page runs in a tiny form, and the tables that it names exist."""

from __future__ import annotations

import functools
import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from bench import griffin_ablation
from bench.__main__ import main
from bench.griffin_ablation import GRIFFIN_TABLES
from bench.papers import PAPERS
from bench.token_recycling_ablation import RECYCLING_TABLES
from bench.tokenswift_ablation import ABLATIONS
from bench.triforce_ablation import PROMPT_TABLES
from bench.triforce_figures import FORWARD_FIGURES
from swiftbatch.worker.drafters.tokenswift.decoding_heads import save_heads
from swiftbatch.worker.model.model_files import PARTS_FOLDER, locate_model
from swiftbatch.worker.training.recipes import GriffinRecipe, HeadRecipe
from tests import ROOT
from tests.readme.command_lines import commands, page, section

PAGE = page("docs/papers.md")
SECTIONS = {
    "token-recycling": "Token Recycling",
    "tokenswift": "TokenSwift",
    "triforce": "TriForce",
    "griffin": "GRIFFIN",
}
TABLES = {
    "token-recycling": RECYCLING_TABLES,
    "tokenswift": ABLATIONS,
    "triforce": {**PROMPT_TABLES, **FORWARD_FIGURES},
    "griffin": GRIFFIN_TABLES,
}
COMMANDS = commands(PAGE, re.compile(r"python -m bench papers ([a-z].*)"))
TEXTS = HeadRecipe(num_book_tokens=120, num_prompt_tokens=16, num_own_tokens=60)
FAST = GriffinRecipe(num_step_windows=2, window_length=64, num_warmup_steps=1, texts=TEXTS)
TINY = {
    "token-recycling": ["--table", "3c", "--per-category", "1", "--tokens", "4", "--prompts", "question.jsonl"],
    "tokenswift": ["--table", "fig3", "--tokens", "320"],
    "triforce": ["--table", "1", "--prefill", "300", "--tokens", "12"],
    "griffin": ["--table", "1c", "--steps", "2", "--own-texts", "2"],
}
"""One table of each paper, with sizes after which the later of two equal options counts."""


def test_the_page_has_a_section_and_a_command_of_every_paper() -> None:
    assert set(SECTIONS) == set(PAPERS) == {words[0] for words in COMMANDS}


@pytest.mark.parametrize("name", PAPERS)
def test_tables_that_the_page_names_exist(name: str) -> None:
    own = section(PAGE, SECTIONS[name])
    named = re.findall(r"--table (\w+)", own)
    assert named
    assert set(named) <= set(TABLES[name])
    assert name != "token-recycling" or set(named) == set(RECYCLING_TABLES)


def test_the_tests_that_the_page_names_exist() -> None:
    named = re.findall(r"`(test_\w+)` in `(tests/[\w/]+\.py)`", PAGE)
    assert len(named) == 3
    for test, path in named:
        assert f"def {test}(" in (ROOT / path).read_text(encoding="utf-8")


@pytest.fixture
def folder(tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the files that the commands name."""
    model = tmp_path / "MODEL"
    shutil.copytree(tiny_model, model)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 16_384}))
    save_heads(model / PARTS_FOLDER, torch.zeros(3, 64, 64), locate_model(str(model)).fingerprint)
    (tmp_path / "book.txt").write_text("".join(f"the lazy fox number {n} jumps over the dog. " for n in range(800)))
    (tmp_path / "DIR").mkdir()
    for name in ("train.jsonl", "test.jsonl"):
        (tmp_path / "DIR" / name).write_text(json.dumps({"text": "the quick brown fox jumps over the lazy dog. " * 20}))
    turns = {"question_id": 81, "category": "writing", "turns": ["the quick fox", "jumps over"]}
    (tmp_path / "question.jsonl").write_text(json.dumps(turns))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.long
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(
    "words",
    [pytest.param(words, marks=() if words[0] == "token-recycling" else pytest.mark.slow) for words in COMMANDS],
    ids=" ".join,
)
def test_every_command_runs_in_a_tiny_form(words: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = griffin_ablation.run
    monkeypatch.setattr(griffin_ablation, "run", functools.wraps(run)(lambda options: run(options, FAST)))
    if words[0] == "triforce":
        place = words.index("--kv-offload")  # belongs to table 3
        words = [*words[:place], *words[place + 2 :]]
    tiny = [*words, "--model", "MODEL", "--threads", "1", "--runs", "1", *TINY[words[0]], "--json", "found.jsonl"]
    result = CliRunner().invoke(main, ["papers", *tiny])
    assert result.exit_code == 0, result.output
    first, *records = [json.loads(line) for line in (folder / "found.jsonl").read_text().splitlines()]
    assert first["paper"] == words[0]
    assert records
