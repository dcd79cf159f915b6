"""Causal language models of `transformers`: loaded whole, and split into layers and head."""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, PreTrainedConfig
from transformers.conversion_mapping import get_checkpoint_conversion_mapping, register_checkpoint_conversion_mapping
from transformers.modeling_outputs import MoeModelOutputWithPast
from transformers.utils import logging

from swiftbatch.jobs.errors import ModelError
from swiftbatch.worker.kernels.quantized_weights import plain
from swiftbatch.worker.model.config_values import shown
from swiftbatch.worker.model.formats.layout import CONFIG_KEYS
from swiftbatch.worker.model.model_files import ModelFiles, eos_token_ids_of, read_config, read_whole_config
from swiftbatch.worker.model.nas_model import NASConfig, NASForCausalLM
from swiftbatch.worker.model.text_config import class_name, is_another, is_transposed
from swiftbatch.worker.model.weight_files import read_tensors

AutoConfig.register(NASConfig.model_type, NASConfig)
MODEL_FOR_CAUSAL_LM_MAPPING.register(NASConfig, NASForCausalLM)
WHOLE_M3 = get_checkpoint_conversion_mapping("minimax_m3_vl") or []  # None in older versions of transformers
register_checkpoint_conversion_mapping(  # for its text model alone
    "minimax_m3_vl_text", [each for each in WHOLE_M3 if not each.source_patterns[0].startswith("^")], overwrite=True
)
MAX_WORDS = 500  # characters of another program's error
OLD_BUFFERS = (".attention.bias", ".attention.masked_bias")  # constants that were once saved


def load_causal_lm(files: ModelFiles, dtype: torch.dtype) -> Any:
    """Load a model's weights, without remote code. Raises ModelError or OtherModelError."""
    weights, whole = read_tensors(files, dtype, plain), read_whole_config(files.name, files.path)
    view = read_config(files.name, files.path)
    tensors = {class_name(name, view): plain(weight) for name, weight in weights.items()}
    del weights  # each tensor is handed over below
    for name in [name for name in tensors if is_transposed(name, tuple(tensors[name].shape), whole)]:
        tensors[name] = tensors[name].transpose(1, 2).contiguous()
    try:
        with _quiet():
            config = _config(files)
            model, found = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)].from_pretrained(
                None,
                config=config,
                state_dict={name: _Once(tensors, name) for name in tensors},
                dtype=dtype,
                attn_implementation="eager",  # otherwise a config could ask for one that this machine lacks
                ignore_mismatched_sizes=True,  # reported below, by name
                output_loading_info=True,
            )
    except Exception as error:  # any kind: a config's values reach code that never looked at them
        words = " ".join(str(error).split())[:MAX_WORDS]
        raise ModelError(f"model {files.name}: cannot be loaded: {type(error).__name__}: {words}") from error
    if problem := _problem(found):
        raise ModelError(
            f"model {files.name}: {problem}; its config.json and its weights do not belong together, or files are "
            "missing: copy all of them again"
        )
    model.generation_config.eos_token_id = sorted(eos_token_ids_of(files)) or None
    model.config.return_dict = True  # a config may switch off an output that our forwards read
    model.config.output_hidden_states = model.config.output_router_logits = False
    return model


def _config(files: ModelFiles) -> PreTrainedConfig:
    if is_another(read_whole_config(files.name, files.path)):
        view = {key: each for key, each in read_config(files.name, files.path).items() if key not in CONFIG_KEYS}
        return AutoConfig.for_model(view.pop("model_type"), **view)
    config = AutoConfig.from_pretrained(files.path, trust_remote_code=False, local_files_only=True)
    for key in CONFIG_KEYS:  # the model gets dequantized weights
        config.__dict__.pop(key, None)
    return config


class _Once:
    """A tensor that is dropped at its first use, so that experts are in memory only once."""

    def __init__(self, tensors: dict[str, torch.Tensor], name: str) -> None:
        self._tensors, self._name = tensors, name

    def __getitem__(self, key: Any) -> torch.Tensor:
        return self._tensors.pop(self._name)[key]


def _problem(found: dict[str, Any]) -> str | None:
    """Return which tensors `transformers` would ignore or initialize itself, or None if there are none."""
    mismatched = sorted(found["mismatched_keys"])
    if mismatched:
        name, shape, expected = mismatched[0]
        return f"its weights have {name} as {list(shape)}, expected {list(expected)}"
    if missing := sorted(found["missing_keys"]):
        return f"its weights lack {len(missing):,} of the model's tensors, {missing[0]} among them"
    if unexpected := sorted(name for name in found["unexpected_keys"] if not name.endswith(OLD_BUFFERS)):
        return (
            f"its weights hold {len(unexpected):,} tensors that the model has no place for, as {shown(unexpected[0])}"
        )
    return None


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        with warnings.catch_warnings(action="ignore", category=FutureWarning):
            yield
    finally:
        logging.set_verbosity(before)


def decoder_of(model: Any) -> Any:
    """Return the model without its head."""
    decoder = model.get_decoder()
    return model.model if decoder is model else decoder


class Head:
    """The model's own forward after its layers."""

    def __init__(self, model: Any) -> None:
        decoder = decoder_of(model)
        self._model = copy.copy(model)
        self._model._modules = {
            name: _GivenStates(decoder) if module is decoder else module for name, module in model._modules.items()
        }

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """Map `[num_rows, hidden]` to `[num_rows, vocab] float32`."""
        logits: torch.Tensor = self._model(inputs_embeds=hidden[None], use_cache=False).logits
        return logits[0].float()


class _GivenStates(torch.nn.Module):
    """Returns its embeddings as final hidden states."""

    def __init__(self, decoder: torch.nn.Module) -> None:
        super().__init__()
        # a head may read a scale of its decoder (Falcon-H1)
        vars(self).update({name: each for name, each in vars(decoder).items() if type(each) in (int, float)})

    def forward(self, *_: Any, inputs_embeds: torch.Tensor, **__: Any) -> MoeModelOutputWithPast:
        found = MoeModelOutputWithPast(last_hidden_state=inputs_embeds)
        vars(found)["shared_kv_states"] = None  # the head of Gemma 4 passes it on
        return found
