"""Target model: weights, caches, and forwards over rows of any sequences."""

from __future__ import annotations

import contextlib
import functools
import math
import sys
from collections.abc import Iterator
from collections.abc import Sequence as Many
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from swiftbatch.jobs.errors import ModelError
from swiftbatch.jobs.run.run_records import KVDtype
from swiftbatch.worker.forward.forward_interface import Forwards
from swiftbatch.worker.forward.hardware import resolve_device
from swiftbatch.worker.forward.native_forwards import NativeForwards
from swiftbatch.worker.forward.tile_packing import SequenceRows, tree_rows
from swiftbatch.worker.kernels.decoder_weights import AdapterWeights, DecoderWeights
from swiftbatch.worker.kernels.gpu_kernel_choice import (
    DEFAULT_KERNELS,
    CudaKernels,
    refuse_kv_dtype,
    refuse_several_gpus,
    refuse_without_kernels,
)
from swiftbatch.worker.kernels.native_library import chosen_variant
from swiftbatch.worker.kernels.transformers_weights import decoder_weights
from swiftbatch.worker.kv.cache_room import CacheRoom
from swiftbatch.worker.kv.file_offload import offloaded_cache
from swiftbatch.worker.kv.full_cache import FullKVCache, new_cache_of
from swiftbatch.worker.kv.kv_capacity import KVRoom, place_of_caches, refuse_offload, refuse_other_caches
from swiftbatch.worker.model.architectures.catalogue import architecture_of
from swiftbatch.worker.model.compute_path import refuse_on_gpu, short_length
from swiftbatch.worker.model.decoder_config import OtherDecoderError
from swiftbatch.worker.model.decoder_loading import fitting_weights
from swiftbatch.worker.model.lora import LoraFiles
from swiftbatch.worker.model.lora_weights import adapter_weights
from swiftbatch.worker.model.model_files import ModelFiles, eos_token_ids_of, read_config
from swiftbatch.worker.sampling.batch_sampler import SplitRows
from swiftbatch.worker.sampling.draft_tree import DraftTree
from swiftbatch.worker.sampling.noise import NOISE_LAW

if TYPE_CHECKING:
    from swiftbatch.worker.forward.forward_interface import SparseRows
    from swiftbatch.worker.forward.transformers_forwards import TransformersForwards
    from swiftbatch.worker.kv.gpu_memory_plan import SlotsWanted


DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
NUM_PROBED_TOKENS = 16


def load_forwards(
    files: ModelFiles,
    dtype: torch.dtype,
    device: torch.device,
    slots: SlotsWanted | None = None,
    kernels: CudaKernels = DEFAULT_KERNELS,
    kv_dtype: KVDtype | None = None,
    adapters: Many[AdapterWeights] = (),
    num_ranks: int = 1,
) -> Forwards:
    """Return the fastest exact forwards of a model on `num_ranks` GPUs.

    Caches may have one of the `adapters`, numbered from 1 on.

    Raises KernelError, KVRoomError, and ModelError as `load_transformers` does or if other kernels were requested.
    """
    refuse_kv_dtype(kv_dtype, kernels.attention)
    if device.type != "cpu":
        kernels.refuse_integer_rows("the device is a GPU")
        refuse_on_gpu(files.name, read_config(files.name, files.path))
    if slots is not None:
        from swiftbatch.worker.forward.cuda.cuda_loading import load_cuda_forwards

        wanted = (dtype, device, slots, eos_token_ids_of(files), kernels, kv_dtype, adapters)
        if on_gpu := load_cuda_forwards(files, *wanted, num_ranks=num_ranks):
            return on_gpu
        kernels.refuse_unused(f"they do not know the model {files.name}")
    refuse_several_gpus(num_ranks, f"they do not know the model {files.name}" if slots else _what_runs(device))
    variant = chosen_variant() if device.type == "cpu" else None
    if device.type != "cpu":
        refuse_without_kernels(kv_dtype, files.name)
    if adapters and variant is None:
        raise ModelError(f"model {files.name}: only our kernels run LoRA adapters, and these do not run here")
    if variant is None:
        kernels.refuse_integer_rows("torch runs here")
        _refuse_what_kernels_alone_do(files)
        return load_transformers(files, dtype, device, kv_dtype=kv_dtype)
    return _on_cpu(files, dtype, variant, kernels, kv_dtype, adapters)


def _on_cpu(
    files: ModelFiles,
    dtype: torch.dtype,
    variant: str,
    kernels: CudaKernels,
    kv_dtype: KVDtype | None,
    adapters: Many[AdapterWeights],
) -> Forwards:
    """Return forwards in our kernels, or in the layers of `transformers` around our attention."""
    try:
        weights = fitting_weights(files, dtype)
        return _native(weights, eos_token_ids_of(files), variant, kv_dtype, kernels, adapters)
    except OtherDecoderError as error:
        _refuse_what_kernels_alone_do(files, str(error))
    loaded = load_transformers(files, dtype, torch.device("cpu"), variant, kv_dtype)
    if taken := decoder_weights(loaded.model):
        with contextlib.suppress(OtherDecoderError):
            return _native(taken, loaded.eos_token_ids, variant, kv_dtype, kernels, adapters)
    kernels.refuse_integer_rows(f"they do not know the model {files.name}")
    if adapters:
        raise ModelError(f"model {files.name}: only our kernels run LoRA adapters, and these do not take its weights")
    return loaded


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


def _refuse_what_kernels_alone_do(files: ModelFiles, fault: str | None = None) -> None:
    """Raise ModelError for layers that `transformers` has otherwise, and for angles that depend on a job's length.

    `fault` says why the kernels do not take the weights; it is None where no kernels run.
    """
    if (words := _what_kernels_alone_have(files)) is not None:
        lack = "these do not run here; `swiftbatch doctor` says which run"
        if fault is not None:
            lack = (
                f"these do not take its weights: {fault}; check that its config.json belongs to them, or copy all again"
            )
        raise ModelError(f"model {files.name}: only our kernels have its {words}, and {lack}")
    if short_length(read_config(files.name, files.path)) is not None:
        raise ModelError(
            f"model {files.name}: its rotary positions (longrope) change with the length of the text, which only our "
            "kernels leave to each job, and these do not run it here; `swiftbatch doctor` says which run"
        )


def _what_kernels_alone_have(files: ModelFiles) -> str | None:
    form = architecture_of(read_config(files.name, files.path))
    return None if form is None else form.needs_kernels


def _native(
    weights: DecoderWeights,
    eos_token_ids: frozenset[int],
    variant: str,
    kv_dtype: KVDtype | None,
    kernels: CudaKernels,
    adapters: Many[AdapterWeights],
) -> NativeForwards:
    """Return forwards. Raises OtherDecoderError if the weights do not fit."""
    if kernels.has_integer_rows and not weights.has_integers:
        kernels.refuse_integer_rows("none of this model's weights are integers of 8 or 4 bits that they can take")
    try:
        forwards = NativeForwards(weights, eos_token_ids, variant, kv_dtype, kernels.has_integer_rows)
    except (ValueError, IndexError) as error:
        raise OtherDecoderError(str(error)) from error
    for adapter in adapters:
        forwards.add_adapter(adapter)
    return forwards


@dataclass(frozen=True)
class RowOutputs:
    """Results of one sequence's rows."""

    hidden: torch.Tensor  # [num_rows, hidden] final hidden states, or features of some layers
    logits: torch.Tensor  # [num_rows, vocab] float32


class StepOutputs:
    """Results of several sequences' rows."""

    def __init__(self, hidden: SplitRows, logits: SplitRows) -> None:
        self.hidden, self.logits = hidden, logits

    def __getitem__(self, index: int) -> RowOutputs:
        return RowOutputs(self.hidden[index], self.logits[index])

    def __iter__(self) -> Iterator[RowOutputs]:
        return map(RowOutputs, self.hidden, self.logits)


class TargetModel:
    """The weights of a model on one device, with its forwards, caches and samplers."""

    def __init__(self, forwards: Forwards, files: ModelFiles, kv_offload: str | None = None) -> None:
        self.files = files
        self.device, self.dtype = forwards.device, forwards.dtype
        self.vocab_size, self.hidden_size = forwards.vocab_size, forwards.hidden_size
        self.eos_token_ids, self.cache_shape = forwards.eos_token_ids, forwards.cache_shape
        self.forwards = forwards
        self._kv_offload = kv_offload
        self._adapters: dict[str, int] = {}  # by name, as `FullKVCache.adapter` has them

    @classmethod
    def load(
        cls,
        files: ModelFiles,
        dtype: str,
        device: str,
        kv_offload: str | None = None,
        slots: SlotsWanted | None = None,
        kernels: CudaKernels = DEFAULT_KERNELS,
        kv_dtype: KVDtype | None = None,
        never_sampled_ids: Many[int] = (),
        loras: Many[LoraFiles] = (),
        num_ranks: int = 1,
    ) -> TargetModel:
        """Load a model from its folder, and adapters for it.

        Raises ModelError for an unsupported model or adapter or non-finite logits, KVRoomError if a GPU lacks memory or
        its caches were asked into a folder.
        """
        place = resolve_device(device)
        refuse_offload(place.type, kv_offload)
        refuse_other_caches(files.name, read_config(files.name, files.path), kv_dtype, kv_offload)
        wanted = slots if place.type == "cuda" else None
        if wanted is None:
            kernels.refuse_unused(_what_runs(place))
        adapters = [adapter_weights(each, read_config(files.name, files.path)) for each in loras]
        forwards = load_forwards(files, DTYPES[dtype], place, wanted, kernels, kv_dtype, adapters, num_ranks)
        target = cls(forwards, files, kv_offload)
        target._adapters = {each.name: number for number, each in enumerate(loras, 1)}
        if never_sampled_ids:
            target.forwards.never_sampled_ids = torch.tensor(never_sampled_ids, device=target.device)
        check_model(target)
        return target

    def load_beside(self, files: ModelFiles, longest_job: int) -> TargetModel:
        """Load a draft model on the same device in the same dtype. Raises ModelError.

        The draft model gets as many slots as the target, and one more for measurements.
        """
        if self.forwards.arena is not None:
            from swiftbatch.worker.forward.cuda.cuda_loading import forwards_beside

            if forwards := forwards_beside(self.forwards, files, longest_job, self.forwards.arena.num_slots + 1):
                target = TargetModel(forwards, files)
                check_model(target)
                return target
        return TargetModel.load(files, str(self.dtype).removeprefix("torch."), self.device.type)

    @functools.cached_property
    def transformers(self) -> TransformersForwards:
        """Return the `transformers` forwards, which GRIFFIN and trainings need."""
        from swiftbatch.worker.forward.transformers_forwards import TransformersForwards

        if isinstance(self.forwards, TransformersForwards):
            return self.forwards
        return load_transformers(self.files, self.dtype, self.device)

    @functools.cached_property
    def model(self) -> Any:
        """Return `transformers`' own model, for comparisons and trainings."""
        indexer = getattr(getattr(self.forwards, "sizes", None), "indexer", None)
        if not self.cache_shape.stripes and indexer is None:
            return self.transformers.model
        from swiftbatch.worker.model.causal_lm import load_causal_lm

        return load_causal_lm(self.files, self.dtype).to(self.device).eval().requires_grad_(False)

    @property
    def numerics(self) -> str:
        return f"{self.forwards.numerics}, {NOISE_LAW}"

    @property
    def is_offloaded(self) -> bool:
        return self._kv_offload is not None

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def new_cache(
        self, max_length: int, num_held: int = 0, forgets: bool = False, lora: str | None = None
    ) -> FullKVCache:
        """Return an empty cache for up to `max_length` tokens. Raises KVRoomError if memory is too small.

        `num_held` positions of other sequences can be freed. Rows of the cache meet the adapter `lora`, or none.
        """
        cache = self._new_cache(max_length, num_held, forgets)
        if lora is not None:
            cache.adapter = self._adapters[lora]
        return cache

    def _new_cache(self, max_length: int, num_held: int, forgets: bool) -> FullKVCache:
        if arena := self.forwards.arena:
            return arena.new_cache(max_length)
        shape = self.cache_shape if forgets and self._kv_offload is None else replace(self.cache_shape, windows=())
        if place := place_of_caches(self.device.type, self._kv_offload):
            room = KVRoom(place, shape.bytes_per_position(), shape.state_bytes(), shape.held_positions())
            room.refuse_too_long(max_length, num_held)
        if self._kv_offload is None:
            return new_cache_of(shape, max_length)
        return offloaded_cache(shape, max_length, self._kv_offload)

    @property
    def num_slots(self) -> int | None:
        """Return how many sequences fit, or None if that depends on their lengths."""
        return self.forwards.arena.num_slots if self.forwards.arena else None

    def cache_room(self, num_unwritten: int | None) -> CacheRoom:
        """Return the room for caches, for checkpoints `num_unwritten` positions behind; if None, caches keep all."""
        shape, arena = self.cache_shape, self.forwards.arena
        num_beside = -(-shape.state_bytes() // shape.bytes_per_position())
        if arena is not None:
            return CacheRoom(arena.pool_size, num_beside, arena=arena)
        if num_unwritten is None or self.is_offloaded:
            return CacheRoom(None, num_beside)
        return CacheRoom(None, num_beside, shape.held_positions(num_unwritten))

    def num_free_positions(self) -> int:
        """Return the positions that all new caches together have room for."""
        place, num_bytes = place_of_caches(self.device.type, self._kv_offload), self.cache_shape.bytes_per_position()
        free = KVRoom(place, num_bytes).free_bytes() if place else torch.cuda.mem_get_info(self.device)[0]
        return int(free // num_bytes)

    def moving_together(self) -> contextlib.AbstractContextManager[None]:
        """Collect moves of accepted rows, and make them on exit."""
        arena = self.forwards.arena
        return contextlib.nullcontext() if arena is None else arena.moving_together()

    @torch.inference_mode()
    def verify(self, groups: list[SequenceRows], feature_layers: tuple[int, ...] = ()) -> StepOutputs:
        return self._of_each(groups, *self.forwards.run(groups, feature_layers))

    @torch.inference_mode()
    def read(self, cache: FullKVCache, token_ids: list[int], feature_layers: tuple[int, ...] = ()) -> torch.Tensor:
        return self.forwards.read(cache, token_ids, feature_layers)

    @torch.inference_mode()
    def check(self, groups: list[SparseRows]) -> StepOutputs:
        return self._of_each(groups, *self.forwards.check(groups))

    def _of_each(self, groups: list[Any], hidden: torch.Tensor, logits: torch.Tensor) -> StepOutputs:
        if self.forwards.never_sampled_ids is not None:
            logits.index_fill_(1, self.forwards.never_sampled_ids, -math.inf)
        sizes = [len(group) for group in groups]
        return StepOutputs(SplitRows(hidden, sizes), SplitRows(logits, sizes))

    @torch.inference_mode()
    def queries(self, cache: FullKVCache, token_id: int) -> torch.Tensor:
        """Return rotated queries, `[num_layers, num_kv_heads, group, head_dim]`; overwrites the next entry."""
        return self.forwards.queries(cache, token_id)

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.forwards.logits(hidden)


def _what_runs(device: torch.device) -> str:
    return "the device is a CPU" if device.type == "cpu" else "transformers' layers run here"


def check_model(target: TargetModel) -> None:
    """Raise ModelError if logits after some single tokens are not finite, or all equal."""
    step = max(1, target.vocab_size // NUM_PROBED_TOKENS)
    token_ids = range(0, target.vocab_size, step)
    cache = target.new_cache(1)  # a cache like those of jobs, since on a GPU rows are in slots of the arena
    for token_id in token_ids:
        [outputs] = target.verify([tree_rows(cache, token_id, DraftTree())])
        logits = outputs.logits[0]
        least, most = (float(each) for each in logits.masked_fill(logits == -math.inf, logits.max()).aminmax())
        if math.isfinite(most) and least < most:
            return
    if math.isfinite(most):
        raise ModelError(
            f"model {target.files.name}: its logits are all equal, whichever token they follow; its weights are damaged"
        )
    raise ModelError(
        f"model {target.files.name}: its logits are not finite, whichever token they follow; its weights are damaged, "
        "or outgrow the dtype"
    )
