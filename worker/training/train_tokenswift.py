"""Training of TokenSwift's decoding heads for a frozen target: `swiftbatch train tokenswift`.

It follows the paper (appendix B.1, table 9), but a step draws 4,096 rows from all texts, whose hidden states are
computed once. Heads may learn from the target's own texts, with its distributions as labels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch.nn.functional import cross_entropy

from swiftbatch.worker.drafters.tokenswift.decoding_heads import head_states, save_heads
from swiftbatch.worker.forward.target_model import TargetModel
from swiftbatch.worker.model.model_files import HEADS_FILE, ModelFiles, locate_model
from swiftbatch.worker.training.recipes import HeadRecipe
from swiftbatch.worker.training.training_folder import TrainingFiles, TrainingFolder, held, write_measured, write_record
from swiftbatch.worker.training.training_loop import Step, run_steps
from swiftbatch.worker.training.training_texts import (
    TextStates,
    held_out_texts,
    load_target,
    text_states,
    training_states,
)

FILES = TrainingFiles("tokenswift_log.jsonl", "tokenswift_state.pt", HEADS_FILE)
NUM_LOGITS = 2**24  # limits memory for any vocabulary
WIDTH = 3  # number of candidates that are scored


@dataclass(frozen=True)
class AccuracyRecord:
    """Log record of the heads' accuracy along held-out texts."""

    when: str  # "before" or "after"
    texts: str
    num_rows: int
    top: list[list[float]]  # [num_heads][3]: share of rows with the token among the first 1, 2, 3 candidates

    def in_words(self) -> str:
        heads = (" / ".join(f"{share:.1%}" for share in head) for head in self.top)
        shares = "; ".join(f"head {number} {shares}" for number, shares in enumerate(heads, start=1))
        return f"{self.when} training, {self.texts}: {shares}"


def train_heads(model: str, data: Path, output: Path, recipe: HeadRecipe, report: Callable[[str], None]) -> None:
    """Train heads on the books under `data`; write heads and log to `output`.

    Finished heads stay. Raises ModelError and CorpusError.
    """
    files = locate_model(model)
    with held(output):
        _train(files, data, output, recipe, report)


def _train(files: ModelFiles, data: Path, output: Path, recipe: HeadRecipe, report: Callable[[str], None]) -> None:
    folder = TrainingFolder(output, FILES, {"model": files.fingerprint, "recipe": asdict(recipe)})
    if folder.is_finished(report):
        return
    target = load_target(files)
    states = training_states(target, data, recipe)
    report(f"{len(states.rows):,} rows to learn from, {recipe.num_step_rows:,} of them per step")
    texts = held_out_texts(target, data, recipe, report)
    held_out = {name: text_states(target, part, recipe.num_heads) for name, part in texts.items()}
    size = target.model.config.hidden_size
    weight = torch.zeros(recipe.num_heads, size, size, device=target.device, requires_grad=True)
    with folder.open_log(0) as log:

        def measured(when: str) -> Iterator[AccuracyRecord]:
            for name, part in held_out.items():
                yield AccuracyRecord(when, name, len(part.rows), head_accuracy(target, weight.detach(), part))

        write_measured(log, measured("before"), report)
        for record in train_weight(target, weight, states, recipe):
            write_record(log, record)
        report(f"{record['step']} steps in {record['seconds']:,.0f} s, nats per token {record['losses']}")
        write_measured(log, measured("after"), report)
    save_heads(output, weight, files.fingerprint)


def train_weight(
    target: TargetModel, weight: torch.Tensor, states: TextStates, recipe: HeadRecipe
) -> Iterator[dict[str, Any]]:
    """Train `weight [num_heads, hidden, hidden]` in place, and yield every step's record."""
    optimizer = torch.optim.AdamW(
        [weight], lr=recipe.learning_rate, betas=recipe.betas, weight_decay=recipe.weight_decay
    )
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, recipe.rate)
    generator = torch.Generator().manual_seed(recipe.seed)

    def take_step(step: int) -> Step:
        rows = states.rows[torch.randint(len(states.rows), (recipe.num_step_rows,), generator=generator)]
        losses = accumulate_gradients(target, weight, states, rows, soft_labels=recipe.num_own_texts > 0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        scheduler.step()
        return Step("heads", fmean(losses), {"losses": [round(loss, 4) for loss in losses]})

    return run_steps(take_step, recipe.num_steps)


def accumulate_gradients(
    target: TargetModel, weight: torch.Tensor, states: TextStates, rows: torch.Tensor, soft_labels: bool
) -> list[float]:
    """Add the gradients of the heads' mean cross entropy over `rows`; return each head's, in nats."""
    language_model_head = target.model.get_output_embeddings()
    losses = torch.zeros(len(weight))
    for part in chunk_rows(rows, target.vocab_size):
        hidden = states.hidden[part].to(target.device)
        total = torch.zeros((), device=target.device)
        for head, state in enumerate(head_states(weight.to(target.dtype), hidden)):
            labels = _labels(target, states, part + head + 2, soft_labels)
            loss = cross_entropy(language_model_head(state).float(), labels, reduction="sum") / len(rows)
            losses[head] += loss.detach().cpu()
            total = total + loss
        total.backward()
    return losses.tolist()


def _labels(target: TargetModel, states: TextStates, rows: torch.Tensor, soft: bool) -> torch.Tensor:
    """Return the tokens at `rows`, `[num_rows]`, or the target's distributions there, `[num_rows, vocab] float32`."""
    if not soft:
        return states.token_ids[rows].to(target.device)
    return target.logits(states.hidden[rows - 1].to(target.device)).softmax(dim=-1).clone()


def chunk_rows(rows: torch.Tensor, vocab_size: int) -> Iterator[torch.Tensor]:
    yield from rows.split(max(1, NUM_LOGITS // vocab_size))


@torch.inference_mode()
def head_accuracy(target: TargetModel, weight: torch.Tensor, states: TextStates) -> list[list[float]]:
    """Return each head's share of rows with the token among the first 1, 2, 3 candidates: `[num_heads][WIDTH]`.

    Head i (from 0) predicts the token i + 2 places after its row.
    """
    weight = weight.to(target.device, target.dtype)
    num_right = torch.zeros(len(weight), WIDTH)
    for rows in chunk_rows(states.rows, target.vocab_size):
        hidden = states.hidden[rows].to(target.device)
        for head, state in enumerate(head_states(weight, hidden)):
            candidates = target.logits(state).topk(WIDTH).indices.cpu()  # [num_rows, WIDTH]
            right = candidates == states.token_ids[rows + head + 2, None]
            num_right[head] += right.cumsum(dim=1).sum(dim=0)
    shares: list[list[float]] = (num_right / len(states.rows)).tolist()
    return [[round(share, 4) for share in head] for head in shares]
