"""Model on a device for a first run's checks, and the amount to try."""

from __future__ import annotations

import copy
import functools
import gc
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch

from swiftbatch.worker.exactness.forward_comparisons import MOST_NODES
from swiftbatch.worker.forward.cuda.cuda_forwards import CudaForwards
from swiftbatch.worker.forward.cuda.cuda_loading import hold_gemms_steady, whole_arena
from swiftbatch.worker.forward.step_costs import captured_seconds
from swiftbatch.worker.forward.target_model import DTYPES, TargetModel
from swiftbatch.worker.kernels.cuda.cuda_graph import Capture, Work, capture
from swiftbatch.worker.kernels.cuda.stacked_weights import StackedWeights, handed_over, stacked_weights
from swiftbatch.worker.kernels.decoder_weights import DecoderSizes, stripes_of
from swiftbatch.worker.kernels.gpu_kernel_choice import DEFAULT_KERNELS, CudaKernels
from swiftbatch.worker.kv.cache_rows import CacheShape, states_of
from swiftbatch.worker.kv.full_cache import FullKVCache
from swiftbatch.worker.kv.host_copies import CudaLane, Staging, computing_stream
from swiftbatch.worker.kv.model_sizes import read_sizes
from swiftbatch.worker.kv.slot_arena import KVArena
from swiftbatch.worker.model.compute_path import refuse_on_gpu
from swiftbatch.worker.model.decoder_loading import dense_weights
from swiftbatch.worker.model.model_files import ModelFiles, read_config


@dataclass(frozen=True)
class Extent:
    """Amounts to test, enough for an unknown GPU; Triton's interpreter takes a second per forward."""

    num_tries: int = 20  # tries per index of a row in a matrix product
    lengths: tuple[int, ...] = (0, 1, 63, 64, 1000, 4096, 32_768, 102_400)
    row_counts: tuple[int, ...] = (1, 4, 16, 64)
    slot_counts: tuple[int, ...] = (1, 4)
    many_slots: tuple[int, ...] = (32, 128)  # timed with one row each, at lengths up to `mixed_length`
    mixed_length: int = 4096
    num_positions: int = 64
    num_rows: int = 10_000  # rows of trees, compared with plain decoding
    most_nodes: int = MOST_NODES
    work_lengths: tuple[int, ...] = (0, 70, 700, 3000)  # lengths of caches before the repeated work
    num_compared: int = 300  # rows compared with transformers
    read_bytes: int = 1 << 32
    num_rounds: int = 7


class ArenaTarget(TargetModel):
    """Target whose caches are slots of an arena."""

    def __init__(self, forwards: CudaForwards, files: ModelFiles) -> None:
        super().__init__(forwards, files)
        self.arena = forwards.arena

    def new_cache(
        self, max_length: int, num_held: int = 0, forgets: bool = False, lora: str | None = None
    ) -> FullKVCache:
        return self.arena.new_cache(max_length)


@dataclass
class Parts:
    """Model on a device; `kernels` are the requested ones at first, and later those that passed the checks."""

    files: ModelFiles
    dtype: torch.dtype
    device: torch.device
    load: Callable[[], StackedWeights | None]  # returns None if the kernels do not support the model
    extent: Extent = field(default_factory=Extent)
    kernels: CudaKernels = DEFAULT_KERNELS
    capture: Capture = capture

    @classmethod
    def of(cls, files: ModelFiles, dtype: str, device: torch.device, kernels: CudaKernels = DEFAULT_KERNELS) -> Parts:
        """Prepare the model without loading it. Raises ModelError if the kernels are missing or do not fit."""
        if (sizes := read_sizes(files, dtype)) is not None:
            kernels.refuse_absent()
            kernels.refuse_unfit(dtype, sizes.widest_dim)
            if device.type == "cuda":
                refuse_on_gpu(files.name, read_config(files.name, files.path))
                hold_gemms_steady()

        def load() -> StackedWeights | None:
            weights = dense_weights(files, DTYPES[dtype], device)
            return None if weights is None else stacked_weights(weights, device, handed_over(weights))

        return cls(files, DTYPES[dtype], device, load, kernels=kernels)

    def with_rows(self, num_rows: int) -> Parts:
        return self.with_kernels(replace(self.kernels, num_rows=num_rows))

    def with_kernels(self, kernels: CudaKernels) -> Parts:
        made = copy.copy(self)
        made.kernels = kernels
        return made

    def seconds(self, work: Work) -> float:
        """Return the median seconds of some work, captured in a graph."""
        return captured_seconds(work, self.device, self.extent.num_rounds)

    @functools.cached_property
    def loaded(self) -> StackedWeights | None:
        return self.load()

    @property
    def weights(self) -> StackedWeights:
        assert self.loaded is not None
        return self.loaded

    @property
    def sizes(self) -> DecoderSizes:
        return self.weights.sizes

    def cache_shape(self, num_layers: int | None = None) -> CacheShape:
        """Return the shape of the model's caches, or of `num_layers` attending layers."""
        sizes, layers = self.sizes, self.weights.layers
        own_heads = [layer.heads for layer in layers if layer.keeps_keys and num_layers is None]
        num_attending, stripes = len(own_heads) if num_layers is None else num_layers, stripes_of(sizes, own_heads)
        mixers = [layer.mixer.sizes for layer in layers if layer.mixer is not None and num_layers is None]
        heads, num_parts = (sizes.num_kv_heads, sizes.head_dim), 2 if sizes.latent is None else 1
        given = (num_attending, *heads, sizes.dtype, self.device, states_of(mixers))
        return CacheShape(*given, num_parts=num_parts, stripes=stripes)

    def arena(self, num_slots: int, max_length: int, num_layers: int | None = None) -> KVArena:
        shape, staging = self.cache_shape(num_layers), self._staging()
        return whole_arena(shape, num_slots, max_length, staging)

    def target(self, num_slots: int, max_length: int, capture: Capture | None = None) -> ArenaTarget:
        """Return the model over an arena of zeros."""
        arena = self.arena(num_slots, max_length)
        arena.buffer.zero_()
        forwards = CudaForwards(self.weights, arena, frozenset(), self.kernels, capture or self.capture)
        return ArenaTarget(forwards, self.files)

    def generator(self, seed: int) -> torch.Generator:
        return torch.Generator(self.device).manual_seed(seed)

    def release(self) -> None:
        """Free the device's memory; the weights are loaded again on demand."""
        self.__dict__.pop("loaded", None)
        self.forget_unused()

    def forget_unused(self) -> None:
        gc.collect()  # frees buffers in reference cycles
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def _staging(self) -> Staging | None:
        if self.device.type != "cuda":
            return None
        return Staging(CudaLane(self.device), computing_stream(self.device))
