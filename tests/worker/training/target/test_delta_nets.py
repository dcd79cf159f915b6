"""Gated delta nets in training equal transformers' layers, chunk by chunk."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel, Qwen3_5ForCausalLM

from swiftbatch.worker.forward.target_model import TargetModel
from swiftbatch.worker.model.model_files import locate_model
from swiftbatch.worker.training import training_layers
from swiftbatch.worker.training.target_evaluation import logits_of_last
from swiftbatch.worker.training.target_stages import states_of
from swiftbatch.worker.training.training_layers import ATTENTION_NAME, EarlierSegments, sparing, use_chunks
from tests.worker.training.small_target import small_hybrid_config

VOCAB_SIZE = 300


def small_model() -> PreTrainedModel:
    torch.manual_seed(3)
    config = small_hybrid_config(0, 0)
    config.vocab_size = VOCAB_SIZE
    model = Qwen3_5ForCausalLM(config)
    for weight in model.parameters():  # states have to matter
        weight.data *= 3.0 if weight.ndim == 2 else 1.0
    return model


def token_ids(*shape: int) -> Tensor:
    return torch.randint(VOCAB_SIZE, shape, generator=torch.Generator().manual_seed(2))


def learned(model: PreTrainedModel, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Return states, and gradients of a sum that weighs every state differently."""
    model.zero_grad()
    states = model.model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).last_hidden_state
    (states * torch.arange(states.shape[-1])).sin().sum().backward()
    return states.detach(), torch.cat([weight.grad.flatten() for weight in model.parameters()])


def test_chunks_find_and_learn_what_transformers_layers_do() -> None:
    model, ids = small_model(), token_ids(2, 130)
    expected, expected_gradients = learned(model, ids)
    use_chunks(model)
    found, gradients = learned(model, ids)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert (gradients - expected_gradients).norm() < 1e-3 * expected_gradients.norm()


def test_layers_that_run_once_more_for_their_gradients_learn_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = small_model(), token_ids(2, 70)
    use_chunks(model)
    expected = learned(model, ids)
    monkeypatch.setattr(training_layers, "MOST_KEPT", 139)
    with sparing(model, ids.numel()):
        assert model.model.layers[0].gradient_checkpointing
        found = learned(model, ids)
    assert not model.model.layers[0].gradient_checkpointing
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


def test_segments_of_a_hybrid_go_on_from_the_states_behind_the_text_so_far() -> None:
    model, text, earlier, found = small_model(), token_ids(192), EarlierSegments(), []
    model.set_attn_implementation(ATTENTION_NAME)
    use_chunks(model)
    with torch.no_grad():
        whole = states_of(model, text[None], torch.arange(192)[None])[0]
        for start in range(0, 192, 64):
            places = torch.arange(start, start + 64)
            found.append(states_of(model, text[None, places], places[None], earlier)[0])
            earlier.advance()
    assert (torch.cat(found) - whole).norm() < 0.02 * whole.norm()


def test_our_kernels_choose_what_a_model_in_training_chooses(tmp_path: Path) -> None:
    model, ids = small_model(), token_ids(264)
    model.save_pretrained(tmp_path)
    use_chunks(model)
    with torch.no_grad():
        expected = model.lm_head(model.model(input_ids=ids[None], use_cache=False).last_hidden_state[0, -200:])
    target = TargetModel.load(locate_model(str(tmp_path)), "float32", "cpu")
    found = logits_of_last(target, ids.tolist(), 200)
    assert (found.argmax(dim=-1) == expected.argmax(dim=-1)).sum() == 200
