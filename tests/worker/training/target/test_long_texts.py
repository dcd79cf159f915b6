"""A segment of a long text learns from all before it."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, kl_div, log_softmax
from transformers import DynamicCache, Qwen3ForCausalLM

from swiftbatch.worker.training import target_stages
from swiftbatch.worker.training.target_recipe import LongTextRecipe, WindowKind, long_text_recipe
from swiftbatch.worker.training.target_stages import LongTexts, WindowSource, states_of
from swiftbatch.worker.training.training_layers import ATTENTION_NAME, EarlierSegments
from tests.worker.training.small_target import small_config

FIRST, LENGTH, SEGMENT, NEAR = 7, 384, 128, 64
ROUNDING = 0.02  # of bf16, relative
RECIPE = dataclasses.replace(
    long_text_recipe(2, seed=2),
    num_steps=6,
    kinds=(WindowKind("beside", 32, 1, 1.0),),
    length=LENGTH,
    segment=SEGMENT,
    near=NEAR,
)


def small_model() -> Qwen3ForCausalLM:
    torch.manual_seed(3)
    config = small_config(FIRST, FIRST)
    config.vocab_size = 200
    model = Qwen3ForCausalLM(config)
    for weight in model.parameters():  # far text has to matter
        weight.data *= 2.0 if weight.ndim == 2 else 1.0
    model.set_attn_implementation(ATTENTION_NAME)
    return model


def source_of(recipe: LongTextRecipe = RECIPE) -> WindowSource:
    random = np.random.default_rng(5)
    books = [random.integers(0, 200, size=size).astype(np.uint16) for size in (300, 900)]
    return WindowSource(books, FIRST, recipe, max_positions=1000)


def gradients(model: Qwen3ForCausalLM) -> Tensor:
    return torch.cat([weight.grad.flatten() for weight in model.parameters()])


def segment_gradients(
    monkeypatch: pytest.MonkeyPatch, recipe: LongTextRecipe
) -> tuple[Qwen3ForCausalLM, Tensor, list[float]]:
    """Return the last segment's gradients, the text, and all losses."""
    monkeypatch.setattr(target_stages, "add_batch_gradients", lambda *args: 0.0)
    model = small_model()
    texts = LongTexts(model, source_of(recipe), recipe, lambda line: None)
    losses = []
    for step in range(recipe.num_segments):
        model.zero_grad()
        losses.append(texts.add_gradients(step).loss)
    return model, source_of(recipe).long_text(0, LENGTH), losses


def by_definition(model: Qwen3ForCausalLM, text: Tensor, recipe: LongTextRecipe) -> tuple[float, Tensor]:
    """Use the library's cache and attention."""
    model.set_attn_implementation("eager")
    model.zero_grad()
    cache, start = DynamicCache(config=model.config), LENGTH - SEGMENT
    with torch.no_grad():
        model(input_ids=text[None, :start], past_key_values=cache)
        near = torch.cat([text[:1], text[start - NEAR + 1 : LENGTH]])
        expected = log_softmax(model(input_ids=near[None]).logits[0, -SEGMENT:], dim=-1)
    logits = model(input_ids=text[None, start:LENGTH], past_key_values=cache).logits[0]
    said, labels = log_softmax(logits, dim=-1), text[start + 1 :, None]
    loss = cross_entropy(logits, labels[:, 0])
    distances = kl_div(said, expected, reduction="none", log_target=True).sum(dim=-1)
    if recipe.is_near_right_alone:
        is_counted = (expected.gather(1, labels) > said.gather(1, labels))[:, 0]
        assert 0.2 < is_counted.float().mean() < 0.8
        distances = distances * is_counted
    (loss + recipe.closeness * distances.mean()).backward()
    return float(loss.detach()), gradients(model)


@pytest.mark.parametrize("is_near_right_alone", [False, True])
@pytest.mark.parametrize("closeness", [0.0, 2.0, 50.0])
def test_a_segment_has_the_gradients_of_its_loss_and_of_how_far_its_two_views_are(
    monkeypatch: pytest.MonkeyPatch, closeness: float, is_near_right_alone: bool
) -> None:
    recipe = dataclasses.replace(RECIPE, closeness=closeness, is_near_right_alone=is_near_right_alone)
    model, text, losses = segment_gradients(monkeypatch, recipe)
    found = gradients(model)
    loss, expected = by_definition(model, text, recipe)
    assert losses[-1] == pytest.approx(loss, rel=ROUNDING)
    assert (found - expected).norm() < ROUNDING * expected.norm()


def test_segments_are_read_as_the_whole_text_is() -> None:
    model, text, earlier, found = small_model(), source_of().long_text(0, LENGTH)[:LENGTH], EarlierSegments(), []
    with torch.no_grad():
        whole = states_of(model, text[None], torch.arange(LENGTH)[None])[0]
        for start in range(0, LENGTH, SEGMENT):
            places = torch.arange(start, start + SEGMENT)
            found.append(states_of(model, text[None, places], places[None], earlier)[0])
            earlier.advance()
    assert (torch.cat(found) - whole).norm() < 0.5 * ROUNDING * whole.norm()


@pytest.mark.slow
def test_every_text_begins_anew_and_counts_its_windows_too(monkeypatch: pytest.MonkeyPatch) -> None:
    batches: list[Tensor] = []
    monkeypatch.setattr(
        target_stages, "add_batch_gradients", lambda model, batch: batches.append(batch.token_ids) or 0.0
    )
    said: list[str] = []
    model = small_model()
    in_a_row = LongTexts(model, source_of(), RECIPE, said.append)
    steps = [in_a_row.add_gradients(step) for step in range(6)]
    alone = LongTexts(model, source_of(), RECIPE, said.append)
    again = [alone.add_gradients(step) for step in range(3, 6)]
    assert [step.loss for step in steps[3:]] == [step.loss for step in again]
    assert {step.num_tokens for step in steps} == {SEGMENT + 32}
    assert len({batch.numpy().tobytes() for batch in batches[:6]}) == 6
    assert [line.split(":")[0] for line in said] == ["long text 1 of 2", "long text 2 of 2", "long text 2 of 2"]


def test_long_texts_are_stretches_of_books_with_the_first_token_in_front() -> None:
    texts = [source_of().long_text(number, LENGTH) for number in range(8)]
    assert all(len(text) == LENGTH + 1 and text[0] == FIRST for text in texts)
    assert len({text.numpy().tobytes() for text in texts}) == 8


def test_texts_of_pieces_have_another_book_behind_each() -> None:
    books = [np.full(5000, token) for token in range(1, 7)]
    source = WindowSource(books, FIRST + 90, RECIPE, max_positions=1000)
    lengths: list[int] = []
    for number in range(20):
        text = source.long_text(number, 900, (50, 200)).numpy()
        assert len(text) == 901
        begins = np.flatnonzero(text == FIRST + 90)
        pieces = np.split(text, begins)[1:]
        assert begins[0] == 0
        assert all(len(set(piece[1:])) <= 1 for piece in pieces)
        lengths += [len(piece) - 1 for piece in pieces[:-1]]
    assert np.quantile(lengths, 0.1) >= 49  # a book may end sooner
    assert max(lengths) <= 200
    assert np.median(lengths) < 115  # short ones are as likely as long ones: half are below the mean of logarithms
    assert len({source.long_text(number, 900, (50, 200)).numpy().tobytes() for number in range(8)}) == 8
