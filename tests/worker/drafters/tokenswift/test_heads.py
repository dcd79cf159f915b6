from __future__ import annotations

import itertools
import json
import re
import shutil
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner, Result
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from swiftbatch.jobs.errors import ModelError
from swiftbatch.jobs.sampling_params import SamplingParams
from swiftbatch.scheduler.cli import main
from swiftbatch.worker.drafters.catalogue import HeadKind
from swiftbatch.worker.drafters.tokenswift.decoding_heads import DecodingHeads, save_heads
from swiftbatch.worker.forward.target_model import TargetModel
from swiftbatch.worker.model.model_files import HEADS_FILE, PARTS_FOLDER, ModelFiles, locate_model
from swiftbatch.worker.text.tokenizer import TextCodec
from swiftbatch.worker.training import feature_files, training_loop, training_texts
from swiftbatch.worker.training import train_tokenswift as tokenswift
from swiftbatch.worker.training.corpus import CorpusError
from swiftbatch.worker.training.feature_files import TextFeatures, TextSource
from swiftbatch.worker.training.recipes import OWN_SAMPLING, HeadRecipe
from swiftbatch.worker.training.train_tokenswift import HeadRows, Heads, accumulate_gradients, learned, train_heads
from swiftbatch.worker.training.training_texts import Stretches, Text, load_target, own_texts
from tests.worker.drafters.training_parts import featured

pytestmark = pytest.mark.long

SENTENCE = "the quick brown fox jumps over the lazy dog. "
FAST = HeadRecipe(num_steps=90, num_step_rows=256, num_warmup_steps=5, num_book_tokens=120, num_own_tokens=20)
FAMILIES = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "qwen": (Qwen2Config, Qwen2ForCausalLM),
    "mistral": (MistralConfig, MistralForCausalLM),
}


@pytest.fixture
def books(tmp_path: Path) -> Path:
    folder = tmp_path / "books"
    folder.mkdir()
    for name in ("train.jsonl", "test.jsonl"):
        (folder / name).write_text(json.dumps({"text": SENTENCE * 20}) + "\n", encoding="utf-8")
    return folder


@pytest.fixture
def tiny_target(tiny_model: Path) -> TargetModel:
    return TargetModel.load(locate_model(str(tiny_model)), "bfloat16", "cpu")


def random_weight(hidden_size: int, num_heads: int = 3) -> torch.Tensor:
    return torch.randn(num_heads, hidden_size, hidden_size, generator=torch.Generator().manual_seed(5)) * 0.1


def weight_in(folder: Path) -> torch.Tensor:
    return load_file(folder / HEADS_FILE)["heads.weight"]


def heads_of(weight: torch.Tensor, kind: HeadKind = "tokenswift") -> Heads:
    heads = Heads(HeadRecipe(kind=kind, num_heads=len(weight)), weight.shape[1])
    heads.weight.data.copy_(weight)
    return heads


def texts_of(target: TargetModel, books: Path, folder: Path, recipe: HeadRecipe) -> list[TextFeatures]:
    source = TextSource(target, books, folder, recipe, recipe.num_needed_tokens, lambda line: None)
    return learned(source, recipe)


def refusal(folder: Path, target: TargetModel) -> str:
    with pytest.raises(ModelError) as caught:
        DecodingHeads.load(folder, target)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("kind", ["tokenswift", "medusa"])
def test_heads_follow_the_papers_formula(tmp_path: Path, family: str, tied: bool, dtype: str, kind: HeadKind) -> None:
    make_config, make_model = FAMILIES[family]
    torch.manual_seed(0)
    sizes = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    attention = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64}
    config = make_config(**sizes, **attention, tie_word_embeddings=tied, initializer_range=0.3)
    make_model(config).to(torch.bfloat16).save_pretrained(tmp_path)
    target = TargetModel.load(locate_model(str(tmp_path)), dtype, "cpu")
    save_heads(tmp_path, random_weight(32), target.files.fingerprint, kind)
    weight = random_weight(32).to(torch.bfloat16).to(target.dtype)
    state = torch.randn(32, generator=torch.Generator().manual_seed(6)).to(target.dtype)
    heads = DecodingHeads.load(tmp_path, target)
    logits = heads.logits(state)
    assert heads.num_heads == 3
    assert (logits.shape, logits.dtype) == ((3, 50), torch.float32)
    first = state
    for head in range(3):
        before = first if kind == "medusa" else state
        state = weight[head] @ before + before
        expected = (target.model.lm_head.weight @ state).float()
        torch.testing.assert_close(logits[head], expected, rtol=0.05, atol=0.15 if dtype == "bfloat16" else 1e-4)


def test_heads_do_not_change_what_model_it_is(tiny_model: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny_model, tmp_path / "model"))
    before = locate_model(str(folder)).fingerprint
    save_heads(folder, random_weight(64), before)
    assert locate_model(str(folder)).fingerprint == before
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"no model\.safetensors"):
        locate_model(str(folder))


def test_missing_heads_say_how_to_train_them(tmp_path: Path, tiny_target: TargetModel) -> None:
    command = f"swiftbatch train tokenswift --model {tiny_target.files.name} --data DIR --output DIR"
    expected = f"engine tokenswift: no file {tmp_path / HEADS_FILE}; train it with `{command}` and name that folder"
    assert refusal(tmp_path, tiny_target).startswith(expected)


def test_heads_of_another_model_are_refused(tmp_path: Path, tiny_target: TargetModel) -> None:
    save_heads(tmp_path, random_weight(64), "0123456789abcdef" * 4)
    assert "belongs to a model with fingerprint 0123456789ab" in refusal(tmp_path, tiny_target)


@pytest.mark.parametrize(
    ("weight", "reason"),
    [
        (torch.zeros(3, 32, 32), "is torch.bfloat16 [3, 32, 32]; expected floats [num_heads, 64, 64]"),
        (torch.zeros(64, 64), "is torch.bfloat16 [64, 64]; expected floats [num_heads, 64, 64]"),
        (torch.zeros(0, 64, 64), "is torch.bfloat16 [0, 64, 64]; expected floats [num_heads, 64, 64]"),
        (torch.full((3, 64, 64), torch.nan), "not finite"),
    ],
    ids=["size", "dimensions", "none", "nan"],
)
def test_unfit_weights_are_refused(tmp_path: Path, tiny_target: TargetModel, weight: torch.Tensor, reason: str) -> None:
    save_heads(tmp_path, weight, tiny_target.files.fingerprint)
    assert reason in refusal(tmp_path, tiny_target)


def test_files_that_hold_no_heads_are_refused(tmp_path: Path, tiny_target: TargetModel) -> None:
    path = tmp_path / HEADS_FILE
    save_file({"other": torch.zeros(1)}, path, metadata={"model_fingerprint": tiny_target.files.fingerprint})
    assert "`heads.weight` is missing; expected floats [num_heads, 64, 64]; train it" in refusal(tmp_path, tiny_target)
    path.write_bytes(path.read_bytes()[:20])
    assert "no safetensors file with a `model_fingerprint`" in refusal(tmp_path, tiny_target)


def test_heads_of_an_unknown_kind_are_refused(tmp_path: Path, tiny_target: TargetModel) -> None:
    header = {"model_fingerprint": tiny_target.files.fingerprint, "kind": "hydra"}
    save_file({"heads.weight": random_weight(64)}, tmp_path / HEADS_FILE, metadata=header)
    assert "`kind` is 'hydra'; expected one of: tokenswift, medusa; train it" in refusal(tmp_path, tiny_target)


@pytest.mark.parametrize("kind", ["tokenswift", "medusa"])
def test_training_makes_heads_that_predict(tiny_model: Path, books: Path, tmp_path: Path, kind: HeadKind) -> None:
    output = tmp_path / "heads"
    said: list[str] = []
    train_heads(str(tiny_model), books, output, replace(FAST, kind=kind), said.append)
    records = [json.loads(line) for line in (output / tokenswift.FILES.log).read_text(encoding="utf-8").splitlines()]
    steps = [record for record in records if "losses" in record]
    before, after = (
        {record["texts"]: record["top"] for record in records if record.get("when") == when}
        for when in ("before", "after")
    )
    assert [record["step"] for record in steps] == list(range(1, FAST.num_steps + 1))
    assert sum(steps[-1]["losses"]) < 0.5 * sum(steps[0]["losses"])
    assert set(before) == set(after) == {"test books", *(f"own text, {name}" for name in OWN_SAMPLING)}
    for head in range(3):
        assert before["test books"][head][0] < 0.2
        assert after["test books"][head][0] > 0.9  # the text repeats one sentence
        assert after["test books"][head] == sorted(after["test books"][head])
    target = TargetModel.load(locate_model(str(tiny_model)), "bfloat16", "cpu")
    assert (DecodingHeads.load(output, target).num_heads, DecodingHeads.load(output, target).kind) == (3, kind)
    assert any(re.search(r"after training, test books: head 1 \d", line) for line in said)
    assert (output / tokenswift.FILES.plot).read_bytes().startswith(b"\x89PNG")


def test_training_is_reproducible(tiny_model: Path, books: Path, tmp_path: Path) -> None:
    recipe = HeadRecipe(num_steps=3, num_step_rows=64, num_book_tokens=120, num_own_tokens=20, seed=4)
    for name in ("one", "two"):
        train_heads(str(tiny_model), books, tmp_path / name, recipe, lambda line: None)
    assert torch.equal(weight_in(tmp_path / "one"), weight_in(tmp_path / "two"))


def test_a_killed_training_goes_on_to_the_same_bits(
    tiny_model: Path, books: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = HeadRecipe(num_steps=6, num_step_rows=64, num_book_tokens=120, num_own_tokens=20)
    shared = tmp_path / "features"
    monkeypatch.setattr(training_loop, "NUM_STATE_STEPS", 2)
    train_heads(str(tiny_model), books, tmp_path / "whole", recipe, print, shared)
    original, num_done = tokenswift.accumulate_gradients, 0

    def stopping(*given: Any, **named: Any) -> list[float]:
        nonlocal num_done
        num_done += 1
        if num_done > 5:
            raise KeyboardInterrupt
        return original(*given, **named)

    monkeypatch.setattr(tokenswift, "accumulate_gradients", stopping)
    with pytest.raises(KeyboardInterrupt):
        train_heads(str(tiny_model), books, tmp_path / "killed", recipe, print, shared)
    monkeypatch.setattr(tokenswift, "accumulate_gradients", original)
    with pytest.raises(ModelError, match=r"holds another training: recipe\.kind is tokenswift, expected medusa"):
        train_heads(str(tiny_model), books, tmp_path / "killed", replace(recipe, kind="medusa"), print, shared)
    said: list[str] = []
    train_heads(str(tiny_model), books, tmp_path / "killed", recipe, said.append, shared)
    assert any("4 of 6 steps behind it" in line for line in said)
    assert torch.equal(weight_in(tmp_path / "killed"), weight_in(tmp_path / "whole"))


class Held:
    """Counts what is alive, and the most that ever was."""

    def __init__(self) -> None:
        self.now = self.most = 0

    def add(self, each: Any, size: int) -> Any:
        self.now += size
        self.most = max(self.most, self.now)
        weakref.finalize(each, self._forget, size)
        return each

    def _forget(self, size: int) -> None:
        self.now -= size


def test_memory_does_not_grow_with_the_books(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hidden_states = training_texts.hidden_states
    recipe, peaks = HeadRecipe(num_steps=2, num_step_rows=64, num_book_tokens=120), []
    for num_books in (6, 12):
        features, tokens, data = Held(), Held(), tmp_path / f"{num_books}"

        def counted(target: TargetModel, token_ids: list[int], features: Held = features) -> Any:
            hidden = hidden_states(target, token_ids)
            return features.add(hidden, hidden.nbytes)

        def read(token_ids: list[int], tokens: Held = tokens) -> Any:
            return tokens.add(Text(token_ids), len(token_ids))

        monkeypatch.setattr(feature_files, "hidden_states", counted)
        monkeypatch.setattr(training_texts, "Text", read)
        data.mkdir()
        lines = [json.dumps({"text": f"{number} {SENTENCE * 20}"}) + "\n" for number in range(num_books)]
        (data / "train.jsonl").write_text("".join(lines), encoding="utf-8")
        train_heads(str(tiny_model), data, data / "heads", recipe, print)
        assert (data / "heads" / tokenswift.FOLDER / "books.arrow").stat().st_size > num_books * 120 * 64 * 2
        peaks.append((features.most, tokens.most))
    assert peaks[0] == peaks[1]
    assert 120 * 64 * 2 <= peaks[0][0] <= 2 * 120 * 64 * 2  # of at most two texts of 120 tokens, 64 wide
    assert 120 <= peaks[0][1] <= 3 * 120


def test_stretches_are_whole_parts_of_books_behind_the_first_tokens() -> None:
    books = [np.arange(100, 100 + size) for size in (23, 3, 1, 12, 11)]
    stretches = Stretches(books, 6, [7, 8])
    found = [stretches[index] for index in range(len(stretches))]
    bodies = [book[2:].tolist() for book in books]
    assert found == [[7, 8, *body[at : at + 4]] for body in bodies for at in range(0, len(body) - 3, 4)]
    longest = Stretches([np.arange(5), np.arange(9)], 100, [1])
    assert [longest[index] for index in range(len(longest))] == [[1, *range(1, 9)]]


def test_the_target_stays_frozen(tiny_model: Path, books: Path, tmp_path: Path) -> None:
    target = load_target(locate_model(str(tiny_model)))
    before = {name: parameter.clone() for name, parameter in target.model.named_parameters()}
    rows = HeadRows(texts_of(target, books, tmp_path, FAST), 3)
    heads = heads_of(torch.zeros(3, 64, 64))
    accumulate_gradients(target, heads, rows, np.arange(64), 64, soft_labels=True)
    assert heads.weight.grad is not None
    assert heads.weight.grad.abs().max() > 0
    assert all(torch.equal(parameter, before[name]) for name, parameter in target.model.named_parameters())


@pytest.mark.parametrize("soft_labels", [False, True], ids=["tokens", "distributions"])
def test_a_step_is_the_same_in_parts(
    tiny_model: Path, books: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, soft_labels: bool
) -> None:
    target = load_target(locate_model(str(tiny_model)))
    rows = HeadRows(texts_of(target, books, tmp_path, FAST), 3)
    gradients = []
    for num_logits in (2**24, 7 * target.vocab_size):
        monkeypatch.setattr(tokenswift, "NUM_LOGITS", num_logits)
        heads = heads_of(random_weight(64))
        losses = accumulate_gradients(target, heads, rows, np.arange(50), 50, soft_labels)
        assert heads.weight.grad is not None
        gradients.append((heads.weight.grad, losses))
    torch.testing.assert_close(gradients[0][0], gradients[1][0], rtol=0.1, atol=1e-3)
    assert gradients[0][1] == pytest.approx(gradients[1][1], rel=1e-3)


def test_rows_have_a_token_for_every_head_and_begin_behind_the_prompt(tiny_target: TargetModel) -> None:
    target = load_target(tiny_target.files)
    texts = featured(target, [Text(list(range(10)), 4), Text([1, 2, 3]), Text(list(range(20, 27)))])
    rows = HeadRows(texts, 3)
    assert len(rows) == 5
    token_ids, features = rows.gather(np.array([0, 1, 1, 2, 3, 4]), target.device)
    assert token_ids.tolist() == [list(range(first, first + 5)) for first in (4, 5, 5, 20, 21, 22)]
    for found, (number, place) in zip(features, ((0, 4), (0, 5), (0, 5), (2, 0), (2, 1), (2, 2)), strict=True):
        assert torch.equal(found, texts[number].features[place : place + 5])


def test_the_rate_warms_up_and_falls_as_a_cosine() -> None:
    recipe = HeadRecipe()
    assert [round(recipe.rate(step), 3) for step in (0, 24, 49, 50, 125, 200)] == [0.02, 0.5, 1.0, 1.0, 0.5, 0.0]


def test_the_command_trains_and_says_what_it_does_not_measure(tiny_model: Path, books: Path, tmp_path: Path) -> None:
    (books / "test.jsonl").unlink()
    output = tmp_path / "heads"
    options = ["--model", str(tiny_model), "--data", str(books), "--output", str(output), "--steps", "2"]
    result = CliRunner().invoke(main, ["train", "tokenswift", *options])
    assert result.exit_code == 0, result.output
    assert "no *test*.jsonl; the accuracy is not measured" in result.output
    assert (output / HEADS_FILE).is_file()


def test_options_are_kept_with_the_heads_and_others_refused(tiny_model: Path, books: Path, tmp_path: Path) -> None:
    (books / "test.jsonl").unlink()
    output = tmp_path / "heads"
    options = ["--model", str(tiny_model), "--data", str(books), "--output", str(output), "--steps", "1"]
    given = {"--kind": "medusa", "--heads": "2", "--rows": "8", "--book-tokens": "50"}

    def command(changes: dict[str, str]) -> Result:
        return CliRunner().invoke(main, ["train", "tokenswift", *options, *itertools.chain(*(given | changes).items())])

    assert command({}).exit_code == 0
    with safe_open(output / HEADS_FILE, framework="pt") as file:
        assert file.metadata()["kind"] == "medusa"
        assert file.get_slice("heads.weight").get_shape() == [2, 64, 64]
    for option, value, problem in (
        ("--kind", "tokenswift", "recipe.kind is medusa, expected tokenswift"),
        ("--heads", "3", "recipe.num_heads is 2, expected 3"),
        ("--rows", "9", "recipe.num_step_rows is 8, expected 9"),
        ("--book-tokens", "51", "recipe.num_book_tokens is 50, expected 51"),
        ("--kind", "medsua", "'medsua' is not one of 'tokenswift', 'medusa'"),
        ("--heads", "17", "17 is not in the range 1<=x<=16"),
    ):
        refused = command({option: value})
        assert refused.exit_code == 2
        assert problem in refused.output
        assert len(refused.output.strip().splitlines()) == 1
    assert "finished; nothing to do" in command({}).output


@pytest.mark.parametrize(("text", "num_tokens"), [("x", 2), ("dog.", 4)])
def test_texts_too_short_for_the_heads_are_named(tiny_model: Path, tmp_path: Path, text: str, num_tokens: int) -> None:
    (tmp_path / "train.jsonl").write_text(json.dumps({"text": text}) + "\n", encoding="utf-8")
    problem = f"too short, the longest has {num_tokens} tokens; expected 5 or more in at least one"
    with pytest.raises(CorpusError, match=problem) as caught:
        train_heads(str(tiny_model), tmp_path, tmp_path / "heads", FAST, lambda line: None)
    assert "\n" not in str(caught.value)


def test_own_texts_are_sampled_as_asked(tiny_model: Path) -> None:
    target = load_target(locate_model(str(tiny_model)))
    prompts = [[1, 2, 3, 4], [5, 6, 7, 8]]
    for sampling in OWN_SAMPLING.values():
        texts = own_texts(target, prompts, HeadRecipe(num_own_tokens=12).own_sampling(sampling))
        assert [text.token_ids[:4] for text in texts] == prompts
        assert all(len(text.token_ids) == 16 and text.first_row == 3 for text in texts)
        again = own_texts(target, prompts, HeadRecipe(num_own_tokens=12).own_sampling(sampling))
        assert again == texts
        other_seed = own_texts(target, prompts, HeadRecipe(num_own_tokens=12, seed=1).own_sampling(sampling))
        assert (other_seed == texts) == (sampling.temperature == 0)
    greedy = own_texts(target, prompts, SamplingParams(max_tokens=5, temperature=0.0))
    plain = target.model(torch.tensor(prompts)).logits[:, -1].argmax(dim=-1)
    assert [text.token_ids[4] for text in greedy] == plain.tolist()


def test_heads_learn_from_own_texts_and_their_distributions(tiny_model: Path, books: Path, tmp_path: Path) -> None:
    (books / "test.jsonl").unlink()
    recipe = HeadRecipe(
        num_steps=80, num_step_rows=256, num_warmup_steps=5, num_own_texts=4, num_prompt_tokens=16, num_own_tokens=60
    )
    said: list[str] = []
    train_heads(str(tiny_model), books, tmp_path / "heads", recipe, said.append)
    assert any(line.startswith(f"{4 * (61 - 4)} rows to learn from") for line in said)
    records = [json.loads(line) for line in (tmp_path / "heads" / tokenswift.FILES.log).read_text().splitlines()]
    steps = [record for record in records if "losses" in record]
    assert sum(steps[-1]["losses"]) < sum(steps[0]["losses"]) - 1.0


def test_soft_labels_are_what_the_target_expects_in_each_place(tiny_model: Path, books: Path, tmp_path: Path) -> None:
    target = load_target(locate_model(str(tiny_model)))
    [text] = texts_of(target, books, tmp_path, FAST)
    heads = heads_of(6 * random_weight(64))  # confident, so that shifted labels cost something else
    losses = accumulate_gradients(target, heads, HeadRows([text], 3), np.array([7]), 1, soft_labels=True)
    logits = target.model(text.token_ids[None, :20].long()).logits[0].float()
    for head, state in enumerate(heads.states(target, text.features[7:8])):
        guess = target.logits(state).log_softmax(dim=-1)[0]
        costs = [float(-(logits[place].softmax(dim=-1) * guess).sum()) for place in range(20)]
        assert min(range(20), key=lambda place: abs(costs[place] - losses[head])) == 7 + head + 1


def test_the_embedded_models_heads_predict_its_own_text(embedded_files: ModelFiles) -> None:
    target = load_target(embedded_files)
    prompt = TextCodec(embedded_files).encode("The clock in the hall had stopped, and nobody in the house could say")
    sampling = SamplingParams(max_tokens=100, temperature=1.0, min_p=0.1, seed=3)
    rows = HeadRows(featured(target, own_texts(target, [prompt] * 8, sampling)), 3)
    shipped = load_file(embedded_files.path / PARTS_FOLDER / HEADS_FILE)["heads.weight"]
    top = tokenswift.head_accuracy(target, heads_of(shipped), rows)
    untrained = tokenswift.head_accuracy(target, heads_of(torch.zeros_like(shipped)), rows)
    assert DecodingHeads.load(None, target).num_heads == len(top) == 3
    assert all(after[2] > 2 * before[2] for after, before in zip(top, untrained, strict=True))
