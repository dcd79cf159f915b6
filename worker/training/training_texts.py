"""Texts for trainings: books on disk, and texts sampled from the target, with its hidden states."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from rich.progress import Progress

from swiftbatch.jobs.errors import ModelError
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
from swiftbatch.worker.training.corpus import TEST, CorpusError, encoded_records
from swiftbatch.worker.training.data_parallel import Report
from swiftbatch.worker.training.recipes import LEARNED_SAMPLING, OWN_SAMPLING, TextRecipe

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

JUMP_SHARE = 1 / 3  # share of windows made of a text's first tokens and a later stretch


def encode_books(books: list[str], tokenizer: PreTrainedTokenizerFast) -> list[np.ndarray]:
    """Encode each book to ids `[num_tokens] uint16`, without the first token of every text."""
    encoded = tokenizer(books, add_special_tokens=False, return_attention_mask=False)["input_ids"]
    return [np.asarray(ids, dtype=np.uint16) for ids in encoded]


def jumping_positions(random: np.random.Generator, num_tokens: int, length: int, num_sinks: int) -> np.ndarray:
    """Return positions `[length]` of a text, sometimes with its first tokens before a gap."""
    num_sinks = num_sinks if random.random() < JUMP_SHARE else 0
    start = random.integers(num_sinks, num_tokens - length + num_sinks + 1)
    return np.concatenate([np.arange(num_sinks), np.arange(start, start + length - num_sinks)])


NUM_AT_A_TIME = 32  # rows of a forward on a CPU; a GPU has twice as many


@dataclass(frozen=True)
class Text:
    """Token ids, and the first row to learn from, after a prompt."""

    token_ids: list[int]
    first_row: int = 0


NamedText = tuple[str, Text]


def load_target(files: ModelFiles) -> TargetModel:
    target = TargetModel(load_transformers(files, torch.bfloat16, resolve_device("auto")), files)
    check_model(target)
    target.model.set_attn_implementation("sdpa")
    return target


def held_out_texts(
    target: TargetModel, data: Path, recipe: TextRecipe, num_needed: int, report: Report
) -> Iterator[NamedText]:
    """Yield test books of `num_needed` tokens or more, and the target's texts after their starts, with names."""
    beginnings = []
    for book in book_texts(data, TEST, target.files, recipe.num_book_tokens, num_needed, report):
        beginnings.append(np.asarray(book.token_ids[: recipe.num_prompt_tokens]))
        yield "test books", book
    stretches = Stretches(beginnings, recipe.num_prompt_tokens, first_ids_of(target.files))
    prompts = [stretches[index] for index in range(len(stretches))]
    for name, sampling in OWN_SAMPLING.items():
        for text in own_texts(target, prompts, recipe.own_sampling(sampling)):
            yield f"own text, {name}", text


def book_texts(
    data: Path, pattern: str, files: ModelFiles, num_tokens: int, num_needed: int, report: Report
) -> Iterator[Text]:
    """Yield the first `num_tokens` tokens of each book or chat with `num_needed`. Raises CorpusError if none has."""
    longest = 0
    for token_ids in encoded_records(data, pattern, TextCodec(files), num_tokens, report):
        longest = max(longest, len(token_ids))
        if len(token_ids) >= num_needed:
            yield Text(token_ids)
    if longest < num_needed:
        raise CorpusError(
            f"{data}: the books in {pattern} are too short, the longest has {longest} tokens; "
            f"expected {num_needed} or more in at least one"
        )


def own_texts(target: TargetModel, prompts: list[list[int]], sampling: SamplingParams) -> list[Text]:
    """Sample `sampling.max_tokens` tokens after each prompt; an end token does not stop them."""
    said = sampled_texts(target.files, target.device.type, prompts, sampling)
    return [Text(token_ids, len(prompt) - 1) for prompt, token_ids in zip(prompts, said, strict=True)]


def learned_texts(target: TargetModel, books: list[np.ndarray], recipe: TextRecipe) -> Iterator[Text]:
    """Sample own texts after random stretches of books, equally for each way of sampling."""
    stretches = Stretches(books, recipe.num_prompt_tokens, first_ids_of(target.files))
    drawn = np.random.default_rng(recipe.seed).integers(len(stretches), size=recipe.num_own_texts)
    for number, sampling in enumerate(LEARNED_SAMPLING):
        prompts = [stretches[index] for index in drawn[number :: len(LEARNED_SAMPLING)].tolist()]
        yield from own_texts(target, prompts, recipe.own_sampling(sampling, number))


def first_ids_of(files: ModelFiles) -> list[int]:
    """Return the tokens with which all texts of a model start."""
    return TextCodec(files).encode("")


class Stretches:
    """Consecutive stretches of `length` tokens of books, or shorter ones if no book is that long."""

    def __init__(self, books: list[np.ndarray], length: int, first_ids: list[int]) -> None:
        sizes = np.maximum(0, np.asarray([len(book) for book in books]) - len(first_ids))
        self._length = max(1, min(length - len(first_ids), int(sizes.max())))
        self._books, self._first_ids = books, first_ids
        self._ends = np.cumsum(sizes // self._length)  # number of stretches up to the end of each book

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, index: int) -> list[int]:
        book = int(np.searchsorted(self._ends, index, side="right"))
        number = index - (int(self._ends[book - 1]) if book else 0)
        start = len(self._first_ids) + number * self._length
        return [*self._first_ids, *self._books[book][start : start + self._length].tolist()]


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
