"""Training of a small draft model for a target: `swiftbatch train draft`.

The draft model must guess what the target draws with the same noise, so it learns the target's distributions. It can
also learn the tokens of texts, as TokenSwift's draft model for TriForce does (appendix C).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.functional import cross_entropy
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedConfig

from swiftbatch.jobs.errors import ModelError
from swiftbatch.jobs.sampling_params import SamplingParams
from swiftbatch.worker.drafters.engine_options import NUM_SINKS, WINDOW
from swiftbatch.worker.drafters.triforce import window_of
from swiftbatch.worker.forward.target_model import TargetModel
from swiftbatch.worker.model.model_files import locate_model
from swiftbatch.worker.sampling.noise import GumbelNoise
from swiftbatch.worker.sampling.sampler import draw
from swiftbatch.worker.text.chat_template import words_of
from swiftbatch.worker.training.data_parallel import Report, share_of, sum_gradients, total
from swiftbatch.worker.training.feature_files import FEWEST_TOKENS, FOLDER, TextFeatures, TextSource
from swiftbatch.worker.training.recipes import DraftRecipe, Labels
from swiftbatch.worker.training.train_target import save_target
from swiftbatch.worker.training.training_folder import TrainingFiles, TrainingFolder, held
from swiftbatch.worker.training.training_loop import Optimizers, PartTraining, Step, repeatable, train_part, whole_step
from swiftbatch.worker.training.training_texts import jumping_positions, load_target

FILES = TrainingFiles("draft_log.jsonl", "draft_state.pt", "model.safetensors", "draft_training.png")
NUM_LOGITS = 2**21  # more logits do not fit in the processor's cache, which is slower
SAMPLING = {
    "T 0": SamplingParams(max_tokens=1, temperature=0.0),
    "T 1": SamplingParams(max_tokens=1, temperature=1.0),
    "T 1, min-p 0.1": SamplingParams(max_tokens=1, temperature=1.0, min_p=0.1),
}
"""Sampling of both models, by name."""
MOST_HELD_OUT_TOKENS = 2048  # of a test book
SHORTEST = 64  # a text with fewer tokens is left out
NO_TOKEN = -1
KIND = "llama"


SHAPE = {
    "hidden_size": 192,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "max_position_embeddings": 1024,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
}
"""The embedded model's draft model; it is wide rather than deep, because a small model's time depends on its layers."""
OTHER_FIELDS = {"rope_theta", "rope_scaling", "torch_dtype"}  # of configs of earlier versions of transformers


def read_shape(path: Path) -> dict[str, Any]:
    """Read the shape of a Llama from a config.json, or its folder. Raises ModelError."""
    file = path / "config.json" if path.is_dir() else path
    try:
        shape = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"config {file}: cannot be read ({error}); expected the config.json of a Llama") from None
    if not isinstance(shape, dict) or shape.get("model_type", KIND) != KIND:
        raise ModelError(f"config {file}: expected a JSON object with `model_type` {KIND}")
    if unknown := sorted(shape.keys() - LlamaConfig().to_dict().keys() - OTHER_FIELDS):
        raise ModelError(f"config {file}: unknown fields {', '.join(unknown)}; expected those of a {KIND}'s config")
    return shape


def draft_config(target: PreTrainedConfig, shape: dict[str, Any] | None = None) -> LlamaConfig:
    """Return the config of a Llama with the target's vocabulary. Raises ModelError for an impossible shape."""
    ids = {name: getattr(target, name) for name in ("vocab_size", "bos_token_id", "eos_token_id")}
    fields = SHAPE if shape is None else shape
    if fields.get("vocab_size", ids["vocab_size"]) != ids["vocab_size"]:
        raise ModelError(f"config: vocab_size is {fields['vocab_size']}, expected the model's, {ids['vocab_size']}")
    try:
        config = LlamaConfig(**fields | ids)
        with torch.device("meta"):
            LlamaForCausalLM(config)(input_ids=torch.zeros(1, 2, dtype=torch.long))
    except Exception as error:  # the library checks little, and raises all kinds
        raise ModelError(f"config: no model has this shape: {words_of(error)}; correct the config") from None
    return config


class DraftWindows:
    """Draws random windows of equal length from texts, some of them with a gap."""

    def __init__(self, texts: list[TextFeatures]) -> None:
        self._texts = [text.token_ids.numpy() for text in texts]
        sizes = np.asarray([len(text) for text in self._texts], dtype=np.float64)
        self._shares = sizes / sizes.sum()

    def batch(self, random: np.random.Generator, num_windows: int, length: int, num_sinks: int) -> torch.Tensor:
        """Return windows `[num_windows, length] int64`, of shorter texts padded with `NO_TOKEN`.

        A gap follows the first `num_sinks` tokens in some, if these are not 0.
        """
        chosen = [self._texts[index] for index in random.choice(len(self._texts), num_windows, p=self._shares)]
        windows = torch.full((num_windows, length), NO_TOKEN)
        for window, text in zip(windows, chosen, strict=True):
            positions = jumping_positions(random, len(text), min(length, len(text)), num_sinks)
            window[: len(positions)] = torch.from_numpy(text[positions].astype(np.int64))
        return windows


def train_draft(
    model: str, data: Path, output: Path, recipe: DraftRecipe, report: Report, features: Path | None = None
) -> None:
    """Train a draft model on books under `data` and own texts; write it and its log to `output`.

    A killed training resumes to the same weights. A finished training is kept. Raises ModelError and CorpusError.
    """
    files, length = locate_model(model), recipe.window_length
    if output.resolve() == files.path.resolve():
        raise ModelError(f"output {output}: holds the target model itself; give another folder, as {output / 'draft'}")
    with held(output):
        folder = TrainingFolder(output, FILES, {"model": files.fingerprint, "recipe": asdict(recipe)})
        if folder.is_finished(report):
            return
        target = load_target(files)
        config = draft_config(target.model.config, recipe.shape)
        if config.max_position_embeddings < length:
            raise ModelError(
                f"config: max_position_embeddings is {config.max_position_embeddings}, expected {length} or more, "
                "which a draft model reads"
            )
        source = TextSource(target, data, features or output / FOLDER, recipe.texts, min(SHORTEST, length), report)
        torch.manual_seed(recipe.seed)
        draft = LlamaForCausalLM(config).to(target.device)
        with repeatable(draft.device):
            run_training(draft, source, recipe, folder, report)


def run_training(
    draft: LlamaForCausalLM, source: TextSource, recipe: DraftRecipe, folder: TrainingFolder, report: Report
) -> None:
    target, optimizers, batch = source.target, Optimizers(draft, recipe), window_source(source, recipe)
    held_out = source.held_out(FEWEST_TOKENS, MOST_HELD_OUT_TOKENS)

    def take_step(step: int) -> Step:
        windows = batch(step)
        num_rows = int(has_label(windows, recipe.labels).sum())
        loss = add_gradients(draft, target, share_of(windows), num_rows, recipe.labels)
        sum_gradients(draft)
        optimizers.step(step)
        return whole_step("draft", num_rows, loss)

    def measure(when: str, _: int) -> Iterator[DraftAgreementRecord]:
        return iter(()) if when == "during" else measure_agreement(when, target, draft, held_out)

    def save() -> None:
        save_target(draft, AutoTokenizer.from_pretrained(target.files.path, local_files_only=True), folder.path)

    train_part(folder, PartTraining(draft, optimizers, recipe.num_steps, take_step, measure, save), report)


def window_source(source: TextSource, recipe: DraftRecipe) -> Callable[[int], torch.Tensor]:
    """Return the function of each step's windows, some of books, some of the target's own texts."""
    texts, length = source.books(has_features=False), recipe.window_length
    own = source.own(texts, has_features=False)
    num_own = round(recipe.own_share * recipe.num_step_windows) if own else 0
    num_sinks = 0 if recipe.labels == "hard" else NUM_SINKS  # every token has the text's next one behind it
    parts = [(DraftWindows(texts), recipe.num_step_windows - num_own)]
    if num_own:
        parts.append((DraftWindows(own), num_own))

    def batch(step: int) -> torch.Tensor:
        random = np.random.default_rng([recipe.seed, step])
        return torch.cat([among.batch(random, number, length, num_sinks) for among, number in parts])

    return batch


def add_gradients(
    draft: LlamaForCausalLM, target: TargetModel, windows: torch.Tensor, num_rows: int, labels: Labels = "soft"
) -> float:
    """Add the gradients of the cross entropy with the labels in this process's `windows`, of a step's `num_rows`.

    Returns the cross entropy over all of them, in nats per token.
    """
    found = torch.zeros((), device=target.device)
    for part in windows.to(target.device).split(max(1, NUM_LOGITS // (target.vocab_size * windows.shape[1]))):
        counted, token_ids = has_label(part, labels), part.clamp(min=0)
        with torch.autocast(target.device.type, dtype=torch.bfloat16):
            logits = draft(input_ids=token_ids, use_cache=False).logits  # [part, length, vocab]
        if labels == "hard":
            logits, expected = logits[:, :-1], token_ids[:, 1:]
        else:
            expected = target_distributions(target, token_ids)
        loss = cross_entropy(logits[counted].float(), expected[counted], reduction="sum") / num_rows
        loss.backward()
        found += loss.detach()
    return float(total(found))


def has_label(windows: torch.Tensor, labels: Labels) -> torch.Tensor:
    """Return the rows with a label, `[num_windows, length] bool`, or one row less before the text's next tokens."""
    return (windows[:, 1:] if labels == "hard" else windows) != NO_TOKEN


def target_distributions(target: TargetModel, windows: torch.Tensor) -> torch.Tensor:
    """Return distributions after each token of `windows [num_windows, length]`: `[..., vocab] float32`."""
    hidden = target.model.model(input_ids=windows, use_cache=False).last_hidden_state
    return target.logits(hidden).softmax(dim=-1)


@dataclass(frozen=True)
class DraftAgreementRecord:
    """Log record of agreement along held-out texts."""

    when: str  # "before" or "after"
    texts: str
    num_rows: int
    same: dict[str, float]  # share of rows where both draw the same token, by sampling

    def in_words(self) -> str:
        shares = ", ".join(f"{share:.1%} at {name}" for name, share in self.same.items())
        return f"{self.when} training, {self.texts}: the same token as the target for {shares}"


def measure_agreement(
    when: str, target: TargetModel, draft: LlamaForCausalLM, held_out: list[TextFeatures]
) -> Iterator[DraftAgreementRecord]:
    for name, texts in groupby(held_out, key=lambda text: text.name):
        yield DraftAgreementRecord(when, name, *agreement(target, draft, texts))


@torch.inference_mode()
def agreement(
    target: TargetModel, draft: LlamaForCausalLM, texts: Iterable[TextFeatures]
) -> tuple[int, dict[str, float]]:
    """Return the number of rows, and the share of equal draws for each `SAMPLING`."""
    num_rows = 0
    num_same = dict.fromkeys(SAMPLING, 0)
    for seed, text in enumerate(texts):
        noise = GumbelNoise(seed, target.vocab_size, target.device)
        for first_row, drafted in windowed_logits(draft, text.token_ids.tolist()):
            said = target.logits(text.features[first_row : first_row + len(drafted)].to(target.device))
            for row in range(max(0, text.first_row - first_row), len(drafted)):
                num_rows += 1
                for name, params in SAMPLING.items():
                    position = first_row + row + 1  # the row predicts this token
                    num_same[name] += draw(said[row], position, params, noise) == draw(
                        drafted[row], position, params, noise
                    )
    return num_rows, {name: round(count / num_rows, 4) for name, count in num_same.items()}


def windowed_logits(draft: LlamaForCausalLM, token_ids: list[int]) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield the first row and logits `[num_rows, vocab] float32` of stretches that cover the text."""
    ids = np.asarray(token_ids)
    begins = [1, *range(2 * WINDOW, len(ids) + 1, WINDOW), len(ids) + 1]  # lengths at which the window restarts
    for first, behind in pairwise(begins):
        read = torch.from_numpy(window_of(ids[: behind - 1], first)).to(draft.device)
        with torch.autocast(draft.device.type, dtype=torch.bfloat16):
            logits = draft(input_ids=read[None], use_cache=False).logits[0, first - behind :]
        yield first - 1, logits.float()
