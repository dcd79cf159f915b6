"""Choice of a model's forwards: our kernels if they support it here, otherwise `transformers`."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import torch

from swiftbatch.jobs.errors import ModelError
from swiftbatch.jobs.run.run_records import KVDtype
from swiftbatch.worker.forward.forward_interface import Forwards
from swiftbatch.worker.forward.native_forwards import NativeForwards
from swiftbatch.worker.kernels.decoder_weights import DecoderWeights, decoder_weights
from swiftbatch.worker.kernels.gpu_kernel_choice import (
    DEFAULT_KERNELS,
    CudaKernels,
    refuse_kv_dtype,
    refuse_latent,
    refuse_without_kernels,
)
from swiftbatch.worker.kernels.instruction_sets import chosen_variant
from swiftbatch.worker.model.compute_path import short_length
from swiftbatch.worker.model.decoder_loading import dense_weights
from swiftbatch.worker.model.model_files import ModelFiles, eos_token_ids_of, read_config

if TYPE_CHECKING:
    from swiftbatch.worker.forward.transformers_forwards import TransformersForwards
    from swiftbatch.worker.kv.gpu_memory_plan import SlotsWanted

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def load_forwards(
    files: ModelFiles,
    dtype: torch.dtype,
    device: torch.device,
    slots: SlotsWanted | None = None,
    kernels: CudaKernels = DEFAULT_KERNELS,
    kv_dtype: KVDtype | None = None,
) -> Forwards:
    """Return the fastest exact forwards of a model.

    Raises KernelError, KVRoomError, and ModelError as `load_transformers` does or if other kernels were requested.
    """
    refuse_kv_dtype(kv_dtype, kernels.attention)
    if slots is not None:
        from swiftbatch.worker.forward.cuda.cuda_loading import load_cuda_forwards

        if on_gpu := load_cuda_forwards(files, dtype, device, slots, eos_token_ids_of(files), kernels, kv_dtype):
            return on_gpu
        kernels.refuse_unused(f"they do not know the model {files.name}")
    variant = chosen_variant() if device.type == "cpu" else None
    if device.type != "cpu":
        refuse_without_kernels(kv_dtype, files.name)
    if variant is None:
        _refuse_long_angles(files)
        return load_transformers(files, dtype, device, kv_dtype=kv_dtype)
    weights = dense_weights(files, dtype)
    if weights and weights.sizes.latent is not None:
        refuse_latent(kv_dtype, files.name)
    if weights and (forwards := _native(weights, eos_token_ids_of(files), variant, kv_dtype)):
        return forwards
    _refuse_long_angles(files)
    loaded = load_transformers(files, dtype, device, variant, kv_dtype)
    taken = decoder_weights(loaded.model)
    return (taken and _native(taken, loaded.eos_token_ids, variant, kv_dtype)) or loaded


def load_transformers(
    files: ModelFiles,
    dtype: torch.dtype,
    device: torch.device,
    variant: str | None = None,
    kv_dtype: KVDtype | None = None,
) -> TransformersForwards:
    """Load a model with `transformers`; layers with plain attention use the kernels of `variant` for it.

    Raises ModelError for an incomplete or unsupported model.
    """
    from transformers.utils.logging import disable_progress_bar  # imported here because it takes seconds

    from swiftbatch.worker.forward.transformers_forwards import TransformersForwards
    from swiftbatch.worker.model.causal_lm import load_causal_lm

    if not sys.stderr.isatty():
        disable_progress_bar()  # progress bars would clutter logs
    model = load_causal_lm(files, dtype)
    return TransformersForwards(model.to(device).eval().requires_grad_(False), files, variant, kv_dtype)


def _refuse_long_angles(files: ModelFiles) -> None:
    """Raise ModelError for rotary angles that depend on a job's length."""
    if short_length(read_config(files.name, files.path)) is not None:
        raise ModelError(
            f"model {files.name}: its rotary positions (longrope) change with the length of the text, which only our "
            "kernels leave to each job, and these do not run it here; `swiftbatch doctor` says which run"
        )


def _native(
    weights: DecoderWeights, eos_token_ids: frozenset[int], variant: str, kv_dtype: KVDtype | None
) -> NativeForwards | None:
    """Return forwards, or None if the weights do not fit, because `transformers` reports that better."""
    try:
        return NativeForwards(weights, eos_token_ids, variant, kv_dtype)
    except (ValueError, IndexError):
        return None
