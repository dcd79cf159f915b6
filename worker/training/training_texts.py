"""Texts for trainings: books on disk, and texts sampled from the target, with its hidden states."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from rich.progress import Progress, track

from swiftbatch.jobs.errors import ModelError, UserError
from swiftbatch.jobs.sampling_params import MAX_SEED, SamplingParams
from swiftbatch.worker.drafters.catalogue import create_drafter
from swiftbatch.worker.engine.engine import Engine
from swiftbatch.worker.forward.hardware import resolve_device
from swiftbatch.worker.forward.step_costs import measure_step_costs
from swiftbatch.worker.forward.target_model import TargetModel, check_model, load_transformers
from swiftbatch.worker.kv.gpu_memory_plan import SlotsWanted
from swiftbatch.worker.model.model_files import ModelFiles
from swiftbatch.worker.sampling.sequence import Sequence
from swiftbatch.worker.text.tokenizer import TextCodec
from swiftbatch.worker.training.recipes import LEARNED_SAMPLING, OWN_SAMPLING, HeadRecipe

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

JUMP_SHARE = 1 / 3  # share of windows made of a text's first tokens and a later stretch


class CorpusError(UserError):
    """Data folder without readable books."""


def read_books(data: Path, pattern: str = "*train*.jsonl") -> Iterator[str]:
    """Yield the `text` of each record of the JSONL files under `data` that match `pattern`, in file order.

    Raises CorpusError for records without `text`, and if there is no text at all.
    """
    paths = [data] if data.is_file() else sorted(data.rglob(pattern))
    if not paths:
        raise CorpusError(f"{data}: no file matches {pattern}; expected JSONL records with a `text` field")
    num_characters = 0
    for path in paths:
        with path.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                text = _text_of(path, number, line)
                num_characters += len(text)
                yield text
    if not num_characters:
        raise CorpusError(f"{data}: the files that match {pattern} hold no text; expected records with a `text` field")


def _text_of(path: Path, number: int, line: bytes) -> str:
    try:
        text = json.loads(line)["text"]
    except (ValueError, KeyError, TypeError) as error:
        raise CorpusError(f"{path}, line {number}: expected a JSON object with `text`: {error}") from error
    if not isinstance(text, str):
        raise CorpusError(f"{path}, line {number}, text: found {type(text).__name__}, expected a string")
    return text


def encode_books(books: list[str], tokenizer: PreTrainedTokenizerFast) -> list[np.ndarray]:
    """Encode each book to ids `[num_tokens] uint16`, without the first token of every text."""
    encoded = tokenizer(books, add_special_tokens=False, return_attention_mask=False)["input_ids"]
    return [np.asarray(ids, dtype=np.uint16) for ids in encoded]


def jumping_positions(random: np.random.Generator, num_tokens: int, length: int, num_sinks: int) -> np.ndarray:
    """Return positions `[length]` of a text, sometimes with its first tokens before a gap."""
    num_sinks = num_sinks if random.random() < JUMP_SHARE else 0
    start = random.integers(num_sinks, num_tokens - length + num_sinks + 1)
    return np.concatenate([np.arange(num_sinks), np.arange(start, start + length - num_sinks)])


# Texts for decoding heads, of books or the target's own, with its hidden states.


CHARACTERS_PER_TOKEN = 16  # upper bound for running text, which limits how much of a book is encoded
NUM_AT_A_TIME = 32  # rows of a forward on a CPU; a GPU has twice as many


@dataclass(frozen=True)
class Text:
    """Token ids, and the first row to learn from, after a prompt."""

    token_ids: list[int]
    first_row: int = 0


@dataclass(frozen=True)
class TextStates:
    """Concatenated texts, and the rows after which every head has a token to predict."""

    token_ids: torch.Tensor  # [num_tokens]
    hidden: torch.Tensor  # [num_tokens, hidden], in the target's dtype and on the CPU
    rows: torch.Tensor  # [num_rows]


def load_target(files: ModelFiles) -> TargetModel:
    target = TargetModel(load_transformers(files, torch.bfloat16, resolve_device("auto")), files)
    check_model(target)
    target.model.set_attn_implementation("sdpa")
    return target


def training_states(target: TargetModel, data: Path, recipe: HeadRecipe) -> TextStates:
    """Return states of the starts of training books, or of the target's own texts."""
    texts = book_texts(data, "*train*.jsonl", target.files, recipe.num_book_tokens, recipe.num_needed_tokens)
    if recipe.num_own_texts:
        texts = learned_texts(target, texts, recipe)
    return text_states(target, texts, recipe.num_heads)


def held_out_texts(
    target: TargetModel, data: Path, recipe: HeadRecipe, report: Callable[[str], None]
) -> dict[str, list[Text]]:
    """Return test books, and the target's texts after their starts, by name; empty without test books."""
    if not any(data.rglob("*test*.jsonl")):
        report(f"{data}: no *test*.jsonl; the accuracy is not measured")
        return {}
    books = book_texts(data, "*test*.jsonl", target.files, recipe.num_book_tokens, recipe.num_needed_tokens)
    beginnings = [Text(book.token_ids[: recipe.num_prompt_tokens]) for book in books]
    prompts = _stretches(beginnings, recipe.num_prompt_tokens, first_ids_of(target.files))
    own = {
        f"own text, {name}": own_texts(target, prompts, recipe.own_sampling(sampling))
        for name, sampling in OWN_SAMPLING.items()
    }
    return {"test books": books, **own}


def book_texts(data: Path, pattern: str, files: ModelFiles, num_tokens: int, num_needed: int) -> list[Text]:
    """Return the first `num_tokens` tokens of each book with `num_needed`. Raises CorpusError if none has."""
    codec = TextCodec(files)
    encoded = [codec.encode(book[: num_tokens * CHARACTERS_PER_TOKEN]) for book in read_books(data, pattern)]
    texts = [Text(token_ids[:num_tokens]) for token_ids in encoded if len(token_ids) >= num_needed]
    if not texts:
        longest = max(map(len, encoded), default=0)
        raise CorpusError(
            f"{data}: the books in {pattern} are too short, the longest has {longest} tokens; "
            f"expected {num_needed} or more in at least one"
        )
    return texts


def own_texts(target: TargetModel, prompts: list[list[int]], sampling: SamplingParams) -> list[Text]:
    """Sample `sampling.max_tokens` tokens after each prompt; an end token does not stop them."""
    said = sampled_texts(target.files, target.device.type, prompts, sampling)
    return [Text(token_ids, len(prompt) - 1) for prompt, token_ids in zip(prompts, said, strict=True)]


def text_states(target: TargetModel, texts: list[Text], num_heads: int) -> TextStates:
    """Run the target over texts, one forward each."""
    token_ids, hidden, rows = [], [], []
    start = 0
    for text in track(texts, "hidden states", transient=True):
        kept = torch.tensor(text.token_ids[text.first_row :])
        token_ids.append(kept)
        hidden.append(hidden_states(target, text.token_ids)[text.first_row :].cpu())
        rows.append(torch.arange(start, start + max(0, len(kept) - num_heads - 1)))
        start += len(kept)
    return TextStates(torch.cat(token_ids), torch.cat(hidden), torch.cat(rows))


def learned_texts(target: TargetModel, books: list[Text], recipe: HeadRecipe) -> list[Text]:
    """Sample own texts after random stretches of books, equally for each way of sampling."""
    stretches = _stretches(books, recipe.num_prompt_tokens, first_ids_of(target.files))
    drawn = np.random.default_rng(recipe.seed).integers(len(stretches), size=recipe.num_own_texts)
    texts: list[Text] = []
    for number, sampling in enumerate(LEARNED_SAMPLING):
        prompts = [stretches[index] for index in drawn[number :: len(LEARNED_SAMPLING)]]
        texts += own_texts(target, prompts, recipe.own_sampling(sampling, number))
    return texts


def first_ids_of(files: ModelFiles) -> list[int]:
    """Return the tokens with which all texts of a model start."""
    return TextCodec(files).encode("")


def _stretches(books: list[Text], length: int, first_ids: list[int]) -> list[list[int]]:
    """Return consecutive stretches of `length` tokens, or shorter ones if no book is that long."""
    bodies = [book.token_ids[len(first_ids) :] for book in books]
    length = min(length, len(first_ids) + max(map(len, bodies))) - len(first_ids)
    return [
        [*first_ids, *body[start : start + length]]
        for body in bodies
        for start in range(0, len(body) - length + 1, length)
    ]


@torch.inference_mode()
def hidden_states(target: TargetModel, token_ids: list[int]) -> torch.Tensor:
    """Return the final hidden states of one text, `[num_tokens, hidden]`."""
    ids = torch.tensor([token_ids], device=target.device)
    hidden: torch.Tensor = target.model.model(input_ids=ids, use_cache=False).last_hidden_state[0]
    return hidden


def sampled_texts(
    files: ModelFiles, device: str, prompts: list[list[int]], sampling: SamplingParams
) -> list[list[int]]:
    """Return prompts with `sampling.max_tokens` sampled tokens, by the model in bf16; end tokens do not stop them.

    Each text has its own noise. Raises ModelError for logits from which nothing can be drawn.
    """
    longest = max(map(len, prompts)) + sampling.max_tokens
    slots = SlotsWanted(longest_job=longest, num_slots=min(NUM_AT_A_TIME, len(prompts)))
    target = TargetModel.load(files, "bfloat16", device, slots=slots)
    engine = Engine(target, create_drafter("autoregressive", target, partial(measure_step_costs, target)))
    sequences = [
        Sequence(f"{number}", prompt, _of_one(sampling, number), target.vocab_size, target.device)
        for number, prompt in enumerate(prompts)
    ]
    waiting = deque(sequences)
    with Progress(transient=True) as progress:
        task = progress.add_task("own texts", total=len(prompts) * sampling.max_tokens)
        while waiting or engine.sequences:
            while waiting and len(engine.sequences) < NUM_AT_A_TIME:
                engine.start(waiting.popleft())
            engine.step()
            for sequence in [each for each in engine.sequences if each.finish_reason is not None]:
                engine.stop(sequence)
                if sequence.error is not None:
                    raise ModelError(f"model {files.name}: {sequence.error}")
            progress.update(task, completed=engine.counters.num_generation_tokens)
    return [sequence.token_ids.tolist() for sequence in sequences]


def _of_one(sampling: SamplingParams, number: int) -> SamplingParams:
    """Return one text's parameters, with its own seed."""
    seed = ((sampling.seed or 0) << 32) + number & MAX_SEED
    return sampling.model_copy(update={"seed": seed, "ignore_eos": True})
