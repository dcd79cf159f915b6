"""A decoder's weights, taken from a loaded `transformers` model."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import nn

from swiftbatch.worker.kernels.decoder_weights import DecoderSizes, DecoderWeights, LayerWeights
from swiftbatch.worker.kernels.quantized_weights import Linear
from swiftbatch.worker.kernels.rope_scaling import Rotary, rotary_of

DENSE_CLASSES = {"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"}
TYPED_CLASSES = {"Qwen2ForCausalLM", "Qwen3ForCausalLM"}  # their configs give the type of each layer
STEADY_ROTARY = {"default", "linear", "llama3", "yarn"}  # their angles depend on the position alone


def decoder_weights(model: Any) -> DecoderWeights | None:
    """Return the weights of a loaded Llama, Mistral, Qwen2 or Qwen3; None for any other model."""
    if type(model).__name__ not in DENSE_CLASSES or not type(model).__module__.startswith("transformers.models."):
        return None
    config, decoder = model.config, model.model
    windows = _windows(model)
    if windows is None or config.hidden_act != "silu" or model.device.type not in ("cpu", "meta"):
        return None
    if decoder.rotary_emb.rope_type not in STEADY_ROTARY or not all(_is_plain(part) for part in model.modules()):
        return None
    if len(decoder.layers) != config.num_hidden_layers or {each.dtype for each in model.parameters()} != {model.dtype}:
        return None
    if (sizes := _sizes_of(model)) is None:
        return None
    frequencies = decoder.rotary_emb.inv_freq
    # some dimensions are not rotated, or are rotated by non-finite angles
    if len(frequencies) * 2 != sizes.head_dim or not frequencies.isfinite().all():
        return None
    return DecoderWeights(
        sizes,
        decoder.embed_tokens.weight,
        [replace(layer_weights(layer), window=window) for layer, window in zip(decoder.layers, windows, strict=True)],
        decoder.norm.weight,
        linear_of(model.lm_head),
        _rotary(config, decoder.rotary_emb, sizes.head_dim),
    )


def _sizes_of(model: Any) -> DecoderSizes | None:
    config, attention = model.config, model.model.layers[0].self_attn
    try:
        return DecoderSizes(
            num_layers=len(model.model.layers),
            hidden=config.hidden_size,
            num_heads=config.num_attention_heads,
            num_kv_heads=config.num_key_value_heads,
            head_dim=attention.head_dim,
            intermediate=config.intermediate_size,
            vocab=model.lm_head.weight.shape[0],
            epsilon=config.rms_norm_eps,
            scale=attention.scaling,
            dtype=model.dtype,
        )
    except ValueError:
        return None


def _windows(model: Any) -> list[int | None] | None:
    """Return each layer's window, or None if the model's class ignores a part of the config."""
    config, name = model.config, type(model).__name__
    size: int | None = getattr(config, "sliding_window", None)
    types = getattr(config, "layer_types", None) or []
    if name in TYPED_CLASSES and not set(types) - {"full_attention", "sliding_attention"}:
        return [size if each == "sliding_attention" else None for each in types]
    if set(types) - {"full_attention"} or (size is not None and (types or name != "MistralForCausalLM")):
        return None
    return [size] * config.num_hidden_layers


def _is_plain(module: nn.Module) -> bool:
    """Return whether a module is unmodified, without adapters or quantized weights."""
    if isinstance(module, nn.Linear | nn.Embedding):
        return type(module) in (nn.Linear, nn.Embedding)
    return type(module).__module__.startswith(("transformers.", "torch.nn."))


def _rotary(config: Any, module: Any, head_dim: int) -> Rotary:
    """Return the rotary angles, recomputed where possible because results of `pow` differ between processors."""
    try:
        return rotary_of(config.rope_parameters, head_dim)
    except (KeyError, TypeError, ValueError):  # a rotary type or parameters that only `transformers` supports
        return Rotary(module.inv_freq.float().numpy(), module.attention_scaling)


def layer_weights(layer: Any) -> LayerWeights:
    """Return the weights of a decoder layer of these classes."""
    attention, mlp = layer.self_attn, layer.mlp
    norms = (getattr(attention, name, None) for name in ("q_norm", "k_norm"))
    query_norm, key_norm = (None if norm is None else norm.weight for norm in norms)
    return LayerWeights(
        query=linear_of(attention.q_proj),
        key=linear_of(attention.k_proj),
        value=linear_of(attention.v_proj),
        output=linear_of(attention.o_proj),
        up=linear_of(mlp.up_proj),
        down=linear_of(mlp.down_proj),
        gate=linear_of(mlp.gate_proj),
        input_norm=getattr(layer.input_layernorm, "weight", None),
        mlp_norm=layer.post_attention_layernorm.weight,
        query_norm=query_norm,
        key_norm=key_norm,
    )


def linear_of(module: Any) -> Linear:
    return Linear(module.weight, module.bias)
