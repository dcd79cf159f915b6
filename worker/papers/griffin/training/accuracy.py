"""The share of a GRIFFIN draft's forwards that give the target's token: greedily, and with the same noise."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby

import torch

from swiftbatch.worker.drawing.noise import GumbelNoise
from swiftbatch.worker.papers.griffin.model import GriffinModel
from swiftbatch.worker.papers.griffin.training.feature_texts import Windows, windows_in_use
from swiftbatch.worker.papers.griffin.training.passes import NUM_LOGITS, Pass, forward_passes
from swiftbatch.worker.target.target import TargetModel
from swiftbatch.worker.training.feature_file import TextFeatures

NUM_FORWARDS = 6  # as deep as a draft tree is
WAYS = ("T 0", "T 1")  # of drawing


@dataclass(frozen=True)
class GriffinAccuracyRecord:
    """Accuracy of each forward along held-out texts, as the log keeps it; rates are by way of drawing, then forward."""

    when: str  # before, during or after training
    step: int
    texts: str
    num_rows: int  # that have drafts of all forwards
    same: dict[str, list[float]]  # rows where draft model and target draw the same token, the text's in front of it
    misaligned: dict[str, list[float]]  # rows where they do not, of those whose earlier forwards all did (figure 1c)

    def in_words(self) -> str:
        rates = (f"{' / '.join(f'{share:.1%}' for share in shares)} at {way}" for way, shares in self.same.items())
        return f"{self.when} training, {self.texts}: the target's token by forward {', '.join(rates)}"


def measure_accuracy(
    when: str, step: int, target: TargetModel, model: GriffinModel, texts: list[TextFeatures]
) -> Iterator[GriffinAccuracyRecord]:
    """Accuracy along texts, a record for each name among them."""
    for name, named in groupby(texts, key=lambda text: text.name):
        same = torch.cat([same_tokens(target, model, text, seed) for seed, text in enumerate(named)], dim=-1)
        yield _record(when, step, name, same)


def _record(when: str, step: int, name: str, same: torch.Tensor) -> GriffinAccuracyRecord:
    """`same [2 ways, 2, num_forwards, num_rows]`, see `same_tokens`."""
    shares, rates = {}, {}
    for way, (right, reached) in zip(WAYS, same, strict=True):
        shares[way] = _rounded(right.float().mean(dim=1))
        rates[way] = _rounded((reached & ~right).sum(dim=1) / reached.sum(dim=1).clamp(min=1))
    return GriffinAccuracyRecord(when, step, name, same.shape[-1], shares, rates)


def _rounded(rates: torch.Tensor) -> list[float]:
    return [round(rate, 4) for rate in rates.tolist()]


@torch.no_grad()
def same_tokens(target: TargetModel, model: GriffinModel, text: TextFeatures, seed: int) -> torch.Tensor:
    """Compare each row of a text with the target, for each way of drawing and each forward.

    `[2 ways, 2, num_forwards, num_rows] bool`: whether its token is the target's, and whether a draft whose tokens all
    are the target's reaches it; rows behind the prompt that have drafts of all forwards.
    """
    noise = GumbelNoise(seed, target.vocab_size, target.device)
    first, parts = 0, []
    for windows, new in windows_in_use(text, target.device):
        with torch.autocast(target.device.type, dtype=torch.bfloat16):
            embeddings = target.model.get_input_embeddings()(windows.token_ids)
            passes = forward_passes(model, embeddings, windows, NUM_FORWARDS)
        rows = torch.arange(max(0, new - NUM_FORWARDS), windows.token_ids.shape[1])  # new ones, drafts that reach them
        right = _same_in_rows(target, windows, passes, noise, rows, first - new)
        reached = torch.ones_like(right)
        for forward in range(1, NUM_FORWARDS):
            reached[:, forward] = (right & reached)[:, forward - 1].roll(1, dims=-1)
        counted = passes[-1].has_draft[0, rows] & (rows >= max(new, text.first_row - first + new)).to(target.device)
        parts.append(torch.stack([right, reached], dim=1)[..., counted].cpu())
        first += windows.token_ids.shape[1] - new
    return torch.cat(parts, dim=-1)


def _same_in_rows(
    target: TargetModel, windows: Windows, passes: list[Pass], noise: GumbelNoise, rows: torch.Tensor, offset: int
) -> torch.Tensor:
    """Tell whether both draw the same token at each row of one window: `[2 ways, num_forwards, num_rows] bool`.

    `offset`: how far these rows' positions in the text are behind their entries.
    """
    same = []
    for part in rows.split(max(1, NUM_LOGITS // target.vocab_size)):
        gumbel = torch.stack([noise.row(offset + row + 1) for row in part.tolist()])  # [num_rows, vocab]
        said = _drawn(target.logits(windows.features[0, part]), gumbel)
        drafted = [_drawn(target.logits(output.predicted[0, part].to(target.dtype)), gumbel) for output in passes]
        same.append(torch.stack([tokens == said for tokens in drafted], dim=1))
    return torch.cat(same, dim=-1)


def _drawn(logits: torch.Tensor, gumbel: torch.Tensor) -> torch.Tensor:
    """Tokens drawn from `logits [num_rows, vocab] float32` at T = 0 and T = 1: `[2 ways, num_rows]`."""
    return torch.stack([logits.argmax(dim=-1), (logits + gumbel).argmax(dim=-1)])
