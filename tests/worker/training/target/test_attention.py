"""A training model attends in the kernels where possible and learns as with torch's."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from swiftbatch.worker.training import training_layers as attention
from swiftbatch.worker.training.training_layers import ATTENTION_NAME

SIZES = {
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
}
MODELS = {"llama": (LlamaConfig, LlamaForCausalLM), "qwen3": (Qwen3Config, Qwen3ForCausalLM)}


def small_model(kind: str) -> PreTrainedModel:
    torch.manual_seed(1)
    make_config, make_model = MODELS[kind]
    return make_model(make_config(**SIZES))


def token_ids() -> Tensor:
    return torch.randint(SIZES["vocab_size"], (2, 130), generator=torch.Generator().manual_seed(2))


def gradients(model: PreTrainedModel, name: str) -> Tensor:
    """Return a training step's gradients side by side."""
    model.set_attn_implementation(name)
    model.zero_grad()
    ids = token_ids()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mask = torch.ones_like(ids)
        hidden = model.model(input_ids=ids, attention_mask=mask, use_cache=False).last_hidden_state
        logits = model.lm_head(hidden)
    cross_entropy(logits.flatten(0, 1).float(), ids.flatten()).backward()
    return torch.cat([weight.grad.flatten() for weight in model.parameters()])


@pytest.fixture
def kernel_calls(monkeypatch: pytest.MonkeyPatch) -> list[torch.dtype]:
    """The dtypes that the kernels are called with; torch serves other processors."""
    calls: list[torch.dtype] = []

    def counted(query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        calls.append(query.dtype)
        return causal_attention(query, key, value, scaling)

    causal_attention = attention.causal_attention
    monkeypatch.setattr(attention, "causal_attention", counted)
    monkeypatch.setattr(attention, "is_fast", lambda query: query.dtype == torch.bfloat16)
    return calls


@pytest.mark.parametrize("kind", MODELS)
def test_a_step_in_training_has_the_gradients_of_torchs_attention(kind: str, kernel_calls: list[torch.dtype]) -> None:
    model = small_model(kind)
    expected, found = gradients(model, "sdpa"), gradients(model, ATTENTION_NAME)
    assert kernel_calls == [torch.bfloat16] * 2
    assert (found - expected).norm() < 0.03 * expected.norm()


def test_masks_caches_and_dropout_are_left_to_torch(kernel_calls: list[torch.dtype]) -> None:
    model = small_model("llama").to(torch.bfloat16)
    ids, padded = token_ids(), torch.ones_like(token_ids())
    padded[1, :50] = 0
    packed = torch.arange(130).remainder(65).expand(2, -1)
    for inputs in ({"attention_mask": padded}, {"position_ids": packed, "use_cache": False}):
        logits = []
        for name in ("sdpa", ATTENTION_NAME):
            model.set_attn_implementation(name)
            logits.append(model(ids, **inputs).logits)
        assert torch.equal(*logits)
    cache = model(ids[:, :1]).past_key_values
    kernel_calls.clear()
    model(ids[:, 1:], past_key_values=cache)
    model.train()
    model.config.attention_dropout = 0.5
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.5
    model(ids)
    assert kernel_calls == []
