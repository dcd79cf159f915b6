"""`train target` makes a model folder that swiftbatch can run, from books in JSONL."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from worker.model.files import locate_model
from worker.model.text import TextCodec
from worker.target.target import TargetModel
from worker.training.corpus import CorpusError, WindowSampler, read_books
from worker.training.heads.texts import load_target
from worker.training.target import evaluate
from worker.training.target import training as target
from worker.training.target.recipe import EMBEDDED_RECIPE, Phase, Recipe

BOOK = "The clock in the hall had stopped, and nobody in the house could say at what hour it had done so.\n\n"
SHORT_RECIPE = dataclasses.replace(
    EMBEDDED_RECIPE,
    phases=(Phase("short", 64, 4, 64 * 4 * 6, 64), Phase("long", 256, 1, 512, 1024)),
    num_warmup_steps=2,
)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    folder = tmp_path / "books"
    folder.mkdir()
    for name in ("train-0.jsonl", "test.jsonl"):
        lines = [json.dumps({"text": BOOK * 60 + str(number)}) for number in range(3)]
        (folder / name).write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder


def test_training_writes_a_model_that_loads_and_a_card(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(target, "VOCAB_SIZE", 300)
    monkeypatch.setattr(evaluate, "STRETCH", 500)
    monkeypatch.setattr(evaluate, "POSITION_RANGES", ((0, 100), (100, 500)))
    output = tmp_path / "model"
    said: list[str] = []
    target.train_target(data, output, SHORT_RECIPE, said.append)
    losses = [json.loads(line)["loss"] for line in (output / "train_log.jsonl").read_text().splitlines()]
    assert losses[-1] < losses[0] - 0.5
    files = locate_model(str(output))
    assert TargetModel.load(files, "bfloat16", "cpu").dtype.itemsize == 2
    codec = TextCodec(files)
    assert codec.decode(codec.encode(BOOK)) == BOOK
    card = (output / "MODEL_CARD.md").read_text(encoding="utf-8")
    assert re.search(r"forward:\n\d\.\d{3} bits per byte", card)
    assert re.search(r"^\| 100-500 \| \d\.\d{3} \| \d\.\d{3} \|$", card, re.MULTILINE)
    assert "bits per byte" in said[-1]
    monkeypatch.setattr(evaluate, "NEAR", 100)
    evaluation = evaluate.evaluate_target(output, data / "test.jsonl", 1)
    whole, near = evaluation.loss_by_position, evaluation.near_loss_by_position
    assert near["0-100"] == pytest.approx(whole["0-100"], abs=0.02)  # nothing is further back there
    assert near["100-500"] != whole["100-500"]


@pytest.mark.parametrize("length", [10, 64, 100, 192, 201])
def test_losses_without_the_far_text_read_the_newest_tokens_alone(
    length: int, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evaluate, "NEAR", 64)
    model = load_target(locate_model(str(tiny_model))).model.float()
    stretch = torch.from_numpy(np.random.default_rng(length).integers(model.config.vocab_size, size=length + 1))
    losses = evaluate.near_position_losses(model, stretch)
    assert len(losses) == length
    for position in range(0, length, 9):
        first = max(0, position // 64 * 64 - 64)
        alone = evaluate.position_losses(model, stretch[first : position + 2])[-1]
        torch.testing.assert_close(losses[position], alone)


def test_data_without_books_is_named(tmp_path: Path) -> None:
    with pytest.raises(CorpusError, match=r"no file matches \*train\*\.jsonl"):
        list(read_books(tmp_path))


def test_a_broken_record_is_named_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text('{"text": "fine"}\n{"title": "no text"}\n', encoding="utf-8")
    with pytest.raises(CorpusError, match=r"train\.jsonl, line 2"):
        list(read_books(tmp_path))


def test_gaps_in_positions_reach_far_and_never_go_back() -> None:
    sampler = WindowSampler([np.arange(5000, dtype=np.uint16)], seed=0)
    positions = sampler.positions(batch_size=32, length=100, span=10_000).numpy()
    assert (np.diff(positions, axis=1) >= 1).all()
    assert positions.max() < 10_000
    assert positions.max() > 5000
    assert (sampler.positions(4, 100, 100).numpy() == np.arange(100)).all()


def test_the_rate_warms_up_stays_and_falls() -> None:
    recipe = Recipe(phases=(), num_warmup_steps=10, decay_share=0.5, final_rate=0.1)
    rate = target.rate_schedule(recipe, num_steps=100)
    assert [round(rate(step), 2) for step in (0, 9, 49, 75, 99)] == [0.1, 1.0, 1.0, 0.55, 0.12]
