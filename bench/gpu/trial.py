"""What stages share: a device, random models in published shapes, and sizes.

`families.jsonl` has configs with one layer of each kind; `deepened` repeats layers.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import itertools
import json
import math
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

from swiftbatch.jobs.run.run_records import Dtype
from swiftbatch.worker.exactness.gpu_doctor.findings import Finding
from swiftbatch.worker.exactness.gpu_doctor.model_under_test import Extent, Parts
from swiftbatch.worker.forward.cuda.cuda_loading import hold_gemms_steady
from swiftbatch.worker.kernels.cuda.stacked_weights import StackedWeights, handed_over, stacked_weights
from swiftbatch.worker.kernels.gpu_kernel_choice import DEFAULT_KERNELS, CudaKernels
from swiftbatch.worker.kernels.quantized_weights import CODE_BITS, Code, PackedExperts, PackedMatrix, Weight, plain
from swiftbatch.worker.model.decoder_config import read_decoder_config
from swiftbatch.worker.model.decoder_loading import decoder_of
from swiftbatch.worker.model.digests import TEXT_FILES, Digests
from swiftbatch.worker.model.file_checks import INDEX_FILE
from swiftbatch.worker.model.model_files import EMBEDDED, ModelFiles, locate_model
from swiftbatch.worker.model.text_config import HEAD, text_view

Try = tuple[str, Callable[[], Finding]]
"""A name, and what is tried under it."""
NUM_FILES = 4  # of a model, as models of this size have
DEVIATION = 0.02  # of random weights, as in initialized models
PACKED: dict[str, tuple[Code, int, float, re.Pattern[str]]] = {  # code, group, scales, and the tensors that have it
    "FP8": ("e4m3", 128, 2.0**-12, re.compile(r"_proj(_qkv|_z|_with_mqa)?\.weight$")),
    "MXFP4": ("e2m1", 32, 2.0**-6, re.compile(r"\.experts\.(gate_up|down)_proj$")),
}


@dataclass(frozen=True)
class Family:
    """A model's config with one layer of each kind."""

    name: str
    config: dict[str, Any]
    num_layers: int
    small: dict[str, Any]  # changes of its config for Triton's interpreter
    packed: str | None = None
    num_first: int = 0  # first layers that are not repeated

    def cut(self) -> Family:
        config = self.config | {"max_position_embeddings": 4096} | self.small
        return dataclasses.replace(self, config=config, num_layers=config["num_hidden_layers"])

    @property
    def text_config(self) -> dict[str, Any]:
        return text_view({"attention_bias": False, "tie_word_embeddings": False, "rope_scaling": None} | self.config)

    def tensors(self, dtype: torch.dtype, device: torch.device) -> dict[str, Weight]:
        """Make random tensors from one seed."""
        generator, made = torch.Generator(device).manual_seed(0), dict[str, Weight]()
        for name, shape in shapes_of(self.text_config):
            if self.packed is not None and PACKED[self.packed][3].search(name):
                made[name] = _packed(self.packed, shape, dtype, generator)
                continue
            numbers = torch.empty(shape, dtype=dtype, device=device)
            is_norm = name.endswith("norm.weight")
            made[name] = numbers.fill_(1.0) if is_norm else numbers.normal_(0.0, DEVIATION, generator=generator)
        return made


def _packed(form: str, shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> PackedMatrix:
    code, most, scale, _ = PACKED[form]
    columns, depth = math.prod(shape[:-1]), shape[-1]
    random: dict[str, Any] = {"generator": generator, "device": generator.device}
    codes = torch.randint(0, 256, (columns, depth * CODE_BITS[code] // 8), **random, dtype=torch.uint8)
    if code == "e4m3":
        codes[(codes & 127) == 127] = 0  # these are no numbers
    scales = scale * torch.rand(columns, depth // min(most, depth), **random)
    if len(shape) == 2:
        return PackedMatrix(code, codes, scales, dtype)
    return PackedExperts(code, codes, scales, dtype, num_experts=shape[0])


def shapes_of(config: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield names and shapes of published tensors; transformers merges experts."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    experts = read_decoder_config(config).experts
    for name, tensor in model.state_dict().items():
        shape = tuple(tensor.shape)
        if experts is None or ".experts." not in name or len(shape) < 3:
            if name != HEAD or not config["tie_word_embeddings"]:
                yield name, shape
        elif experts.names.each is None:
            yield name, (shape[0], shape[2], shape[1])
        else:
            prefix, _, part = name.rpartition(".")
            parts = ("down",) if part == "down_proj" else ("gate", "up")
            for number, each in itertools.product(range(shape[0]), parts):
                yield f"{prefix}.{number}.{each}_proj.weight", (shape[1] // len(parts), shape[2])


def _families() -> tuple[Family, ...]:
    lines = Path(__file__).with_name("families.jsonl").read_text(encoding="utf-8").splitlines()
    return tuple(Family(**json.loads(line)) for line in lines)


LLAMA_8B, *FAMILIES = _families()
GPU_EXTENT = Extent(
    num_tries=5,
    lengths=(0, 1, 64, 1000, 4096, 102_400),
    row_counts=(1, 16, 64),
    num_rows=2000,
    work_lengths=(0, 70, 1500),
)


@dataclass(frozen=True)
class TrialSizes:
    """The amount of work of all stages, some minutes on a GPU."""

    model: Family = LLAMA_8B
    num_layers: int = 32  # of timed steps
    extent: Extent = GPU_EXTENT
    dtype: Dtype = "bfloat16"
    decoded: str = "embedded"  # the model for engines; empty: the random one
    kept_length: int = 32_768
    job_counts: tuple[int, ...] = (1, 4, 15, 32, 128)
    job_length: int = 4096
    num_steps: int = 24
    families: tuple[Family, ...] = tuple(FAMILIES)
    family_counts: tuple[int, ...] = (1, 8, 32)  # numbers of jobs
    host_counts: tuple[int, ...] = (1, 8, 32, 128)
    num_host_steps: int = 60
    row_counts: tuple[int, ...] = (64, 128, 256)
    checkpoint_length: int = 20_000
    sampled_vocab: int = 128_256
    num_drawn: int = 120
    engine_positions: tuple[int, ...] = (1000, 8000)
    engine_tokens: int = 128
    small_run_tokens: int = 6000  # per job
    attention_loads: tuple[tuple[int, int, int], ...] = (  # rows of a forward, jobs, positions of each
        *((64, 1, 4096), (64, 32, 4096), (64, 4, 20_000), (64, 1, 100_000)),
        *((128, 128, 704), (128, 128, 3000), (256, 200, 3000)),
    )
    product_rows: tuple[int, ...] = (64, 16, 128)
    num_run_jobs: int = 128
    run_tokens: int = 300  # per job


SMALL_SIZES = TrialSizes(  # for Triton's interpreter, which takes a second per forward
    model=LLAMA_8B.cut(),
    num_layers=1,
    extent=Extent(
        num_tries=1,
        lengths=(0, 65),
        row_counts=(1, 4),
        slot_counts=(1, 2),
        many_slots=(3,),
        mixed_length=140,
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
    checkpoint_length=70,
    sampled_vocab=300,
    num_drawn=4,
    engine_positions=(3,),
    engine_tokens=5,
    small_run_tokens=600,
    attention_loads=((64, 2, 600), (128, 3, 70)),
    product_rows=(64, 16),
    num_run_jobs=4,
)


@dataclass
class Trial:
    """A device, and the stages' shared folder."""

    device: torch.device
    scratch: Path
    sizes: TrialSizes = field(default_factory=TrialSizes)

    @functools.cached_property
    def files(self) -> ModelFiles:
        return written(self.sizes.model, self.scratch / "model", self.device)

    @functools.cached_property
    def decoded_files(self) -> ModelFiles:
        return locate_model(self.sizes.decoded) if self.sizes.decoded else self.files

    def parts(
        self, kernels: CudaKernels = DEFAULT_KERNELS, files: ModelFiles | None = None, dtype: Dtype | None = None
    ) -> Parts:
        made = Parts.of(files or self.files, dtype or self.sizes.dtype, self.device, kernels)
        made.extent = self.sizes.extent
        return made

    def deep_parts(self) -> Parts:
        made = self.parts()
        few = made.load
        made.load = lambda: deepened(few(), self.sizes.num_layers)
        return made

    def layer_parts(self) -> Parts:
        """Return one layer of the model."""
        return self.family_parts(dataclasses.replace(self.sizes.model, num_layers=1))

    def family_parts(self, family: Family) -> Parts:
        """Make the family's weights on demand."""
        config, dtype, device = family.text_config, torch.bfloat16, self.device
        if device.type == "cuda":
            hold_gemms_steady()
        positions = config["max_position_embeddings"]
        files = ModelFiles(family.name, Path(family.name), Digests({}, {}), positions, config["vocab_size"])

        def load() -> StackedWeights | None:
            made = decoder_of(family.tensors(dtype, device), read_decoder_config(config), dtype)
            return deepened(stacked_weights(made, device, handed_over(made)), family.num_layers, family.num_first)

        # unpacked products use cuBLAS, as in workers; CPUs have none of these sums
        kernels = DEFAULT_KERNELS if device.type == "cuda" else CudaKernels(linear="triton")
        made = Parts(files, dtype, device, load, kernels=kernels)
        made.extent = self.sizes.extent
        return made


def written(family: Family, folder: Path, device: torch.device) -> ModelFiles:
    """Write once, with a placeholder tokenizer."""
    if not folder.exists():
        made = Path(tempfile.mkdtemp(dir=folder.parent))
        tensors, places = family.tensors(torch.bfloat16, device), dict[str, str]()
        for number, names in enumerate([list(tensors)[first::NUM_FILES] for first in range(NUM_FILES)]):
            places |= dict.fromkeys(names, f"model-{number}.safetensors")
            file = made / f"model-{number}.safetensors"
            save_file({name: plain(tensors.pop(name)).cpu() for name in names}, file, {"format": "pt"})
        (made / INDEX_FILE).write_text(json.dumps({"metadata": {}, "weight_map": places}), encoding="utf-8")
        for file in (file for pattern in TEXT_FILES for file in EMBEDDED.glob(pattern)):
            shutil.copy(file, made)
        config = family.config | {"architectures": ["LlamaForCausalLM"], "torch_dtype": "bfloat16"}
        (made / "config.json").write_text(json.dumps(config), encoding="utf-8")
        made.rename(folder)
    return locate_model(str(folder))


def deepened(weights: StackedWeights | None, num_layers: int, num_first: int = 0) -> StackedWeights | None:
    """Repeat the layers, except the first `num_first`, in separate memory, so that a GPU's cache can't help."""
    if weights is None:
        return None
    repeated = itertools.cycle(weights.layers[num_first:])
    chosen = [*weights.layers[:num_first], *itertools.islice(repeated, num_layers - num_first)]
    layers = [copy.deepcopy(layer, {id(layer.rotary): layer.rotary}) for layer in chosen]
    return dataclasses.replace(weights, layers=layers, sizes=dataclasses.replace(weights.sizes, num_layers=num_layers))


def here(scratch: Path) -> Trial:
    """Without a GPU the trial is small, in Triton's interpreter."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        return Trial(torch.device("cpu"), scratch, SMALL_SIZES)
    return Trial(torch.device("cuda"), scratch)
