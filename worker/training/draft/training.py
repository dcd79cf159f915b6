"""Training of a small draft model for a target: `swiftbatch train draft`.

It is distilled: at every token it learns the whole distribution that the target has there, since what it is to guess is
what the target draws, with the same noise, and not what an author wrote. Half of the text is the target's own.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch.nn.functional import cross_entropy
from transformers import AutoTokenizer, LlamaForCausalLM

from worker.drafters.triforce.draft_model import NUM_SINKS
from worker.model.files import ModelError, locate_model
from worker.target.target import TargetModel
from worker.training.corpus import jumping_positions
from worker.training.draft.agreement import measure_agreement
from worker.training.draft.recipe import NUM_BOOK_TOKENS, DraftRecipe, draft_config
from worker.training.heads.texts import Text, book_texts, held_out_texts, learned_texts, load_target
from worker.training.target.recipe import Phase
from worker.training.target.training import run_phases, save_target, write_measured, write_record

LOG = "draft_log.jsonl"
NUM_LOGITS = 2**21  # held at once, whatever the vocabulary; more than fits the processor's cache is slower


class DraftWindows:
    """Draws random windows of equal length from texts, a share of them as a draft model reads a long text in use."""

    def __init__(self, texts: list[Text], seed: int) -> None:
        self._random = np.random.default_rng(seed)
        self._texts = [np.asarray(text.token_ids) for text in texts]
        sizes = np.asarray([len(text) for text in self._texts], dtype=np.float64)
        self._shares = sizes / sizes.sum()

    def batch(self, num_windows: int, length: int) -> torch.Tensor:
        """Return windows `[num_windows, length] int64`; no text may be shorter than one."""
        chosen = [self._texts[index] for index in self._random.choice(len(self._texts), num_windows, p=self._shares)]
        windows = [text[jumping_positions(self._random, len(text), length, NUM_SINKS)] for text in chosen]
        return torch.from_numpy(np.stack(windows))


def train_draft(model: str, data: Path, output: Path, recipe: DraftRecipe, report: Callable[[str], None]) -> None:
    """Train a draft model for a model on books under `data` and on own texts; write it and its log to `output`.

    Where `data` has test books (`*test*.jsonl`), agreement with the target is measured before and after. Raises
    ModelError and CorpusError.
    """
    files = locate_model(model)
    if output.resolve() == files.path.resolve():
        raise ModelError(f"output {output}: holds the target model itself; give another folder, as {output / 'draft'}")
    target = load_target(files)
    batch = window_source(target, data, recipe)
    held_out = held_out_texts(target, data, recipe.texts, report)
    torch.manual_seed(recipe.seed)
    draft = LlamaForCausalLM(draft_config(target.model.config)).to(target.device)
    report(f"{draft.num_parameters():,} parameters")
    output.mkdir(parents=True, exist_ok=True)
    with (output / LOG).open("w", encoding="utf-8") as log:
        write_measured(log, measure_agreement("before", target, draft, held_out), report)
        for _, steps in run_phases(draft, recipe, lambda phase: distil(draft, target, batch(phase))):
            for step in steps:
                write_record(log, step)
        save_target(draft, AutoTokenizer.from_pretrained(files.path, local_files_only=True), output)
        write_measured(log, measure_agreement("after", target, draft, held_out), report)


def window_source(target: TargetModel, data: Path, recipe: DraftRecipe) -> Callable[[Phase], torch.Tensor]:
    """What draws the windows of a step: some from books, some from what the target says behind parts of them."""
    length = max(phase.length for phase in recipe.phases)
    texts = book_texts(data, "*train*.jsonl", target.files, NUM_BOOK_TOKENS, length)
    books = DraftWindows(texts, recipe.seed)
    own = DraftWindows(learned_texts(target, texts, recipe.texts), recipe.seed)

    def batch(phase: Phase) -> torch.Tensor:
        num_own = round(recipe.own_share * phase.batch_size)
        parts = [books.batch(phase.batch_size - num_own, phase.length), own.batch(num_own, phase.length)]
        return torch.cat(parts)

    return batch


def distil(draft: LlamaForCausalLM, target: TargetModel, windows: torch.Tensor) -> float:
    """Add the gradients of the cross entropy against the target's distributions in `windows [num_windows, length]`.

    Returns it, in nats per token. The target sees the same window.
    """
    total = 0.0
    for part in windows.to(target.device).split(max(1, NUM_LOGITS // (target.vocab_size * windows.shape[1]))):
        labels = target_distributions(target, part).flatten(0, 1)
        with torch.autocast(target.device.type, dtype=torch.bfloat16):
            logits = draft(input_ids=part, use_cache=False).logits  # [part, length, vocab]
        loss = cross_entropy(logits.flatten(0, 1).float(), labels, reduction="sum") / windows.numel()
        loss.backward()
        total += float(loss.detach())
    return total


def target_distributions(target: TargetModel, windows: torch.Tensor) -> torch.Tensor:
    """What the target expects behind every token of `windows [num_windows, length]`: `[..., vocab] float32`."""
    hidden = target.model.model(input_ids=windows, use_cache=False).last_hidden_state
    return target.logits(hidden).softmax(dim=-1)
