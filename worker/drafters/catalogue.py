"""The engines that users choose from: their factories, parts and GPU memory. Needs no torch."""

from __future__ import annotations

import functools
import importlib
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from safetensors import SafetensorError, safe_open

from swiftbatch.jobs.errors import ModelError
from swiftbatch.worker.drafters.engine_options import (
    GRIFFIN_PAPER,
    TOKENSWIFT_PAPER,
    TRIFORCE_PAPER,
    EngineOptions,
    GriffinOptions,
    PartialCacheOptions,
    RecyclingOptions,
    TokenSwiftOptions,
    TriForceOptions,
    with_given,
)
from swiftbatch.worker.kernels.kernel_sizes import NUM_ROWS
from swiftbatch.worker.kv.gpu_memory_plan import SlotsWanted
from swiftbatch.worker.kv.kv_capacity import ITEM_SIZES, has_wide_heads
from swiftbatch.worker.kv.model_sizes import num_parameters, read_sizes
from swiftbatch.worker.model.architectures.catalogue import recurrent_shape
from swiftbatch.worker.model.model_files import (
    DRAFT_FOLDER,
    GRIFFIN_FILE,
    HEADS_FILE,
    MTP_FILE,
    PARTS_FOLDER,
    ModelFiles,
    headers_folder,
    locate_model,
    read_config,
)
from swiftbatch.worker.model.mtp_layers import NoPredictorError, predictor_in

if TYPE_CHECKING:
    import torch

    from swiftbatch.worker.drafters.drafter_interface import Drafter
    from swiftbatch.worker.forward.step_costs import Costs
    from swiftbatch.worker.forward.target_model import TargetModel
    from swiftbatch.worker.kv.gpu_memory_plan import DraftMemoryOf

FINGERPRINT, ORIGIN = "model_fingerprint", "origin"  # keys in a part file's header; the latter if it was imported
HeadKind = Literal["tokenswift", "medusa"]

DrafterFactory = Callable[["TargetModel", "Costs", "Path | None"], "Drafter"]
"""Makes a drafter for a target with its costs, and a folder of trained parts, or None for the target's own."""


@dataclass(frozen=True)
class TrainedPart:
    """A weight file of an engine, in the target's folder `parts` or in that of `--draft-model`."""

    reads_cache: ClassVar[bool] = True  # its drafts read the target's cache in part
    engine: str
    training: str  # its name in `swiftbatch train`
    name: str  # the file's or folder's name

    def find(self, model: str, model_path: Path, fingerprint: str, parts_folder: Path | None) -> Path:
        """Find the file. Raises ModelError if it is absent or belongs to another model."""
        path = (parts_folder or model_path / PARTS_FOLDER) / self.name
        if not path.is_file():
            raise ModelError(f"engine {self.engine}: no file {path}; {self._moved(model_path) or self.advice(model)}")
        try:
            with safe_open(path, framework="numpy") as file:
                found = file.metadata()[FINGERPRINT]
        except (OSError, SafetensorError, KeyError, TypeError) as error:
            reason = f"no safetensors file with a `{FINGERPRINT}`: {error}"
            raise ModelError(f"engine {self.engine}: {path}: {reason}; {self.advice(model)}") from error
        if found != fingerprint:
            raise ModelError(
                f"engine {self.engine}: {path} belongs to a model with fingerprint {found[:12]}, {model} has "
                f"{fingerprint[:12]}; {self.advice(model)}"
            )
        return path

    def _moved(self, model_path: Path) -> str:
        """Return advice if the part lies beside the weights, as in earlier versions; else ""."""
        found = model_path / self.name
        return f"move {found} into {model_path / PARTS_FOLDER}" if found.exists() else ""

    def advice(self, model: str) -> str:
        return (
            f"train it with `swiftbatch train {self.training} --model {model} --data DIR --output DIR` "
            "and name that folder with --draft-model"
        )


class DraftModelPart(TrainedPart):
    """A small model with the target's vocabulary."""

    def find(self, model: str, model_path: Path, fingerprint: str, parts_folder: Path | None) -> Path:
        inside = (parts_folder or model_path / PARTS_FOLDER) / self.name
        path = inside if parts_folder is None or inside.is_dir() else parts_folder
        if not (path / "config.json").is_file():
            raise ModelError(
                f"engine {self.engine}: no draft model in {path}; {self._moved(model_path) or self.advice(model)}"
            )
        found, expected = locate_model(str(path)).vocab_size, read_config(model, model_path)["vocab_size"]
        theirs, ours = _tokens(path), _tokens(model_path)  # either may have another kind of tokenizer
        if found != expected or (theirs != ours and None not in (theirs, ours)):
            raise ModelError(
                f"draft model {path}: its vocabulary ({found:,} tokens) is not that of {model} ({expected:,} tokens); "
                f"a draft model needs the same one: {self.advice(model)}"
            )
        return path


class PredictorPart(TrainedPart):
    """A layer that predicts further tokens: a part, or among the model's weights."""

    reads_cache = False

    def find(self, model: str, model_path: Path, fingerprint: str, parts_folder: Path | None) -> Path:
        """Find the file; if there is none, return the model's folder if its weights include the layer."""
        if not ((parts_folder or model_path / PARTS_FOLDER) / self.name).exists():
            try:
                predictor_in(model_path, read_config(model, model_path))
                return model_path
            except NoPredictorError as error:
                if str(error):
                    raise ModelError(
                        f"engine {self.engine}: the MTP layers of {model} are not used ({error}); {self.advice(model)}"
                    ) from None
        return super().find(model, model_path, fingerprint, parts_folder)


def _tokens(folder: Path) -> object:
    """Return the tokens and ids of `tokenizer.json`, or None without this file. Raises ModelError if unreadable."""
    path = folder / "tokenizer.json"
    try:
        return json.loads(path.read_text(encoding="utf-8"))["model"]["vocab"] if path.is_file() else None
    except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
        raise ModelError(f"{path} has no vocabulary that can be read: {type(error).__name__}; copy it again") from error


HEADS = TrainedPart("tokenswift", "tokenswift", HEADS_FILE)
DRAFT_MODEL = DraftModelPart("triforce", "draft", DRAFT_FOLDER)
GRIFFIN = TrainedPart("griffin", "griffin", GRIFFIN_FILE)
MTP = PredictorPart("mtp", "mtp", MTP_FILE)


@dataclass(frozen=True)
class EngineEntry:
    """One engine."""

    place: str  # module:function of its `DrafterFactory`; a leading dot means below `worker`
    drafts_from: str  # a line for users
    part: TrainedPart | None = None
    options: EngineOptions | None = None  # with their defaults; the factory takes them last
    reads_caches: bool = False  # as `Drafter.reads_caches`
    memory: str | None = None  # module:function of its further GPU memory
    tries: str | None = None  # an engine that it tries if the model has that engine's part

    def factory(self) -> DrafterFactory:
        make = _function(self.place)
        return make if self.options is None else functools.partial(make, options=self.options)

    def slots(self, longest_job: int, num_slots: int | None = None) -> SlotsWanted:
        """Return the slots for jobs of up to `longest_job` positions, without the engine's part."""
        wanted = SlotsWanted(longest_job, num_slots=num_slots)
        if not isinstance(self.options, PartialCacheOptions):
            return wanted
        return replace(wanted, partial_budget=self.options.partial_budget, partial_chunk=self.options.partial_chunk)

    def memory_of(self, path: Path, files: ModelFiles) -> DraftMemoryOf | None:
        """Return the function that counts the engine's GPU memory beyond the part, or None if it takes none."""
        return None if self.memory is None else functools.partial(_function(self.memory), path, files)


def _function(place: str) -> Any:
    module, function = place.split(":")
    return getattr(importlib.import_module(module, package=__package__.rpartition(".")[0]), function)


TOKENSWIFT = EngineEntry(
    ".drafters.tokenswift.tokenswift:tokenswift",
    "trained heads, reused n-grams: for long texts",
    HEADS,
    TokenSwiftOptions(),
    reads_caches=True,
)
TRIFORCE = EngineEntry(
    ".drafters.triforce:triforce",
    "a small draft model: for long texts without trained heads",
    DRAFT_MODEL,
    TriForceOptions(),
    reads_caches=True,
)
GRIFFIN_ENGINE = EngineEntry(
    ".drafters.griffin.griffin:griffin",
    "one trained layer over the target's features",
    GRIFFIN,
    GriffinOptions(),
    reads_caches=True,
    memory=".drafters.griffin.griffin_model:griffin_memory",
)
ENGINES = {
    "auto": EngineEntry(
        ".drafters.auto:auto",
        "whatever brings most tokens: recycled candidates, repeats, or chains drawn with scanned keys",
        tries=MTP.engine,
    ),
    "autoregressive": EngineEntry(
        ".drafters.drafter_interface:AutoregressiveDrafter", "nothing: plain decoding, the baseline"
    ),
    "prompt-lookup": EngineEntry(
        ".drafters.prompt_lookup:prompt_lookup", "the latest match of the last tokens in prompt and output"
    ),
    "suffix": EngineEntry(".drafters.suffix:suffix", "a suffix automaton over prompt and output"),
    "token-recycling": EngineEntry(
        ".drafters.token_recycling:token_recycling",
        "the target's own candidates at rows that it verified before",
    ),
    "tokenswift": TOKENSWIFT,
    "triforce": TRIFORCE,
    "griffin": GRIFFIN_ENGINE,
}
PAPER_ENGINES = {
    "token-recycling-paper": EngineEntry(
        ".drafters.static_recycling:token_recycling_paper",
        "the paper's matrix, and its tree of 80 nodes at every step",
        options=RecyclingOptions(),
    ),
    "tokenswift-paper": replace(
        TOKENSWIFT,
        drafts_from="whole trees of 39 nodes, which the paper's partial cache checks once",
        options=TOKENSWIFT_PAPER,
    ),
    "triforce-paper": replace(
        TRIFORCE,
        drafts_from="chains of 2 and 6 tokens at every step, with the paper's retrieval cache",
        options=TRIFORCE_PAPER,
    ),
    "griffin-paper": replace(
        GRIFFIN_ENGINE,
        drafts_from="dynamic trees of 60 nodes and depth 6 at every step",
        options=GRIFFIN_PAPER,
    ),
}
"""Engines with the settings of their papers, which were chosen for one job on a GPU."""
CHECKPOINT_ENGINES = {
    MTP.engine: EngineEntry(
        ".drafters.mtp.mtp:mtp",
        "the layer that predicts further tokens (MTP) of the checkpoint, or a trained one",
        MTP,
        memory=".drafters.mtp.predictor:predictor_memory",
    ),
}
"""Engines that `auto` drafts with by itself, where a checkpoint has what they need. Benchmarks take them by name."""
DEFAULT_ENGINE, PLAIN_ENGINE = "auto", "autoregressive"  # the latter drafts nothing


def engine_entry(name: str, given: tuple[str, ...] = ()) -> EngineEntry:
    """Look an engine up; `given` changes its options by texts NAME=VALUE.

    Raises ModelError for an unknown engine or option, or a value out of its range.
    """
    entry = (ENGINES | PAPER_ENGINES | CHECKPOINT_ENGINES).get(name)
    if entry is None:
        known = ", ".join(ENGINES | PAPER_ENGINES)
        raise ModelError(
            f"unknown engine {name!r}; expected one of: {known}; a run that was made with another goes on "
            f"with any of them, and gives the same output: `swiftbatch resume RUN --engine {DEFAULT_ENGINE}`"
        )
    if given and entry.options is None:
        raise ModelError(f"--engine-option {given[0]}: engine {name} has no options; see docs/engines.md")
    return replace(entry, options=with_given(entry.options, name, given)) if given and entry.options else entry


def check_parts(
    engine: str, model: str, model_fingerprint: str, parts_folder: str | Path | None, options: tuple[str, ...] = ()
) -> None:
    """Raise ModelError for an unknown engine or option, or a part that is missing or does not fit the model."""
    if part := engine_entry(engine, options).part:
        if part.reads_cache:
            refuse_unused_part(engine, model, headers_folder(model))
        part.find(model, headers_folder(model), model_fingerprint, None if parts_folder is None else Path(parts_folder))


def refuse_unread_caches(engine: str, model: str, has_states: bool, has_wide_heads: bool) -> None:
    """Raise ModelError for a model whose caches cannot be read in part, as the engine's drafts do."""
    if has_states or has_wide_heads:
        has = "a state in place of one" if has_states else "heads of different sizes in it"
        raise ModelError(
            f"engine {engine}: its drafts read a part of the cache, and {model} has layers with {has}; use "
            f"--engine {DEFAULT_ENGINE}"
        )


def refuse_unused_part(engine: str, model: str, path: Path) -> None:
    """Raise ModelError, by the model's config, if the engine could not use a trained part."""
    config = read_config(model, path)
    refuse_unread_caches(engine, model, recurrent_shape(config) is not None, has_wide_heads(config))


def create_drafter(
    name: str,
    target: TargetModel,
    costs: Costs,
    parts_folder: str | Path | None = None,
    options: tuple[str, ...] = (),
) -> Drafter:
    """Make an engine's drafter; `parts_folder` None means the target's own.

    Raises ModelError for an unknown engine or option, and for a part that is missing or does not fit. Raises it also
    if the drafter reads caches, and the model has states or heads of several sizes.
    """
    entry, shape = engine_entry(name, options), target.cache_shape
    if entry.part is not None and entry.part.reads_cache:
        refuse_unread_caches(name, target.files.name, shape.recurrent is not None, bool(shape.stripes))
    return entry.factory()(target, costs, None if parts_folder is None else Path(parts_folder))


Shape = tuple[int | str, ...]  # a name stands for any number above 0


@dataclass(frozen=True)
class ReadPart:
    header: dict[str, str]
    tensors: dict[str, torch.Tensor]
    where: str  # begins every message
    advice: str  # ends every message

    def fault(self, reason: str) -> ModelError:
        return ModelError(f"{self.where}: {reason}; {self.advice}")

    def checked(self, shapes: dict[str, Shape]) -> dict[str, torch.Tensor]:
        """Return the tensors. Raises ModelError unless names, shapes and finite floats are as expected."""
        for name, shape in shapes.items():
            expected = f"expected floats [{', '.join(map(str, shape))}]"
            if name not in self.tensors:
                raise self.fault(f"`{name}` is missing; {expected}")
            found = self.tensors[name]
            if not found.is_floating_point() or not _fits(found.shape, shape):
                raise self.fault(f"`{name}` is {found.dtype} {list(found.shape)}; {expected}")
            if not found.isfinite().all():
                raise self.fault(f"`{name}` has values that are not finite")
        if unknown := self.tensors.keys() - shapes.keys():
            raise self.fault(f"unknown tensors {', '.join(sorted(unknown))}")
        return self.tensors


def read_part(part: TrainedPart, target: TargetModel, parts_folder: Path | None) -> ReadPart:
    """Read a part's file. Raises ModelError if it is missing, damaged, or another model's."""
    files = target.files
    path = part.find(files.name, files.path, files.fingerprint, parts_folder)
    with safe_open(path, framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
        return ReadPart(file.metadata(), tensors, f"engine {part.engine}: {path}", part.advice(files.name))


def _fits(found: torch.Size, shape: Shape) -> bool:
    if len(found) != len(shape):
        return False
    pairs = zip(found, shape, strict=True)
    return all(size > 0 if isinstance(wanted, str) else size == wanted for size, wanted in pairs)


def slots_wanted(
    engine: str,
    files: ModelFiles,
    dtype: str,
    longest_job: int,
    parts: str | Path | None,
    options: tuple[str, ...] = (),
) -> SlotsWanted:
    """Return the slots for jobs of up to `longest_job` positions; `parts` is the folder of `--draft-model`.

    Raises ModelError as `check_parts` does.
    """
    entry, folder = engine_entry(engine, options), None if parts is None else Path(parts)
    wanted = entry.slots(longest_job)
    if entry.tries is not None:
        return with_tried(wanted, entry.tries, files, folder)
    if entry.part is None:
        return wanted
    path = entry.part.find(files.name, files.path, files.fingerprint, folder)
    return _with_part(wanted, entry, path, dtype, files)


def with_tried(wanted: SlotsWanted, engine: str, files: ModelFiles, parts_folder: Path | None) -> SlotsWanted:
    entry = engine_entry(engine)
    if entry.part is None:
        return wanted
    try:
        path = entry.part.find(files.name, files.path, files.fingerprint, parts_folder)
    except ModelError:
        return wanted
    return replace(wanted, engine=entry.memory_of(path, files), can_lack_engine=True)


def _with_part(wanted: SlotsWanted, entry: EngineEntry, path: Path, dtype: str, files: ModelFiles) -> SlotsWanted:
    if (engine := entry.memory_of(path, files)) is not None:
        return replace(wanted, engine=engine)
    if path.is_dir():
        assert isinstance(entry.options, TriForceOptions)
        draft = read_sizes(locate_model(str(path)), dtype)
        return replace(wanted, draft=draft, draft_length=entry.options.draft_length)
    logit_bytes = NUM_ROWS * files.vocab_size * 4  # logits of the heads
    return replace(wanted, part_bytes=num_parameters([path]) * ITEM_SIZES[dtype] + logit_bytes)
