"""Training of GRIFFIN's draft model for a frozen target: `swiftbatch train griffin`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from itertools import groupby
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch.nn.functional import cross_entropy
from transformers import AttentionInterface, PreTrainedConfig

from swiftbatch.worker.drafters.catalogue import refuse_unused_part
from swiftbatch.worker.drafters.griffin.griffin_model import GriffinConfig, GriffinModel, save_griffin
from swiftbatch.worker.forward.target_model import TargetModel
from swiftbatch.worker.model.model_files import GRIFFIN_FILE, locate_model
from swiftbatch.worker.sampling.noise import GumbelNoise
from swiftbatch.worker.training.data_parallel import Report, sum_gradients, total
from swiftbatch.worker.training.feature_files import FOLDER, TextFeatures
from swiftbatch.worker.training.feature_windows import (
    FeatureWindowSource,
    GriffinFeatures,
    Windows,
    griffin_features,
    windows_in_use,
)
from swiftbatch.worker.training.recipes import GriffinRecipe, Labels
from swiftbatch.worker.training.training_folder import TrainingFiles, TrainingFolder, held
from swiftbatch.worker.training.training_loop import PartTraining, Step, train_part
from swiftbatch.worker.training.training_texts import load_target

PASSES_ATTENTION = "swiftbatch_griffin_passes"
NUM_LOGITS = 2**21  # logits per part, which limits memory for any vocabulary


@dataclass(frozen=True)
class Pass:
    predicted: torch.Tensor  # [num_windows, length, hidden], for the language model head
    regressed: torch.Tensor  # [num_windows, length, hidden], replaces the target's features at these rows
    has_draft: torch.Tensor  # [num_windows, length] bool: enough rows precede it for a draft of this pass


@dataclass
class PassKeys:
    """Keys and values `[num_windows, num_kv_heads, length, head_dim]` of each pass so far."""

    keys: list[torch.Tensor] = field(default_factory=list)
    values: list[torch.Tensor] = field(default_factory=list)


def forward_passes(model: GriffinModel, embeddings: torch.Tensor, windows: Windows, num_passes: int) -> list[Pass]:
    """Run the passes 1 to `num_passes`; `embeddings [num_windows, length, hidden]` of the windows' tokens.

    Rows without enough preceding rows have meaningless outputs, on which no other row depends.
    """
    model.set_attention(PASSES_ATTENTION)
    entries, passes = windows.entries(), PassKeys()
    inputs, outputs = windows.inputs.to(embeddings.dtype), list[Pass]()
    for number in range(1, num_passes + 1):
        predicted, regressed = model(inputs, embeddings, entries, passes=passes)
        outputs.append(Pass(predicted, regressed, windows.num_before >= number - 1))
        inputs = regressed.roll(1, dims=1)  # the wrapped row has no draft
    return outputs


def attend_to_passes(
    module: torch.nn.Module,
    query: torch.Tensor,  # [num_windows, num_heads, length, head_dim]
    key: torch.Tensor,  # [num_windows, num_kv_heads, length, head_dim]
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    passes: PassKeys,
    scaling: float,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Attend from row p of pass n to rows 0 .. p - n + 1 of pass 1, and to row p - n + s of each pass s = 2 .. n.

    Returns `[num_windows, length, num_heads, head_dim]`.
    """
    passes.keys.append(key)
    passes.values.append(value)
    number, length = len(passes.keys), key.shape[2]
    grouped = query.unflatten(1, (key.shape[1], -1))  # [num_windows, num_kv_heads, group, length, head_dim]
    scores = [_hidden_behind(grouped @ passes.keys[0][:, :, None].mT, number)]
    scores += [(grouped * _moved(keys, number - s)).sum(-1, keepdim=True) for s, keys in _later(passes.keys)]
    weights = (torch.cat(scores, dim=-1).float() * scaling).softmax(dim=-1).to(value.dtype)
    output = weights[..., :length] @ passes.values[0][:, :, None]
    for s, values in _later(passes.values):
        output = output + weights[..., length + s - 2, None] * _moved(values, number - s)
    return output.flatten(1, 2).transpose(1, 2), None


def _hidden_behind(scores: torch.Tensor, number: int) -> torch.Tensor:
    """Mask rows of pass 1 that a row's draft in pass `number` lacks: `[..., length, length]`."""
    length = scores.shape[-1]
    seen = torch.ones(length, length, dtype=torch.bool, device=scores.device).tril(1 - number)
    return scores.masked_fill(~seen, float("-inf"))


def _later(tensors: list[torch.Tensor]) -> list[tuple[int, torch.Tensor]]:
    return list(enumerate(tensors[1:], start=2))


def _moved(tensor: torch.Tensor, num_rows: int) -> torch.Tensor:
    """Move row p - `num_rows` to row p: `[num_windows, num_kv_heads, 1, length, head_dim]`."""
    return tensor.roll(num_rows, dims=2)[:, :, None]


AttentionInterface.register(PASSES_ATTENTION, attend_to_passes)


def accumulate_gradients(
    model: GriffinModel, target: TargetModel, windows: Windows, recipe: GriffinRecipe
) -> tuple[list[float], list[float]]:
    """Add the gradients of all passes' losses; return each pass's loss and share of aligned rows.

    A pass counts rows whose draft had each token among the `align_top_k` best.
    """
    with torch.autocast(target.device.type, dtype=torch.bfloat16):
        embeddings = target.model.get_input_embeddings()(windows.token_ids)
        passes = forward_passes(model, embeddings, windows, recipe.num_passes)
    aligned = torch.ones_like(windows.token_ids, dtype=torch.bool)  # [num_windows, length]
    num_all = total((windows.num_before >= 0).sum())
    losses, shares, roots, gradients = [], [], [], []
    for output in passes:
        counted = aligned & output.has_draft
        if recipe.labels == "hard":
            counted &= windows.has_next()
        num_counted = total(counted.sum())
        num_rows = num_counted.clamp(min=1)
        tokens, gradient, ranks = token_loss(target, output.predicted, windows, counted, recipe.labels)
        distances = (output.regressed.float() - windows.features.float()).abs().mean(dim=-1)  # [num_windows, length]
        distance = recipe.feature_weight * distances[counted].sum() / num_rows
        roots += [output.predicted, distance]
        gradients += [gradient / num_rows, torch.ones_like(distance)]
        losses.append(round(float(total(tokens / num_rows + distance.detach())), 4))
        shares.append(round(float(num_counted / num_all), 4))
        if recipe.align_top_k is not None:
            aligned = (counted & (ranks < recipe.align_top_k)).roll(1, dims=1)  # the wrapped row has no draft
    torch.autograd.backward(roots, gradients)
    return losses, shares


def token_loss(
    target: TargetModel, predicted: torch.Tensor, windows: Windows, counted: torch.Tensor, labels: Labels = "soft"
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the cross entropy with the labels over rows in `counted [num_windows, length]`.

    Also returns its gradient for `predicted [num_windows, length, hidden]`, and the rank of the text's next token,
    `[num_windows, length]`.
    """
    states, features = predicted.detach().flatten(0, 1), windows.features.flatten(0, 1)
    next_ids = windows.token_ids.roll(-1, dims=1).flatten()
    total, gradient, ranks = states.new_zeros((), dtype=torch.float32), torch.zeros_like(states), next_ids.clone()
    for rows in counted.flatten().nonzero()[:, 0].split(max(1, NUM_LOGITS // target.vocab_size)):
        state = states[rows].requires_grad_()
        logits = target.model.get_output_embeddings()(state.to(target.dtype)).float()  # [num_rows, vocab]
        expected = next_ids[rows] if labels == "hard" else target.logits(features[rows]).softmax(dim=-1)
        loss = cross_entropy(logits, expected, reduction="sum")
        [gradient[rows]] = torch.autograd.grad(loss, state)
        total += loss.detach()
        ranks[rows] = (logits > logits.gather(1, next_ids[rows, None])).sum(dim=1)
    return total, gradient.view_as(predicted), ranks.view_as(counted)


# Share of a GRIFFIN draft's forwards with the target's token: greedily, and with the same noise.


NUM_FORWARDS = 6  # the depth of a draft tree
WAYS = ("T 0", "T 1")


@dataclass(frozen=True)
class GriffinAccuracyRecord:
    """Log record of each forward's accuracy along held-out texts; rates by way of sampling, then by forward."""

    when: str  # "before", "during" or "after"
    step: int
    texts: str
    num_rows: int  # number of rows that have drafts of all forwards
    same: dict[str, list[float]]  # rows where draft model and target draw the same token after the text
    # rows where they differ, among those whose earlier forwards all agreed (figure 1c)
    misaligned: dict[str, list[float]]

    def in_words(self) -> str:
        rates = (f"{' / '.join(f'{share:.1%}' for share in shares)} at {way}" for way, shares in self.same.items())
        return f"{self.when} training, {self.texts}: the target's token by forward {', '.join(rates)}"


def measure_accuracy(
    when: str, step: int, target: TargetModel, model: GriffinModel, texts: list[TextFeatures]
) -> Iterator[GriffinAccuracyRecord]:
    """Yield a record of accuracy for each name of texts."""
    for name, named in groupby(texts, key=lambda text: text.name):
        same = torch.cat([same_tokens(target, model, text, seed) for seed, text in enumerate(named)], dim=-1)
        yield _record(when, step, name, same)


def _record(when: str, step: int, name: str, same: torch.Tensor) -> GriffinAccuracyRecord:
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

    Returns `[2 ways, 2, num_forwards, num_rows] bool`: whether its token is the target's, and whether a fully right
    draft reaches it.
    """
    noise = GumbelNoise(seed, target.vocab_size, target.device)
    first, parts = 0, []
    for windows, new in windows_in_use(text, target.device):
        with torch.autocast(target.device.type, dtype=torch.bfloat16):
            embeddings = target.model.get_input_embeddings()(windows.token_ids)
            passes = forward_passes(model, embeddings, windows, NUM_FORWARDS)
        # new rows, and earlier ones whose drafts reach them
        rows = torch.arange(max(0, new - NUM_FORWARDS), windows.token_ids.shape[1])
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
    """Return whether both draw the same token, `[2 ways, num_forwards, num_rows] bool`.

    `offset` is the rows' position minus their entry.
    """
    same = []
    for part in rows.split(max(1, NUM_LOGITS // target.vocab_size)):
        gumbel = torch.stack([noise.row(offset + row + 1) for row in part.tolist()])  # [num_rows, vocab]
        said = _drawn(target.logits(windows.features[0, part]), gumbel)
        drafted = [_drawn(target.logits(output.predicted[0, part].to(target.dtype)), gumbel) for output in passes]
        same.append(torch.stack([tokens == said for tokens in drafted], dim=1))
    return torch.cat(same, dim=-1)


def _drawn(logits: torch.Tensor, gumbel: torch.Tensor) -> torch.Tensor:
    """Return tokens drawn at T = 0 and T = 1, `[2 ways, num_rows]`."""
    return torch.stack([logits.argmax(dim=-1), (logits + gumbel).argmax(dim=-1)])


FILES = TrainingFiles("griffin_log.jsonl", "griffin_state.pt", GRIFFIN_FILE, "griffin_training.png")
NUM_CURVE_TEXTS = 2  # the curve uses the first texts of the first name


def train_griffin(
    model: str, data: Path, output: Path, recipe: GriffinRecipe, report: Report, features: Path | None = None
) -> None:
    """Train a draft model on books under `data` and own texts; write it, its log and a plot to `output`.

    A killed training resumes to the same weights. A finished training is kept. Raises ModelError and CorpusError.
    """
    files = locate_model(model)
    refuse_unused_part("griffin", files.name, files.path)
    with held(output):
        folder = griffin_folder(output, files.fingerprint, recipe)
        if folder.is_finished(report):
            return
        target = load_target(files)
        texts = griffin_features(target, data, features or output / FOLDER, recipe, report)
        torch.manual_seed(recipe.seed)
        draft = GriffinModel(config_of(recipe, target.model.config)).to(target.device)
        run_training(draft, target, texts, recipe, folder, report)


def config_of(recipe: GriffinRecipe, target: PreTrainedConfig) -> GriffinConfig:
    config = replace(
        GriffinConfig.for_target(target),
        fusion=recipe.fusion,
        has_token_enhanced_head=recipe.has_token_enhanced_head,
    )
    return config if recipe.expansion_size is None else replace(config, expansion_size=recipe.expansion_size)


def griffin_folder(path: Path, model_fingerprint: str, recipe: GriffinRecipe) -> TrainingFolder:
    return TrainingFolder(path, FILES, {"model": model_fingerprint, "recipe": asdict(recipe)})


def run_training(
    draft: GriffinModel,
    target: TargetModel,
    texts: GriffinFeatures,
    recipe: GriffinRecipe,
    folder: TrainingFolder,
    report: Report,
) -> None:
    optimizer = torch.optim.AdamW(draft.parameters(), betas=recipe.betas, weight_decay=recipe.weight_decay, fused=True)
    source = FeatureWindowSource(texts.books, texts.own, recipe)

    def take_step(step: int) -> Step:
        for group in optimizer.param_groups:
            group["lr"] = recipe.learning_rate(step, draft.config.hidden_size)
        losses, aligned = accumulate_gradients(draft, target, source.windows(step, target.device), recipe.at(step))
        sum_gradients(draft)
        torch.nn.utils.clip_grad_value_(draft.parameters(), recipe.clip_value)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return Step("griffin", fmean(losses), {"losses": losses, "aligned": aligned})

    def measure(when: str, step: int) -> Iterator[GriffinAccuracyRecord]:
        held_out = texts.held_out[:NUM_CURVE_TEXTS] if when == "during" else texts.held_out
        return measure_accuracy(when, step, target, draft, held_out)

    def save() -> None:
        save_griffin(folder.path, draft, target.files.fingerprint)

    train_part(folder, PartTraining(draft, optimizer, recipe.num_steps, take_step, measure, save), report)
