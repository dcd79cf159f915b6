"""The code that runs a text model on a device, by its config, and the reason if it is slow. Without torch.

Of rotary types that change with a text's length, only longrope is supported, and only by our kernels. There each job's
own length selects the frequencies, so a row's bits do not depend on other texts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from swiftbatch.jobs.errors import ModelError
from swiftbatch.worker.kernels.kernel_sizes import HEAD_DIMS
from swiftbatch.worker.model.architectures.catalogue import architecture_of, layer_types
from swiftbatch.worker.model.architectures.recurrent_layers import RECURRENT, STATELESS
from swiftbatch.worker.model.config_values import POSITIVE, Config
from swiftbatch.worker.model.decoder_config import OtherDecoderError, read_decoder_config, refuse_other_tensors
from swiftbatch.worker.model.formats.layout import CONFIG_KEYS

PathName = Literal["kernels", "kernels attend", "transformers", "none"]
MOST_LAYERS = 1000
KNOWN_LAYERS = {"attention", "full_attention", "sliding_attention", "*"} | RECURRENT | STATELESS
SHIFTING = {"dynamic", "dynamic-yarn", "longrope", "su"}  # types of angles that change with the length of a text


@dataclass(frozen=True)
class ComputePath:
    """The code that computes a forward, and the reason if not all runs in our kernels. `none`: it does not run."""

    name: PathName
    reason: str | None = None


def path_on(device: Literal["cpu", "cuda"], config: Config, stored: set[str] | None = None) -> ComputePath:
    """Return the path of a text model; `stored` are its tensors' names, where known."""
    form = architecture_of(config)
    if device == "cuda" and form is not None and form.on_cpu_alone:
        return ComputePath("none", f"its layers have {form.on_cpu_alone}, which our kernels for CPUs know alone")
    try:
        dense = read_decoder_config(config)
        if device == "cuda" and dense.own_heads is not None and (fault := dense.own_heads.gpu_fault(dense.head_dim)):
            return ComputePath("none", f"its layers have heads that our kernels for GPUs do not know: {fault}")
        if stored is not None:
            refuse_other_tensors(dense, stored)
        return ComputePath("kernels")
    except OtherDecoderError as error:
        if form is not None and form.needs_kernels is not None:
            return ComputePath("none", str(error))
        if device == "cpu" and _are_taken_over(config):
            return ComputePath("kernels")
        can_attend = device == "cpu" and _attends_in_kernels(config)
        return ComputePath("kernels attend" if can_attend else "transformers", str(error))


def _are_taken_over(config: Config) -> bool:
    """Return whether the kernels support the layers once `transformers` has filled in defaults. Creates no weights."""
    form, num_layers = architecture_of(config), config.get("num_hidden_layers")
    if form is None or not form.is_taken_over or not isinstance(num_layers, int) or num_layers > MOST_LAYERS:
        return False
    import torch
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig

    from swiftbatch.worker.kernels.transformers_weights import decoder_weights

    try:
        said = AutoConfig.for_model(**{key: each for key, each in config.items() if key not in CONFIG_KEYS})
        with torch.device("meta"):
            model = MODEL_FOR_CAUSAL_LM_MAPPING[type(said)]._from_config(said, dtype=torch.bfloat16)
        model.model.rotary_emb = type(model.model.rotary_emb)(said)
        return decoder_weights(model) is not None
    except Exception:  # any kind: a config's values reach code that never looked at them
        return False


def _attends_in_kernels(config: Config) -> bool:
    form = architecture_of(config)
    if form is None or form.attends_in_chunks or set(layer_types(config) or ()) - KNOWN_LAYERS:
        return False
    return _head_dim(config) in HEAD_DIMS


def _head_dim(config: Config) -> int:
    if "qk_nope_head_dim" in config:
        return int(max(config["qk_nope_head_dim"] + config["qk_rope_head_dim"], config["v_head_dim"]))
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])


def refuse_on_gpu(model: str, config: Config) -> None:
    """Raise ModelError for a model that runs on CPUs alone, or nowhere."""
    if (path := path_on("cuda", config)).name == "none":
        hint = "" if path_on("cpu", config).name == "none" else "; use --device cpu"
        raise ModelError(f"model {model}: it does not run on a GPU: {path.reason}{hint}")


def without_kernels(config: Config) -> str | None:
    """Return why a model that only our kernels run does not run, or None if it does."""
    form = architecture_of(config)
    if form is None or form.needs_kernels is None:
        return None
    try:
        read_decoder_config(config)
    except OtherDecoderError as error:
        return f"its kind {config['model_type']!r:.80} runs in our kernels alone, and these do not run it: {error}"
    return None


def shifting_rotary(config: Config) -> str | None:
    """Return why rotary positions that change with the length of a text do not run, or None if they do."""
    if not (types := shifting_types(config)):
        return None
    shifts = f"its rotary positions ({', '.join(sorted(types))}) change with the length of the text"
    if types != {"longrope"}:
        return shifts
    try:
        read_decoder_config(config)
    except OtherDecoderError as error:
        return f"{shifts}, which only our kernels leave to each job, and these do not run it: {error}"
    return None


def short_length(config: Config) -> int | None:
    """Return the most positions of a job that uses longrope's short factors, or None without such frequencies."""
    return read_decoder_config(config).rotary.short_length if shifting_types(config) else None


def shifting_types(config: Config) -> set[str]:
    """Return the rotary types that change with the length of a text."""
    form = architecture_of(config)
    is_fixed_by_alpha = form is not None and form.has_fixed_alpha
    return {
        kind
        for said in _rotary_parameters(config)
        for kind in (str(said.get("rope_type")), str(said.get("type")))
        if kind in SHIFTING and not (is_fixed_by_alpha and kind == "dynamic" and POSITIVE.holds(said.get("alpha")))
    }


def _rotary_parameters(config: Config) -> Iterator[Config]:
    """Yield the parts of a config that may have rotary parameters."""
    yield config
    for value in config.values():
        if isinstance(value, dict):
            yield from _rotary_parameters(value)
