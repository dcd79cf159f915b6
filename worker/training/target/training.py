"""Training of a small target model from scratch: `swiftbatch train target`."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

import torch
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from torch.nn.functional import cross_entropy
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from worker.target.finite import check_loss
from worker.training.card import write_card
from worker.training.corpus import WindowSampler, encode_books, read_books
from worker.training.target.evaluate import evaluate_target
from worker.training.target.recipe import VOCAB_SIZE, Phase, Recipe, embedded_config
from worker.training.target.tokenizer import train_tokenizer

NUM_TEST_STRETCHES = 4


@dataclass(frozen=True)
class StepRecord:
    """One optimiser step, as the training log keeps it."""

    phase: str
    step: int
    num_tokens: int
    loss: float
    seconds: float


def train_target(data: Path, output: Path, recipe: Recipe, report: Callable[[str], None]) -> None:
    """Train tokenizer and model on the books under `data`; write both, and the log, to `output` after every phase.

    Where `data` holds a test file (`*test*.jsonl`), the model is scored on it, and its card is written beside it.
    """
    books = list(read_books(data))
    tokenizer = train_tokenizer(books, VOCAB_SIZE)
    encoded = encode_books(books, tokenizer)
    torch.manual_seed(recipe.seed)
    model = LlamaForCausalLM(embedded_config(tokenizer.eos_token_id))
    report(f"{len(books)} books, {sum(map(len, encoded)):,} tokens; {model.num_parameters():,} parameters")
    output.mkdir(parents=True, exist_ok=True)
    sampler = WindowSampler(encoded, recipe.seed)
    with (output / "train_log.jsonl").open("w", encoding="utf-8") as log:
        for phase, records in run_phases(model, recipe, lambda phase: _add_gradients(model, sampler, phase)):
            for record in records:
                write_record(log, record)
            save_target(model, tokenizer, output)
            report(f"phase {phase.name}: loss {record.loss:.3f}, {record.num_tokens:,} tokens, {record.seconds:,.0f} s")
    counts = {
        "num_parameters": model.num_parameters(),
        "num_books": len(books),
        "num_characters": sum(map(len, books)),
        "num_corpus_tokens": sum(map(len, encoded)),
    }
    for test_file in sorted(data.rglob("*test*.jsonl"))[:1]:
        evaluation = evaluate_target(output, test_file, max_stretches=NUM_TEST_STRETCHES)
        write_card(output, recipe, model.config, counts, evaluation)
        report(f"{evaluation.bits_per_byte:.3f} bits per byte; loss by position {evaluation.loss_by_position}")


def write_record(log: IO[str], record: Any) -> None:
    """Append a dataclass to a training log, where it can be read at once."""
    log.write(json.dumps(asdict(record)) + "\n")
    log.flush()


def write_measured(log: IO[str], records: Iterable[Any], report: Callable[[str], None]) -> None:
    """Append what was measured to a training log, and tell of it."""
    for record in records:
        write_record(log, record)
        report(record.in_words())


def run_phases(
    model: LlamaForCausalLM, recipe: Recipe, add_gradients: Callable[[Phase], float]
) -> Iterator[tuple[Phase, Iterator[StepRecord]]]:
    """Yield each phase with the lazy stream of its steps; consuming the stream trains the model.

    `add_gradients` adds those of one step's batch to the model's, and returns its loss in nats per token.
    """
    optimizers = make_optimizers(model, recipe)
    num_steps = sum(phase.num_steps for phase in recipe.phases)
    schedule = rate_schedule(recipe, num_steps)
    schedulers = [torch.optim.lr_scheduler.LambdaLR(optimizer, schedule) for optimizer in optimizers]
    state = _Clock(start=time.monotonic())
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("loss {task.fields[loss]:.3f}"))
    with Progress(*columns, TimeRemainingColumn()) as progress:
        task = progress.add_task("training", total=num_steps, loss=float("nan"))

        def steps(phase: Phase) -> Iterator[StepRecord]:
            for _ in range(phase.num_steps):
                loss = add_gradients(phase)
                check_loss(state.step + 1, loss)
                torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.gradient_clip)
                for optimizer, scheduler in zip(optimizers, schedulers, strict=True):
                    optimizer.step()
                    optimizer.zero_grad(set_to_none=True)
                    scheduler.step()
                progress.update(task, advance=1, loss=loss, description=phase.name)
                yield state.record(phase, loss)

        for phase in recipe.phases:
            yield phase, steps(phase)


@dataclass
class _Clock:
    """Counts steps and tokens over the phases."""

    start: float
    step: int = 0
    num_tokens: int = 0

    def record(self, phase: Phase, loss: float) -> StepRecord:
        self.step += 1
        self.num_tokens += phase.length * phase.batch_size
        return StepRecord(phase.name, self.step, self.num_tokens, loss, round(time.monotonic() - self.start, 2))


def _add_gradients(model: LlamaForCausalLM, sampler: WindowSampler, phase: Phase) -> float:
    """Add the gradients of a fresh batch and return its loss in nats per token."""
    windows = sampler.batch(phase.batch_size, phase.length).to(model.device)  # [batch, length + 1]
    positions = sampler.positions(phase.batch_size, phase.length, phase.position_span).to(model.device)
    with torch.autocast(model.device.type, dtype=torch.bfloat16):
        hidden = model.model(
            input_ids=windows[:, :-1],
            position_ids=positions,
            # An explicit mask: without it, a gap in the positions would be taken for a packed sequence.
            attention_mask=torch.ones_like(windows[:, :-1]),
            use_cache=False,
        ).last_hidden_state
        logits = model.lm_head(hidden)  # [batch, length, vocab]
    loss = cross_entropy(logits.flatten(0, 1).float(), windows[:, 1:].flatten())
    loss.backward()
    return float(loss.detach())


def make_optimizers(model: LlamaForCausalLM, recipe: Recipe) -> list[torch.optim.Optimizer]:
    """Muon (Jordan et al. 2024) for the layers' matrices, AdamW for the embedding and the norms."""
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "layers" in name]
    others = [p for name, p in model.named_parameters() if p.ndim != 2 or "layers" not in name]
    return [
        torch.optim.Muon(
            matrices, lr=recipe.learning_rate, weight_decay=recipe.weight_decay, adjust_lr_fn="match_rms_adamw"
        ),
        torch.optim.AdamW(others, lr=recipe.embedding_learning_rate, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def rate_schedule(recipe: Recipe, num_steps: int) -> Callable[[int], float]:
    """Warm up, stay, and fall linearly over the last `decay_share` of the steps."""

    def rate(step: int) -> float:
        warm = min(1.0, (step + 1) / recipe.num_warmup_steps)
        left = (num_steps - step) / max(1.0, recipe.decay_share * num_steps)
        return warm * (recipe.final_rate + (1 - recipe.final_rate) * min(1.0, left))

    return rate


def save_target(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, output: Path) -> None:
    """Write the model in bf16 as safetensors, its config and its tokenizer."""
    state = {name: tensor.to(torch.bfloat16) for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    model.save_pretrained(output, state_dict=state)
    config = json.loads((output / "config.json").read_text())
    config["dtype"] = "bfloat16"
    (output / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    tokenizer.save_pretrained(output)
