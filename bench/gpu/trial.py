"""The things that stages are given: a device, a model in published shapes with random weights, and how much is tried.

Weights are written once for all stages: a few layers, which are repeated where the speed of the whole is measured.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import itertools
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from bench.gpu.family_weights import DEVIATION, FAMILIES, Family
from swiftbatch.jobs.run.compute_options import Dtype
from swiftbatch.worker.exactness.gpu_doctor.findings import Finding
from swiftbatch.worker.exactness.gpu_doctor.model_under_test import Extent, Parts
from swiftbatch.worker.kernels.cuda.stacked_weights import StackedWeights
from swiftbatch.worker.kernels.gpu_kernel_choice import DEFAULT_KERNELS, CudaKernels
from swiftbatch.worker.kv.host_copies import CudaLane, HostStream, computing_stream
from swiftbatch.worker.kv.kv_offload import Streams
from swiftbatch.worker.model.digests import TEXT_FILES
from swiftbatch.worker.model.model_files import EMBEDDED, ModelFiles, locate_model

Try = tuple[str, Callable[[], Finding]]
"""A name, and what is tried under it."""


@dataclass(frozen=True)
class Shape:
    """The sizes of a dense model as Llama has them."""

    hidden: int
    intermediate: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab: int
    max_positions: int = 131_072

    def config(self, num_layers: int) -> dict[str, Any]:
        """The config of such a model."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "num_hidden_layers": num_layers,
            "vocab_size": self.vocab,
            "max_position_embeddings": self.max_positions,
            "rms_norm_eps": 1e-5,
            "rope_theta": 500_000.0,
            "tie_word_embeddings": True,
            "torch_dtype": "bfloat16",
            "hidden_act": "silu",
        }

    def tensors(self, num_layers: int) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield names and sizes of its weights."""
        query, key = (count * self.head_dim for count in (self.num_heads, self.num_kv_heads))
        yield "model.embed_tokens.weight", (self.vocab, self.hidden)
        yield "model.norm.weight", (self.hidden,)
        for number in range(num_layers):
            layer = f"model.layers.{number}."
            yield f"{layer}input_layernorm.weight", (self.hidden,)
            yield f"{layer}post_attention_layernorm.weight", (self.hidden,)
            for name, rows in (("q", query), ("k", key), ("v", key)):
                yield f"{layer}self_attn.{name}_proj.weight", (rows, self.hidden)
            yield f"{layer}self_attn.o_proj.weight", (self.hidden, query)
            for name in ("gate", "up"):
                yield f"{layer}mlp.{name}_proj.weight", (self.intermediate, self.hidden)
            yield f"{layer}mlp.down_proj.weight", (self.hidden, self.intermediate)


LLAMA_8B = Shape(4096, 14_336, 32, 8, 128, 128_256)
GPU_EXTENT = Extent(
    num_tries=5,
    lengths=(0, 1, 64, 1000, 4096, 102_400),
    row_counts=(1, 16, 64),
    num_rows=2000,
    work_lengths=(0, 70, 1500),
)


@dataclass(frozen=True)
class TrialSizes:
    """The amount tried by all stages together, for some minutes of a GPU."""

    shape: Shape = LLAMA_8B
    num_written: int = 2  # layers
    num_layers: int = 32  # of steps that are timed
    extent: Extent = GPU_EXTENT
    dtype: Dtype = "bfloat16"
    decoded: str = "embedded"  # the model that engines decode with; empty: that with random weights
    kept_length: int = 32_768
    job_counts: tuple[int, ...] = (1, 4, 15, 32, 128)
    job_length: int = 4096
    num_steps: int = 24
    families: tuple[Family, ...] = FAMILIES
    family_counts: tuple[int, ...] = (1, 8, 32)  # of jobs
    host_counts: tuple[int, ...] = (1, 8, 32, 128)
    num_host_steps: int = 60
    row_counts: tuple[int, ...] = (64, 128, 256)
    scanned_lengths: tuple[int, ...] = (20_000, 100_000)
    copied_bytes: int = 1 << 32
    checkpoint_length: int = 20_000
    sampled_vocab: int = 128_256
    num_drawn: int = 120
    engine_positions: tuple[int, ...] = (1000, 8000)
    engine_tokens: int = 128
    restart_tokens: int = 6000


SMALL_SIZES = TrialSizes(  # for Triton's interpreter: a second for each forward
    shape=Shape(64, 64, 2, 1, 64, 4096, 4096),
    num_written=1,
    num_layers=1,
    extent=Extent(
        num_tries=1,
        lengths=(0, 65),
        row_counts=(1, 4),
        slot_counts=(1, 2),
        num_positions=4,
        num_rows=1,
        most_nodes=2,
        work_lengths=(3,),
        num_compared=20,
        read_bytes=1 << 20,
        num_rounds=1,
    ),
    dtype="float32",
    decoded="",
    kept_length=100,
    job_counts=(1, 2),
    job_length=64,
    num_steps=2,
    families=tuple(each.cut() for each in FAMILIES),
    family_counts=(2,),
    host_counts=(2,),
    num_host_steps=2,
    row_counts=(64, 128),
    scanned_lengths=(3000,),
    copied_bytes=1 << 20,
    checkpoint_length=70,
    sampled_vocab=300,
    num_drawn=4,
    engine_positions=(3,),
    engine_tokens=5,
    restart_tokens=6,
)


@dataclass
class Trial:
    """A device, and the folder that the stages share."""

    device: torch.device
    scratch: Path
    sizes: TrialSizes = field(default_factory=TrialSizes)

    @functools.cached_property
    def files(self) -> ModelFiles:
        """The model with random weights, written if no stage did so before."""
        folder = self.scratch / "model"
        if not folder.exists():
            written = write_random(self.sizes.shape, self.sizes.num_written, self.scratch, self.device)
            written.rename(folder)
        return locate_model(str(folder))

    @functools.cached_property
    def decoded_files(self) -> ModelFiles:
        """The model that engines decode with."""
        return locate_model(self.sizes.decoded) if self.sizes.decoded else self.files

    def parts(
        self, kernels: CudaKernels = DEFAULT_KERNELS, files: ModelFiles | None = None, dtype: Dtype | None = None
    ) -> Parts:
        """The model with random weights, or another one, as checks take it."""
        made = Parts.of(files or self.files, dtype or self.sizes.dtype, self.device, kernels)
        made.extent = self.sizes.extent
        return made

    def deep_parts(self, kernels: CudaKernels = DEFAULT_KERNELS) -> Parts:
        """The same with as many layers as the published model has."""
        made = self.parts(kernels)
        few = made.load
        made.load = lambda: deepened(few(), self.sizes.num_layers)
        return made


def write_random(shape: Shape, num_layers: int, folder: Path, device: torch.device) -> Path:
    """Write a model of random weights into a new folder in `folder`, and return that."""
    made = Path(tempfile.mkdtemp(dir=folder))
    generator = torch.Generator(device).manual_seed(0)
    tensors = {}
    for name, size in shape.tensors(num_layers):
        numbers = torch.empty(size, dtype=torch.bfloat16, device=device)
        numbers = numbers.fill_(1.0) if len(size) == 1 else numbers.normal_(0.0, DEVIATION, generator=generator)
        tensors[name] = numbers.cpu()
    save_file(tensors, made / "model.safetensors", {"format": "pt"})
    for file in (file for pattern in TEXT_FILES for file in EMBEDDED.glob(pattern)):
        shutil.copy(file, made)  # a tokenizer, of which only its being there matters
    (made / "config.json").write_text(json.dumps(shape.config(num_layers)), encoding="utf-8")
    return made


class HostLane:
    """A `CopyLane` elsewhere than on a GPU: it copies at once."""

    def buffers(self, num_bytes: int) -> tuple[torch.Tensor, torch.Tensor]:
        host, device = (torch.empty(num_bytes, dtype=torch.uint8) for _ in range(2))
        return host, device

    def follow(self, event: Any) -> None:
        event.synchronize()

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        target.copy_(source)

    def mark(self) -> HostStream:
        return HostStream()


def streams_of(device: torch.device) -> Streams:
    """The streams of offloaded caches."""
    if device.type == "cuda":
        return Streams(computing_stream(device), CudaLane(device), CudaLane(device))
    return Streams(computing_stream(device), HostLane(), HostLane())


def deepened(weights: StackedWeights | None, num_layers: int, num_first: int = 0) -> StackedWeights | None:
    """The same layers again and again, each in memory of its own: a cache of the GPU has no use for what it read.

    The first few stand once. Rotations stay those that layers share.
    """
    if weights is None:
        return None
    repeated = itertools.cycle(weights.layers[num_first:])
    chosen = [*weights.layers[:num_first], *itertools.islice(repeated, num_layers - num_first)]
    layers = [copy.deepcopy(layer, {id(layer.rotary): layer.rotary}) for layer in chosen]
    return dataclasses.replace(weights, layers=layers, sizes=dataclasses.replace(weights.sizes, num_layers=num_layers))


def here(scratch: Path) -> Trial:
    """A trial of this machine's GPU; in Triton's interpreter, where that was asked for, one of small sizes."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        return Trial(torch.device("cpu"), scratch, SMALL_SIZES)
    return Trial(torch.device("cuda"), scratch)
