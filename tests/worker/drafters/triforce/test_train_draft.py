from __future__ import annotations

import dataclasses
import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner, Result
from torch.nn.functional import cross_entropy

from swiftbatch.jobs.errors import ModelError
from swiftbatch.scheduler.cli import main
from swiftbatch.worker.drafters.engine_options import NUM_SINKS
from swiftbatch.worker.forward.target_model import TargetModel
from swiftbatch.worker.forward.tile_packing import chain_rows
from swiftbatch.worker.model import weight_files
from swiftbatch.worker.model.model_files import locate_model
from swiftbatch.worker.text.tokenizer import TextCodec
from swiftbatch.worker.training import recipes
from swiftbatch.worker.training import train_draft as draft
from swiftbatch.worker.training.corpus import CorpusError
from swiftbatch.worker.training.feature_files import TextFeatures, TextSource
from swiftbatch.worker.training.recipes import OWN_SAMPLING, DraftRecipe, TextRecipe, draft_recipe
from swiftbatch.worker.training.train_draft import (
    SAMPLING,
    DraftWindows,
    add_gradients,
    target_distributions,
    train_draft,
)
from tests.worker.drafters.triforce.draft_parts import untrained

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("one_thread")]

SENTENCE = "the quick brown fox jumps over the lazy dog. "
TEXTS = TextRecipe(num_book_tokens=200, num_own_texts=4, num_prompt_tokens=16, num_own_tokens=60)
FAST = DraftRecipe(25, window_length=64, num_warmup_steps=2, texts=TEXTS)


def records(output: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (output / draft.FILES.log).read_text(encoding="utf-8").splitlines()]


def command(model: Path, data: Path, output: Path, *more: str) -> Result:
    options = ["--model", str(model), "--data", str(data), "--output", str(output), "--steps", "2"]
    return CliRunner().invoke(main, ["train", "draft", *options, "--own-texts", "2", *more])


def test_the_command_writes_a_model_that_runs_with_the_targets_tokenizer(
    tiny_model: Path, books: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = TextRecipe(num_own_texts=2, num_prompt_tokens=510, num_own_tokens=20)
    monkeypatch.setattr(recipes, "DRAFT_TEXTS", texts)
    (books / "test.jsonl").unlink()
    result = command(tiny_model, books, tmp_path / "draft")
    assert result.exit_code == 0, result.output
    assert "no *test*.jsonl" in result.output
    target_files, files = locate_model(str(tiny_model)), locate_model(str(tmp_path / "draft"))
    model = TargetModel.load(files, "bfloat16", "cpu")
    token_ids = TextCodec(target_files).encode(SENTENCE)
    assert TextCodec(files).encode(SENTENCE) == token_ids
    assert (files.vocab_size, files.max_positions) == (target_files.vocab_size, 1024)
    assert model.eos_token_ids == TargetModel.load(target_files, "bfloat16", "cpu").eos_token_ids
    [outputs] = model.verify([chain_rows(model.new_cache(100), token_ids)])
    assert outputs.logits.shape == (len(token_ids), target_files.vocab_size)
    assert [record["step"] for record in records(tmp_path / "draft")[1:]] == [1, 2]
    assert (tmp_path / "draft" / draft.FILES.plot).is_file()
    again = command(tiny_model, books, tmp_path / "draft")
    assert "holds this training, finished; nothing to do" in again.output


@pytest.mark.slow
def test_training_makes_a_draft_model_that_agrees(tiny_model: Path, books: Path, tmp_path: Path) -> None:
    said: list[str] = []
    train_draft(str(tiny_model), books, tmp_path / "draft", FAST, said.append)
    log = records(tmp_path / "draft")
    losses = [record["loss"] for record in log if "loss" in record]
    before, after = (
        {record["texts"]: record["same"] for record in log if record.get("when") == when}
        for when in ("before", "after")
    )
    assert len(losses) == 25
    assert losses[-1] < losses[0] - 0.3
    assert set(before) == set(after) == {"test books", *(f"own text, {name}" for name in OWN_SAMPLING)}
    gains = {name: after["test books"][name] - before["test books"][name] for name in SAMPLING}
    assert min(gains.values()) > 0.15  # the text repeats one sentence, the random target does not
    assert any(line.startswith("after training, test books: the same token as the target for ") for line in said)


@pytest.mark.slow
def test_training_is_reproducible_and_the_seed_counts(tiny_model: Path, books: Path, tmp_path: Path) -> None:
    (books / "test.jsonl").unlink()
    short = dataclasses.replace(FAST, num_steps=3, num_step_windows=2)
    for name, seed in (("one", 3), ("two", 3), ("other", 4)):
        recipe = dataclasses.replace(short, seed=seed)
        train_draft(str(tiny_model), books, tmp_path / name, recipe, lambda line: None)
    one, two, other = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("one", "two", "other"))
    assert one == two != other


@torch.no_grad()
def cost(logits: torch.Tensor, labels: torch.Tensor) -> float:
    return float(cross_entropy(logits.flatten(0, 1), labels.flatten(0, 1)))


def test_labels_are_what_the_target_expects_in_each_place(tiny_target: TargetModel) -> None:
    model = untrained(tiny_target)
    with torch.no_grad():
        model.model.norm.weight *= 5  # both confident, so that shifted labels cost something else
        tiny_target.model.lm_head.weight *= 5
    windows = torch.randint(250, (2, 4), generator=torch.Generator().manual_seed(1))
    expected = tiny_target.model(windows).logits.float().softmax(dim=-1)
    torch.testing.assert_close(target_distributions(tiny_target, windows), expected, rtol=0.1, atol=0.02)
    loss = add_gradients(model, tiny_target, windows, windows.numel())
    logits = model(windows).logits
    assert loss == pytest.approx(cost(logits, expected), rel=0.003)
    hard = torch.nn.functional.one_hot(windows.roll(-1, dims=1), expected.shape[-1]).float()
    for other in (expected.roll(1, dims=1), expected.roll(-1, dims=1), hard):
        assert abs(loss - cost(logits, other)) > 0.01 * loss


def test_a_step_is_the_same_in_parts_and_the_target_stays_frozen(
    tiny_target: TargetModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    windows = torch.randint(250, (4, 20), generator=torch.Generator().manual_seed(2))
    before = {name: parameter.clone() for name, parameter in tiny_target.model.named_parameters()}
    gradients, losses = [], []
    for num_logits in (2**21, 1):
        monkeypatch.setattr(draft, "NUM_LOGITS", num_logits)
        model = untrained(tiny_target)
        losses.append(add_gradients(model, tiny_target, windows, windows.numel()))
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)
    assert (gradients[0] - gradients[1]).norm() < 0.02 * gradients[0].norm()
    assert all(torch.equal(p, before[name]) for name, p in tiny_target.model.named_parameters())


def test_a_share_of_the_windows_is_the_targets_own_text(tiny_target: TargetModel, books: Path, tmp_path: Path) -> None:
    recipe = dataclasses.replace(FAST, own_share=0.25)
    source = TextSource(tiny_target, books, tmp_path, recipe.texts, recipe.window_length, lambda line: None)
    batch = draft.window_source(source, recipe)
    windows = torch.cat([batch(step) for step in range(20)])
    sentence = TextCodec(tiny_target.files).encode(SENTENCE * 3)
    from_books = [
        " ".join(map(str, window[NUM_SINKS:24])) in " ".join(map(str, sentence)) for window in windows.tolist()
    ]
    assert windows.shape == (80, 64)
    assert sum(from_books) == 60


def test_windows_lie_in_one_text_and_a_third_of_them_jump() -> None:
    ids = [torch.arange(first, end).to(torch.uint32) for first, end in ((0, 1000), (5000, 5100), (7000, 7064))]
    windows = (
        DraftWindows([TextFeatures("books", 0, each, torch.empty(len(each), 0)) for each in ids])
        .batch(np.random.default_rng(0), 3000, 64, NUM_SINKS)
        .numpy()
    )
    first = windows[:, 0]
    assert windows.shape == (3000, 64)
    assert all((windows // 1000 == first[:, None] // 1000).all(axis=1))
    steps = np.diff(windows, axis=1)
    begins = np.isin(first, [0, 5000, 7000]) & (windows[:, NUM_SINKS - 1] == first + NUM_SINKS - 1)
    assert (np.delete(steps, NUM_SINKS - 1, axis=1) == 1).all()
    jumped = steps[:, NUM_SINKS - 1] > 1
    assert begins[jumped].all()
    long = first < 1000
    assert 0.28 < jumped[long].mean() < 0.38
    assert (windows[jumped & long].max(), windows[long].min()) == (999, 0)
    assert 0.8 < long.mean() < 0.9


TABLE_11 = {  # of TokenSwift's appendix C, scaled down; it names no number of layers
    "hidden_size": 96,
    "hidden_act": "silu",
    "intermediate_size": 384,
    "max_position_embeddings": 2048,
    "num_attention_heads": 12,
    "num_key_value_heads": 12,
    "num_hidden_layers": 1,
    "rope_theta": 500_000,
    "tie_word_embeddings": False,
}


def test_a_draft_model_of_another_shape_is_pretrained_without_own_texts(
    tiny_model: Path, books: Path, tmp_path: Path
) -> None:
    (books / "test.jsonl").unlink()
    config, output = tmp_path / "config.json", tmp_path / "draft"
    config.write_text(json.dumps(TABLE_11), encoding="utf-8")
    given = ["--config", str(config), "--labels", "hard", "--own-texts", "0", "--samples", "3"]
    result = command(tiny_model, books, output, *given)
    assert result.exit_code == 0, result.output
    assert "num_tokens" in records(output)[-1]
    assert records(output)[-1]["num_tokens"] == 3 * 527
    found = json.loads((output / "config.json").read_text())
    assert found["rope_parameters"]["rope_theta"] == 500_000
    assert {name: found[name] for name in TABLE_11 if name != "rope_theta"} == {
        name: value for name, value in TABLE_11.items() if name != "rope_theta"
    }
    assert found["vocab_size"] == locate_model(str(tiny_model)).vocab_size
    config.write_text(json.dumps(TABLE_11 | {"hidden_size": 48}), encoding="utf-8")
    for options, problem in (
        (given, "recipe.shape.hidden_size is 96, expected 48"),
        (given[2:], "recipe.shape is {"),
    ):
        other = command(tiny_model, books, output, *options)
        assert other.exit_code == 2
        assert problem in other.output


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"hiden_size": 3}, "unknown fields hiden_size; expected those of a llama's config"),
        ({"model_type": "gpt2"}, "expected a JSON object with `model_type` llama"),
        ({"hidden_size": 97}, "no model has this shape: .*not a multiple of the number of attention heads"),
        ({"hidden_size": "96"}, "no model has this shape: .*expected int, got str"),
        ({"num_key_value_heads": 5}, "no model has this shape: "),
        ({"vocab_size": 7}, "vocab_size is 7, expected the model's, 289"),
        ({"max_position_embeddings": 100}, "max_position_embeddings is 100, expected 528 or more"),
    ],
)
def test_a_shape_that_cannot_be_is_one_line(
    tiny_model: Path, books: Path, tmp_path: Path, changes: dict[str, object], problem: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(TABLE_11 | changes), encoding="utf-8")
    refused = command(tiny_model, books, tmp_path / "draft", "--config", str(tmp_path))
    assert refused.exit_code == 2
    assert re.search(problem, refused.output)
    assert len(refused.output.strip().splitlines()) == 1
    assert not (tmp_path / "draft").exists()


def test_hard_labels_are_the_next_tokens(tiny_target: TargetModel) -> None:
    model = untrained(tiny_target)
    windows = torch.randint(250, (3, 9), generator=torch.Generator().manual_seed(1))
    loss = add_gradients(model, tiny_target, windows, windows[:, 1:].numel(), "hard")
    with torch.no_grad():
        logits = model(windows).logits.float()
    assert loss == pytest.approx(float(cross_entropy(logits[:, :-1].flatten(0, 1), windows[:, 1:].flatten())), rel=0.01)
    books = TextFeatures("books", 0, torch.arange(500).to(torch.uint32), torch.empty(500, 0))
    drawn = DraftWindows([books]).batch(np.random.default_rng(0), 200, 40, 0)
    assert (drawn.diff(dim=1) == 1).all()


@pytest.mark.parametrize("labels", ["soft", "hard"])
def test_shorter_texts_are_padded_with_tokens_that_do_not_count(
    tiny_target: TargetModel, labels: recipes.Labels
) -> None:
    short = TextFeatures("books", 0, torch.arange(20).to(torch.uint32), torch.empty(20, 0))
    [padded] = DraftWindows([short]).batch(np.random.default_rng(0), 1, 30, NUM_SINKS)
    assert padded.tolist() == [*range(20), *[draft.NO_TOKEN] * 10]
    num_rows, losses = 20 - (labels == "hard"), []
    for windows in (padded[None], padded[None, :20]):
        assert int(draft.has_label(windows, labels).sum()) == num_rows
        losses.append(add_gradients(untrained(tiny_target), tiny_target, windows, num_rows, labels))
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)


def test_bad_data_is_one_line(tiny_model: Path, tmp_path: Path) -> None:
    result = command(tiny_model, tmp_path, tmp_path / "draft")
    assert result.exit_code != 0
    assert "no file matches *train*.jsonl" in result.output
    assert len(result.output.strip().splitlines()) == 1
    (tmp_path / "train.jsonl").write_text(json.dumps({"text": SENTENCE}) + "\n", encoding="utf-8")
    with pytest.raises(CorpusError, match=r"too short, the longest has \d+ tokens; expected 64 or more") as caught:
        train_draft(str(tiny_model), tmp_path, tmp_path / "draft", draft_recipe(4, 0, num_steps=1), lambda line: None)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "draft").exists()


@pytest.mark.parametrize("of_own_texts", [False, True])
def test_a_target_that_gives_nan_behind_some_tokens_is_no_teacher(
    tiny_target: TargetModel, books: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, of_own_texts: bool
) -> None:
    monkeypatch.setattr(weight_files, "_refuse_endless", lambda *_: None)  # in place of weights that overflow later
    word = TextCodec(tiny_target.files).encode(SENTENCE)[3]
    tiny_target.model.get_input_embeddings().weight.data[word] = torch.nan
    spoiled = tmp_path / "spoiled"
    shutil.copytree(tiny_target.files.path, spoiled)
    tiny_target.model.save_pretrained(spoiled)
    if not of_own_texts:
        monkeypatch.setattr(TextSource, "own", lambda source, books, has_features: books)
        monkeypatch.setattr(TextSource, "held_out", lambda *_: [])
    words = (
        "the model's logits for position .* are not finite" if of_own_texts else "the loss of training step 1 is nan"
    )
    with pytest.raises(ModelError, match=words):
        train_draft(str(spoiled), books, tmp_path / "draft", FAST, lambda line: None)
    assert not (tmp_path / "draft/model.safetensors").exists()


def test_the_target_is_never_written_over(tiny_model: Path, books: Path) -> None:
    before = {path.name: path.stat().st_mtime_ns for path in tiny_model.iterdir()}
    with pytest.raises(ModelError, match="holds the target model itself; give another folder"):
        train_draft(str(tiny_model), books, tiny_model / ".." / tiny_model.name, FAST, lambda line: None)
    assert {path.name: path.stat().st_mtime_ns for path in tiny_model.iterdir()} == before
