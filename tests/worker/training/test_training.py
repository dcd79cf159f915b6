"""`train target` makes a runnable model folder from JSONL books, also after a kill."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from swiftbatch.jobs.errors import ModelError
from swiftbatch.jobs.job import Job, Message
from swiftbatch.jobs.sampling_params import SamplingParams
from swiftbatch.worker.forward.target_model import TargetModel
from swiftbatch.worker.model.model_files import locate_model
from swiftbatch.worker.text.tokenizer import TextCodec
from swiftbatch.worker.training import recipes, target_evaluation, target_stages
from swiftbatch.worker.training import train_target as target
from swiftbatch.worker.training.corpus import CorpusError, read_books
from swiftbatch.worker.training.recipes import Recipe
from swiftbatch.worker.training.target_recipe import KINDS, TargetRecipe, WindowKind, embedded_recipe, long_text_recipe
from swiftbatch.worker.training.target_stages import WindowSource
from swiftbatch.worker.training.training_texts import load_target
from tests.worker.training.small_target import score_short_texts, train_small_targets

pytestmark = pytest.mark.long

BOOK = "The clock in the hall had stopped, and nobody in the house could say at what hour it had done so.\n\n"
SHORT_TEXTS = dataclasses.replace(
    long_text_recipe(2, seed=2),
    num_steps=6,
    kinds=(WindowKind("beside", 32, 1, 1.0),),
    length=384,
    segment=128,
    near=64,
)
LATER: dict[str, Any] = {"seed": 3, "closeness": 4.0, "is_near_right_alone": True}
LAST: dict[str, Any] = LATER | {"seed": 4, "pieces": (64, 200)}
SHORT_RECIPE = dataclasses.replace(
    embedded_recipe(),
    num_steps=8,
    kinds=(WindowKind("short", 64, 4, 0.6), WindowKind("long", 256, 1, 0.4, mixed_share=0.5)),
    num_warmup_steps=2,
    long_texts=(SHORT_TEXTS, *(dataclasses.replace(SHORT_TEXTS, **fields) for fields in (LATER, LAST))),
)
WINDOWS_ALONE = dataclasses.replace(SHORT_RECIPE, long_texts=())


@pytest.fixture
def data(tmp_path: Path) -> Path:
    folder = tmp_path / "books"
    folder.mkdir()
    for name in ("train-0.jsonl", "test.jsonl"):
        lines = [json.dumps({"text": BOOK * 60 + str(number)}) for number in range(3)]
        (folder / name).write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(1)
    train_small_targets(monkeypatch)
    score_short_texts(monkeypatch)


def log_of(folder: Path) -> list[dict[str, float]]:
    records = [json.loads(line) for line in (folder / "train_log.jsonl").read_text().splitlines()]
    return [record for record in records if "loss" in record]


def test_training_writes_a_model_that_loads_and_a_card(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "model"
    said: list[str] = []
    target.train_target(data, output, SHORT_RECIPE, said.append)
    losses = [record["loss"] for record in log_of(output)]
    assert len(losses) == 26
    assert losses[7] < losses[0] - 0.5
    assert sum("nats between its view and the near one" in line for line in said) == 6
    files = locate_model(str(output))
    assert TargetModel.load(files, "bfloat16", "cpu").dtype.itemsize == 2
    codec = TextCodec(files)
    assert codec.decode(codec.encode(BOOK)) == BOOK
    card = (output / "MODEL_CARD.md").read_text(encoding="utf-8")
    assert re.search(r"forward:\n\d\.\d{3} bits per byte", card)
    assert re.search(r"^\| 100-500 \| \d\.\d{3} \| \d\.\d{3} \|$", card, re.MULTILINE)
    num_tokens = sum(record["num_tokens"] for record in log_of(output)[:8])
    assert f"| trained in windows | {num_tokens:,} tokens in 8 steps, 0 minutes on 1 processor cores |" in card
    for number in (1, 2, 3):
        line = f"trained in long texts {number} | {6 * (128 + 32):,} tokens in 6 steps, 0 minutes on 1 processor cores"
        assert line in card
    assert "Then long texts, read whole, a segment of 128 tokens a step" in card
    assert "| 1 | 2 | 384 | to their ends | 2 times | everywhere | 2 |" in card
    assert "| 2 | 2 | 384 | to their ends | 4 times | where it gave more | 3 |" in card
    assert "| 3 | 2 | 384 | in pieces of 64 to 200 | 4 times | where it gave more | 4 |" in card
    assert "bits per byte" in said[-1]
    monkeypatch.setattr(target_evaluation, "NEAR", 100)
    evaluation = target_evaluation.evaluate_target(output, data / "test.jsonl", 1)
    whole, near = evaluation.loss_by_position, evaluation.near_loss_by_position
    assert near["0-100"] == pytest.approx(whole["0-100"], abs=0.04)  # nothing is further back there
    assert near["100-500"] != whole["100-500"]
    target.train_target(data, output, SHORT_RECIPE, said.append)
    assert said[-1].endswith("holds this training, finished; nothing to do")


@pytest.mark.slow
def test_a_hybrid_is_trained_with_the_embedded_tokenizer_and_its_card_says_how(data: Path, tmp_path: Path) -> None:
    output, kind = tmp_path / "model", "qwen3_5_text"
    target.train_target(data, output, WINDOWS_ALONE, lambda line: None, kind)
    files = locate_model(str(output))
    assert TargetModel.load(files, "bfloat16", "cpu").vocab_size == 4096
    assert TextCodec(files).encode(BOOK) == TextCodec(locate_model("embedded")).encode(BOOK)
    card = (output / "MODEL_CARD.md").read_text(encoding="utf-8")
    assert "A small decoder of Qwen3.5's kind" in card
    assert f"`swiftbatch train target --kind {kind} --data DIR`" in card
    assert "with gates; in 1 of 2 layers gated delta nets in its place, 4 heads of 64 over 2 of keys |" in card
    with pytest.raises(ModelError, match=f"kind is {kind}, expected null"):
        target.train_target(data, output, WINDOWS_ALONE, lambda line: None)


def test_a_text_begins_with_the_token_that_training_puts_in_front(data: Path, tmp_path: Path) -> None:
    target.train_target(data, tmp_path / "model", dataclasses.replace(WINDOWS_ALONE, num_steps=1), lambda line: None)
    codec, sampling = TextCodec(locate_model(str(tmp_path / "model"))), SamplingParams(max_tokens=1, seed=0)
    [first] = codec.encode("")
    prompt = codec.prompt_of(Job(custom_id="a", url="/v1/completions", prompt="The clock", sampling=sampling)).token_ids
    messages = [Message(role="user", content="The clock")]
    chat = codec.prompt_of(
        Job(custom_id="a", url="/v1/chat/completions", messages=messages, sampling=sampling)
    ).token_ids
    assert [prompt.count(first), chat.count(first)] == [1, 1]
    assert prompt[0] == chat[0] == first


@pytest.mark.slow
@pytest.mark.parametrize(  # steps: six in windows, three times two texts of three
    ("kind", "stopped_at"),
    [*((recipes.TARGET_KIND, step) for step in (12, 5, 6, 10, 11, 13, 18)), ("qwen3_5_text", 10)],
)
def test_a_killed_training_goes_on_to_the_same_bits_and_logs_each_step_once(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, stopped_at: int
) -> None:
    (data / "test.jsonl").unlink()
    recipe = dataclasses.replace(SHORT_RECIPE, num_steps=6)
    monkeypatch.setattr(target_stages, "NUM_STATE_STEPS", 2)
    target.train_target(data, tmp_path / "whole", recipe, lambda line: None, kind)
    num_done, original = 0, target_stages.add_batch_gradients

    def stopping(*args: object) -> float:
        nonlocal num_done
        num_done += 1
        if num_done > stopped_at:
            raise KeyboardInterrupt
        return original(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(target_stages, "add_batch_gradients", stopping)
    if stopped_at == recipe.all_steps:
        monkeypatch.setattr(target, "save_target", lambda *args: stopping())  # killed after the last step
    with pytest.raises(KeyboardInterrupt):
        target.train_target(data, tmp_path / "killed", recipe, lambda line: None, kind)
    monkeypatch.undo()
    train_small_targets(monkeypatch)
    with pytest.raises(ModelError, match=r"recipe\.seed is 1, expected 2"):
        target.train_target(data, tmp_path / "killed", dataclasses.replace(recipe, seed=2), lambda line: None, kind)
    target.train_target(data, tmp_path / "killed", recipe, lambda line: None, kind)
    whole, killed = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "killed"))
    assert all(torch.equal(tensor, killed[name]) for name, tensor in whole.items())
    logs = [[(r["step"], r["loss"]) for r in log_of(tmp_path / name)] for name in ("whole", "killed")]
    assert logs[0] == logs[1]
    assert len(logs[0]) == recipe.all_steps
    assert not (tmp_path / "killed" / target.FILES.state).exists()


@pytest.mark.parametrize("length", [10, 64, 100, 192, 201])
def test_losses_without_the_far_text_read_the_newest_tokens_alone(
    length: int, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(target_evaluation, "NEAR", 64)
    model = load_target(locate_model(str(tiny_model))).model.float()
    stretch = torch.from_numpy(np.random.default_rng(length).integers(model.config.vocab_size, size=length + 1))
    losses = target_evaluation.near_position_losses(model, stretch)
    assert len(losses) == length
    for position in range(0, length, 9):
        first = max(1, position // 64 * 64 - 63)
        read = torch.cat([stretch[:1], stretch[first : position + 2]])
        alone = target_evaluation.position_losses(model, read)[-1]
        torch.testing.assert_close(losses[position], alone)


def test_a_test_file_that_is_too_short_is_said_before_training_and_not_scored(data: Path, tmp_path: Path) -> None:
    (data / "test.jsonl").write_text(json.dumps({"text": BOOK}) + "\n", encoding="utf-8")
    said: list[str] = []
    target.train_target(data, tmp_path / "model", dataclasses.replace(WINDOWS_ALONE, num_steps=1), said.append)
    assert re.fullmatch(r".*test\.jsonl: \d+ tokens, and 500 are needed; the model is not scored", said[0])
    assert (tmp_path / "model" / "model.safetensors").is_file()
    assert not (tmp_path / "model" / "MODEL_CARD.md").exists()


@pytest.mark.parametrize("damage", ["notjson\n", "[1]\n", "\udcff\udcfe\n"])
def test_a_log_that_is_none_is_named(data: Path, tmp_path: Path, damage: str) -> None:
    (data / "test.jsonl").unlink()
    recipe = dataclasses.replace(WINDOWS_ALONE, num_steps=1)
    target.train_target(data, tmp_path / "model", recipe, lambda line: None)
    log = tmp_path / "model" / target.FILES.log
    log.write_bytes(damage.encode(errors="surrogateescape") + log.read_bytes())
    with pytest.raises(ModelError, match=r"train_log\.jsonl: no log of a training .*; delete it"):
        target.train_target(data, tmp_path / "model", recipe, lambda line: None)


def test_weights_that_are_torn_are_made_again(data: Path, tmp_path: Path) -> None:
    (data / "test.jsonl").unlink()
    recipe = dataclasses.replace(WINDOWS_ALONE, num_steps=1)
    weights = tmp_path / "model" / "model.safetensors"
    target.train_target(data, tmp_path / "model", recipe, lambda line: None)
    whole = weights.read_bytes()
    weights.write_bytes(whole[:1000])
    target.train_target(data, tmp_path / "model", recipe, lambda line: None)
    assert weights.read_bytes() == whole


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "hold no text"),
        (b'{"text": ""}\n{"text": ""}\n', "hold no text"),
        (b'{"text": null}\n', r"train\.jsonl, line 1, text: found NoneType, expected a string"),
        (b'{"text": "\xff"}\n', r"train\.jsonl, line 1: expected a JSON object"),
    ],
)
def test_books_that_hold_nothing_are_refused(tmp_path: Path, content: bytes, problem: str) -> None:
    (tmp_path / "train.jsonl").write_bytes(content)
    with pytest.raises(CorpusError, match=problem):
        list(read_books(tmp_path))


def test_data_without_books_is_named(tmp_path: Path) -> None:
    with pytest.raises(CorpusError, match=r"no file matches \*train\*\.jsonl"):
        list(read_books(tmp_path))


def test_a_broken_record_is_named_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text('{"text": "fine"}\n{"title": "no text"}\n', encoding="utf-8")
    with pytest.raises(CorpusError, match=r"train\.jsonl, line 2"):
        list(read_books(tmp_path))


BOOKS = [np.arange(number * 10_000 + 1, number * 10_000 + 9001, dtype=np.uint16) for number in range(4)]
FIRST = 0


def windows(num_steps: int = 60, **fields: object) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return token ids and positions; in these books tokens tell their place."""
    kind = WindowKind("any", 400, 2, 1.0, mixed_share=float(fields.pop("mixed_share", 0.0)))  # type: ignore[arg-type]
    recipe = TargetRecipe(num_steps, kinds=(kind,), **fields)  # type: ignore[arg-type]
    source = WindowSource(BOOKS, FIRST, recipe, max_positions=20_000)
    batches = [source.batch(step) for step in range(num_steps)]
    return [
        (ids.numpy(), positions.numpy())
        for batch in batches
        for ids, positions in zip(batch.token_ids, batch.positions, strict=True)
    ]


def test_every_window_begins_with_the_first_token_at_position_0_and_goes_on() -> None:
    for ids, positions in windows(mixed_share=0.3):
        assert (len(ids), len(positions)) == (401, 400)
        assert (ids[0], positions[0]) == (FIRST, 0)
        assert (np.diff(positions) >= 1).all()
        assert positions[-1] < 20_000


def test_texts_are_read_from_position_0_on_or_far_from_it_with_positions_left_out_where_text_is() -> None:
    found = windows(far_share=0.6)
    assert 0.3 < np.mean([positions[1] == 1 for _, positions in found]) < 0.55
    assert max(positions[-1] for _, positions in found) > 15_000
    skipping = [pair for pair in found if (np.diff(pair[1][1:]) > 1).any()]
    assert len(skipping) > 0.1 * len(found)
    for ids, positions in skipping:
        assert (np.diff(positions[1:]) == np.diff(ids[1:-1])).all()  # the books count up


def test_two_books_come_by_turns_and_each_goes_on_where_it_was_left() -> None:
    for ids, positions in windows(20, mixed_share=1.0):
        assert (positions == np.arange(400)).all()
        books = ids[1:] // 10_000
        for book in np.unique(books):
            text = ids[1:][books == book]
            assert (np.diff(text[text != FIRST]) == 1).mean() > 0.98
    assert any(len(np.unique(ids[1:] // 10_000)) > 1 for ids, _ in windows(20, mixed_share=1.0))


def test_a_step_s_windows_follow_from_seed_and_step_alone_and_differ() -> None:
    one, two, other = windows(5), windows(5), windows(5, seed=2)
    assert all((a == b).all() for pair, again in zip(one, two, strict=True) for a, b in zip(pair, again, strict=True))
    assert any((a[0] != b[0]).any() for a, b in zip(one, other, strict=True))
    assert len({ids.tobytes() for ids, _ in one}) == len(one)


def test_tokens_have_the_shares_that_the_kinds_say() -> None:
    recipe = embedded_recipe(20_000_000)
    steps = [recipe.kind_of(step) for step in range(recipe.num_steps)]
    total = sum(kind.num_tokens for kind in steps)
    assert total == pytest.approx(20_000_000, rel=0.03)
    for kind in KINDS:
        assert steps.count(kind) * kind.num_tokens / total == pytest.approx(kind.share, abs=0.02)


def test_the_rate_warms_up_stays_and_falls() -> None:
    recipe = Recipe(100, num_warmup_steps=10, decay_share=0.5, final_rate=0.1)
    assert [round(recipe.rate(step), 2) for step in (0, 9, 49, 75, 99)] == [0.1, 1.0, 1.0, 0.55, 0.12]
