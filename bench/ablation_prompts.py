"""Long prompts that are read once: stretches of books, and books with a needle. All arms go on from the same cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from swiftbatch.worker.bench_texts import encode
from swiftbatch.worker.decode_bench import read_tokens
from swiftbatch.worker.forward.target_model import TargetModel
from swiftbatch.worker.kv.full_cache import FullKVCache
from swiftbatch.worker.model.model_files import ModelFiles


@dataclass(frozen=True)
class Prompts:
    """The prompts: each sequence reads another stretch of the text, `share` of the prompt's length long."""

    kind: Literal["books", "needle"] = "books"
    num_sequences: int = 1
    share: float = 1.0


def length_of(prompts: Prompts, prefill: int) -> int:
    """Tokens of each sequence's prompt."""
    return round(prefill * prompts.share)


NEEDLE = (
    "\n\nThe Quorvane ledger of Thessaly Brumidge names her five ships: Oskarrow 7194, Pellimore 3826, Harrowex 2468, "
    "Vantrice 5501.\n\n"
)  # in no book, and not to be guessed by who has not read it
NEEDLE_DEPTH = 10  # it lies behind a tenth of the prompt
NEEDLE_CUE = 3  # the prompt ends with its first third


@dataclass(frozen=True)
class Prompt:
    """Tokens of a prompt, and what a model that remembers its needle says next: nothing for a plain book."""

    token_ids: list[int]
    expected_ids: list[int]


@dataclass(frozen=True)
class ReadPrompt:
    """A prompt and a cache that holds all of it but the last token, which the first step's root row adds."""

    prompt: Prompt
    cache: FullKVCache

    def copy_to(self, target: TargetModel, num_tokens: int) -> ReadPrompt:
        """Copy the prompt to a cache of another target's, which may keep it elsewhere."""
        cache = target.new_cache(len(self.prompt.token_ids) + num_tokens)
        cache.load(self.cache.kv(0, self.cache.length))
        return ReadPrompt(self.prompt, cache)


def num_text_tokens(prompts: Prompts, prefill: int) -> int:
    return prompts.num_sequences * length_of(prompts, prefill)


def make_prompts(prompts: Prompts, prefill: int, text_ids: list[int], files: ModelFiles) -> list[Prompt]:
    """The prompts as tokens: one stretch of the text behind the other."""
    length = length_of(prompts, prefill)
    if prompts.kind == "needle":
        return [_with_needle(text_ids[:length], encode(files, NEEDLE))]
    return [Prompt(text_ids[i * length : (i + 1) * length], []) for i in range(prompts.num_sequences)]


def read_prompt(target: TargetModel, prompt: Prompt, num_tokens: int) -> ReadPrompt:
    """Read a prompt into a cache with room for `num_tokens` behind it."""
    cache = target.new_cache(len(prompt.token_ids) + num_tokens)
    read_tokens(target, cache, prompt.token_ids, [])
    return ReadPrompt(prompt, cache)


def _with_needle(text_ids: list[int], needle_ids: list[int]) -> Prompt:
    """Make a prompt as long as the text: some of it, the needle, more of it, and how the needle begins."""
    cue, rest = needle_ids[: len(needle_ids) // NEEDLE_CUE], needle_ids[len(needle_ids) // NEEDLE_CUE :]
    before = len(text_ids) // NEEDLE_DEPTH
    end = len(text_ids) - len(needle_ids) - len(cue)
    return Prompt([*text_ids[:before], *needle_ids, *text_ids[before:end], *cue], rest)
