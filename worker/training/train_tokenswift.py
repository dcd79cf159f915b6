"""Training of TokenSwift's decoding heads for a frozen target: `swiftbatch train tokenswift`.

It follows the paper (appendix B.1, table 9), but features of all texts are computed once, and a step draws 4,096 of
their rows. Heads may learn from the target's own texts, with its distributions as labels. Medusa's heads are trained
alike: Medusa weighs the loss of head k by 0.8^k, but AdamW's steps do not depend on such a factor.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from statistics import fmean

import numpy as np
import torch
from torch.nn.functional import cross_entropy

from swiftbatch.worker.drafters.catalogue import refuse_unused_part
from swiftbatch.worker.drafters.tokenswift.decoding_heads import head_states, save_heads
from swiftbatch.worker.forward.target_model import TargetModel
from swiftbatch.worker.model.model_files import HEADS_FILE, locate_model
from swiftbatch.worker.training.data_parallel import Report, share_of, sum_gradients, total
from swiftbatch.worker.training.feature_files import TextFeatures, TextSource
from swiftbatch.worker.training.recipes import HeadRecipe
from swiftbatch.worker.training.training_folder import TrainingFiles, TrainingFolder, held
from swiftbatch.worker.training.training_loop import PartTraining, Step, train_part
from swiftbatch.worker.training.training_texts import load_target

FOLDER = "tokenswift_features"  # default name within the output, where GRIFFIN has features of other texts
FILES = TrainingFiles("tokenswift_log.jsonl", "tokenswift_state.pt", HEADS_FILE, "tokenswift_training.png")
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


class Heads(torch.nn.Module):
    def __init__(self, recipe: HeadRecipe, size: int) -> None:
        super().__init__()
        self.kind = recipe.kind
        self.weight = torch.nn.Parameter(torch.zeros(recipe.num_heads, size, size))

    def states(self, target: TargetModel, hidden: torch.Tensor) -> Iterator[torch.Tensor]:
        """Yield each head's states from the target's, `[num_rows, hidden]`."""
        return head_states(self.weight.to(target.dtype), hidden, self.kind)


class HeadRows:
    """The rows of all texts after which every head has a token to predict."""

    def __init__(self, texts: Sequence[TextFeatures], num_heads: int) -> None:
        self._texts, self._num_heads = texts, num_heads
        sizes = [max(0, len(text.token_ids) - text.first_row - num_heads - 1) for text in texts]
        self._ends = np.cumsum(sizes)  # number of rows up to the end of each text

    def __len__(self) -> int:
        return int(self._ends[-1])

    def gather(self, rows: np.ndarray, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Copy ascending rows: tokens and features at each and at the `num_heads + 1` places after it.

        Returns `[num_rows, 2 + num_heads]` and `[num_rows, 2 + num_heads, hidden]`.
        """
        token_ids, features = [], []
        numbers = np.searchsorted(self._ends, rows, side="right")
        for number in dict.fromkeys(numbers.tolist()):
            text = self._texts[number]
            first = text.first_row - (int(self._ends[number - 1]) if number else 0)
            places = torch.from_numpy(rows[numbers == number] + first)[:, None] + torch.arange(self._num_heads + 2)
            token_ids.append(text.token_ids[places].long())
            features.append(text.features[places])
        return torch.cat(token_ids).to(device), torch.cat(features).to(device)


def train_heads(
    model: str, data: Path, output: Path, recipe: HeadRecipe, report: Report, features: Path | None = None
) -> None:
    """Train heads on the books under `data`, or on own texts; write heads and log to `output`.

    A killed training resumes to the same weights. A finished training is kept. Raises ModelError and CorpusError.
    """
    files = locate_model(model)
    refuse_unused_part("tokenswift", files.name, files.path)
    with held(output):
        folder = TrainingFolder(output, FILES, {"model": files.fingerprint, "recipe": asdict(recipe)})
        if folder.is_finished(report):
            return
        target = load_target(files)
        source = TextSource(target, data, features or output / FOLDER, recipe, recipe.num_needed_tokens, report)
        texts = learned(source, recipe)
        held_out = source.held_out(recipe.num_needed_tokens)
        run_training(
            Heads(recipe, target.hidden_size).to(target.device), target, texts, held_out, recipe, folder, report
        )


def learned(source: TextSource, recipe: HeadRecipe) -> list[TextFeatures]:
    """Return the texts that heads learn from: books, or the target's own."""
    return source.own(source.books(has_features=False)) if recipe.num_own_texts else source.books()


def run_training(
    heads: Heads,
    target: TargetModel,
    texts: Sequence[TextFeatures],
    held_out: Sequence[TextFeatures],
    recipe: HeadRecipe,
    folder: TrainingFolder,
    report: Report,
) -> None:
    optimizer = torch.optim.AdamW(heads.parameters(), betas=recipe.betas, weight_decay=recipe.weight_decay)
    rows = HeadRows(texts, recipe.num_heads)
    report(f"{len(rows):,} rows to learn from, {recipe.num_step_rows:,} of them per step")

    def take_step(step: int) -> Step:
        drawn = np.random.default_rng([recipe.seed, step]).integers(len(rows), size=recipe.num_step_rows)
        for group in optimizer.param_groups:
            group["lr"] = recipe.learning_rate * recipe.rate(step)
        mine = share_of(np.sort(drawn))
        losses = accumulate_gradients(target, heads, rows, mine, len(drawn), soft_labels=recipe.num_own_texts > 0)
        sum_gradients(heads)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return Step("heads", fmean(losses), {"losses": [round(loss, 4) for loss in losses]})

    def measure(when: str, _: int) -> Iterator[AccuracyRecord]:
        for name, named in groupby(held_out if when != "during" else (), key=lambda text: text.name):
            some = HeadRows(list(named), recipe.num_heads)
            yield AccuracyRecord(when, name, len(some), head_accuracy(target, heads, some))

    def save() -> None:
        save_heads(folder.path, heads.weight, target.files.fingerprint, recipe.kind)

    train_part(folder, PartTraining(heads, optimizer, recipe.num_steps, take_step, measure, save), report)


def accumulate_gradients(
    target: TargetModel, heads: Heads, rows: HeadRows, mine: np.ndarray, num_rows: int, soft_labels: bool
) -> list[float]:
    """Add the gradients of the heads' mean cross entropy over this process's ascending rows, of a step's `num_rows`.

    Returns each head's over all of them, in nats.
    """
    language_model_head = target.model.get_output_embeddings()
    losses = torch.zeros(len(heads.weight))
    for part in chunk_rows(mine, target.vocab_size):
        token_ids, features = rows.gather(part, target.device)
        summed = torch.zeros((), device=target.device)
        for head, state in enumerate(heads.states(target, features[:, 0])):
            labels = (
                target.logits(features[:, head + 1]).softmax(dim=-1).clone() if soft_labels else token_ids[:, head + 2]
            )
            loss = cross_entropy(language_model_head(state).float(), labels, reduction="sum") / num_rows
            losses[head] += loss.detach().cpu()
            summed = summed + loss
        summed.backward()
    return total(losses).tolist()


def chunk_rows(rows: np.ndarray, vocab_size: int) -> Iterator[np.ndarray]:
    size = max(1, NUM_LOGITS // vocab_size)
    return (rows[start : start + size] for start in range(0, len(rows), size))


@torch.no_grad()
def head_accuracy(target: TargetModel, heads: Heads, rows: HeadRows) -> list[list[float]]:
    """Return each head's share of rows with the token among the first 1, 2, 3 candidates: `[num_heads][WIDTH]`.

    Head i (from 0) predicts the token i + 2 places after its row.
    """
    num_right = torch.zeros(len(heads.weight), WIDTH)
    for part in chunk_rows(np.arange(len(rows)), target.vocab_size):
        token_ids, features = rows.gather(part, target.device)
        for head, state in enumerate(heads.states(target, features[:, 0])):
            candidates = target.logits(state).topk(WIDTH).indices  # [num_rows, WIDTH]
            right = candidates == token_ids[:, head + 2, None]
            num_right[head] += right.cumsum(dim=1).sum(dim=0).cpu()
    shares: list[list[float]] = (num_right / len(rows)).tolist()
    return [[round(share, 4) for share in head] for head in shares]
