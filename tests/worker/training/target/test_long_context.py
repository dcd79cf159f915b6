from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM

from swiftbatch.worker.forward.target_model import TargetModel
from swiftbatch.worker.training import target_evaluation
from swiftbatch.worker.training.target_evaluation import logits_of_last, measure_long_context
from tests.tiny_targets import target as target

FIRST = 0


def whole(target: TargetModel) -> Any:
    return AutoModelForCausalLM.from_pretrained(target.files.path, dtype=torch.float32, local_files_only=True)


def books(vocab_size: int) -> list[np.ndarray]:
    return [np.random.default_rng(number).integers(1, vocab_size, size=900).astype(np.uint16) for number in range(2)]


@pytest.mark.parametrize(("length", "num_rows"), [(1, 1), (100, 30), (700, 300)])
def test_the_last_rows_are_those_of_a_whole_forward(target: TargetModel, length: int, num_rows: int) -> None:
    token_ids = books(target.vocab_size)[0][:length].tolist()
    expected = whole(target)(torch.tensor([token_ids])).logits[0, -num_rows:].float()
    torch.testing.assert_close(logits_of_last(target, token_ids, num_rows), expected, rtol=1e-3, atol=1e-3)


@torch.no_grad()
def test_losses_are_those_with_the_newest_tokens_and_the_first_one_in_front(
    target: TargetModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"WINDOWS": (20, 300), "SCORED_FROM": 300, "NUM_SCORED": 10, "NUM_PLACES": 3}.items():
        monkeypatch.setattr(target_evaluation, name, value)
    monkeypatch.setattr(target_evaluation, "DISTANCES", ())
    texts = books(target.vocab_size)
    found = measure_long_context(target, texts, FIRST).loss_by_window
    random, model, passages = np.random.default_rng(0), whole(target), []
    for _ in range(3):
        book = texts[int(random.integers(len(texts)))].astype(np.int64)
        start = int(random.integers(0, len(book) - 309))
        passages.append(book[start : start + 310])  # all of one book
    for window in (20, 300):
        losses = []
        for passage in passages:
            text = torch.from_numpy(np.concatenate([[FIRST], passage[300 - window :]]))
            logits = model(text[None, :-1]).logits[0, -10:].float()
            losses.append(float(cross_entropy(logits, text[-10:])))
        assert found[str(window)] == pytest.approx(np.mean(losses), abs=1e-3)


def test_a_passage_that_comes_back_counts_by_the_tokens_that_are_the_likeliest(
    target: TargetModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(target_evaluation, "WINDOWS", ())
    monkeypatch.setattr(target_evaluation, "SCORED_FROM", 300)
    monkeypatch.setattr(target_evaluation, "DISTANCES", (100,))
    texts = books(target.vocab_size)
    assert measure_long_context(target, texts, FIRST).continued_by_distance["100"] < 0.2  # a random model

    def one_that_remembers(_: TargetModel, token_ids: list[int], num_rows: int) -> torch.Tensor:
        passage = token_ids[1 : 1 + target_evaluation.NEEDLE]
        assert token_ids[-num_rows:] == passage[-num_rows - 1 : -1]
        assert len(token_ids) == 1 + 100 + target_evaluation.NEEDLE - 1
        return torch.nn.functional.one_hot(torch.tensor(passage[-num_rows:]), 400).float()

    monkeypatch.setattr(target_evaluation, "logits_of_last", one_that_remembers)
    assert measure_long_context(target, texts, FIRST).continued_by_distance["100"] == 1.0
