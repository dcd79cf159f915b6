"""Figures of the TriForce paper about attention and the draft model, measured forward by forward."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from bench.compared_caches import PARTIAL_CACHES
from bench.prompt_arms import Prompt, PromptArms, Prompts, figures_of, make_prompts, num_same, read_prompt
from bench.tables import Record, pivot
from swiftbatch.jobs.sampling_params import SamplingParams
from swiftbatch.worker.decode_bench import BenchEngine, read_tokens
from swiftbatch.worker.drafters.drafter_interface import AutoregressiveDrafter
from swiftbatch.worker.drafters.engine_options import TRIFORCE_PAPER, TriForceOptions, changed
from swiftbatch.worker.drafters.triforce import DraftModel, triforce
from swiftbatch.worker.forward.forward_interface import partial_rows
from swiftbatch.worker.forward.step_costs import seconds_of, step_costs_of
from swiftbatch.worker.forward.target_model import TargetModel
from swiftbatch.worker.forward.tile_packing import known_rows, tree_rows
from swiftbatch.worker.kv.full_cache import FullKVCache
from swiftbatch.worker.kv.model_sizes import read_sizes
from swiftbatch.worker.kv.sparse_cache import SparseCache
from swiftbatch.worker.sampling.draft_tree import DraftTree
from swiftbatch.worker.sampling.sequence import Sequence

BUDGETS = (256, 1024, 4096)
SHORT = 64  # tokens whose keys take no time
LENGTH_SHARES = (16, 8, 4, 2, 1)
DIVERGENCE_AT = (0.2, 0.6, 1.0)  # temperatures
EVICTING = ("streaming", "h2o", "retrieval", "summary")


@dataclass(frozen=True)
class Measured:
    """Model, text `text_ids [prefill + num_tokens]` and sizes that a figure is measured with."""

    target: TargetModel
    text_ids: list[int]
    prefill: int
    num_tokens: int
    budget: int
    seed: int
    parts_folder: Path | None

    def read(self, num_tokens: int) -> FullKVCache:
        """Read the prompt, except for its last token, into a cache with room for `num_tokens` more."""
        cache = self.target.new_cache(self.prefill + num_tokens)
        read_tokens(self.target, cache, self.text_ids[: self.prefill], [])
        return cache


def divergences(on: Measured) -> Iterator[Record]:
    """Yield figure 2a: how far the draft model's distributions lie from the target's, after texts of several lengths.

    Divergence is the share of probability that differs, 1 - sum(min(p, q)). The draft model reads its first and newest
    tokens (StreamingLLM), or as many newest ones alone, computed anew.
    """
    draft = DraftModel.load(on.parts_folder, on.target, TriForceOptions())
    draft.start("draft")
    cache = on.target.new_cache(len(on.text_ids))
    for length in sorted({on.prefill // share for share in LENGTH_SHARES}):
        read_tokens(on.target, cache, on.text_ids[:length], [])
        rows = on.text_ids[length - 1 : length - 1 + on.num_tokens]
        exact = torch.cat([each.logits.clone() for each in on.target.verify(known_rows(cache, rows))])
        windows = [draft.window_of(np.array(on.text_ids[: length + i]), length) for i in range(len(rows))]
        newest = [np.array(on.text_ids[: length + i][-len(window) :]) for i, window in enumerate(windows)]
        for name, read in (("StreamingLLM", windows), ("sliding window", newest)):
            found = torch.stack([draft.logits({"draft": token_ids})[0] for token_ids in read])
            yield {"length": length, "draft": name} | {
                f"T = {t:g}": _divergence(exact, found, t) for t in DIVERGENCE_AT
            }
    draft.stop("draft")


def _divergence(exact: torch.Tensor, found: torch.Tensor, temperature: float) -> float:
    """Return the mean over rows of logits `[num_rows, vocab]`."""
    p, q = ((logits.float() / temperature).softmax(dim=-1) for logits in (exact, found))
    return 1.0 - float(torch.minimum(p, q).sum(dim=-1).mean())


NUM_TIMED = 9


def bottlenecks(on: Measured) -> Iterator[Record]:
    """Yield figures 2b and 2c: what weights and keys with values take of a step's time and of memory, by length.

    A step behind 64 tokens shows the time of the weights alone.
    """
    sizes = read_sizes(on.target.files, str(on.target.dtype).removeprefix("torch."))
    weights, cache = _step_ms(on, on.target.new_cache(SHORT), SHORT), on.target.new_cache(len(on.text_ids))
    for length in sorted({on.prefill // share for share in LENGTH_SHARES}):
        whole = _step_ms(on, cache, length)
        record = {"length": length, "weights_ms": weights, "kv_ms": max(0.0, whole - weights)}
        if sizes is not None:
            kv = length * sizes.bytes_per_position
            record |= {"weights_mb": sizes.weight_bytes / 1e6, "kv_mb": kv / 1e6}
            record["kv_share_of_memory"] = kv / (kv + sizes.weight_bytes)
        yield record


def _step_ms(on: Measured, cache: FullKVCache, length: int) -> float:
    """Return the median time of a step with one row behind a text of some tokens, which the cache gets."""
    read_tokens(on.target, cache, on.text_ids[:length], [])
    rows = known_rows(cache, on.text_ids[length - 1 : length])
    seconds = [seconds_of(on.target, lambda: on.target.verify(rows)) for _ in range(NUM_TIMED)]
    return 1000 * statistics.median(seconds)


def attention(cache: FullKVCache, queries: torch.Tensor, num_keys: int) -> Iterator[torch.Tensor]:
    """Yield each layer's attention `[num_kv_heads, group, num_keys]` over a cache's first positions.

    `queries [num_layers, num_kv_heads, group, head_dim]`.
    """
    for layer, query in enumerate(queries):
        keys = cache.shape.numbers(cache.stored(layer)[0][:, :num_keys]).to(query.device)
        scores = (query @ keys.transpose(-1, -2)).float() * query.shape[-1] ** -0.5
        yield scores.softmax(dim=-1)


def recovered(on: Measured) -> Iterator[Record]:
    """Yield figure 3a: the share of the last token's attention that the best keys of each head have, by layer."""
    cache = on.read(1)
    queries = on.target.queries(cache, on.text_ids[on.prefill - 1])
    for layer, shares in enumerate(attention(cache, queries, cache.length)):
        ranked = shares.sort(dim=-1, descending=True).values.cumsum(dim=-1)
        yield {"layer": layer} | {
            f"{budget:,} keys": float(ranked[..., budget - 1].mean())
            for budget in sorted({*BUDGETS, on.budget})
            if budget < cache.length
        }


def locality(on: Measured) -> Iterator[Record]:
    """Yield figure 3c: the attention of coming tokens on the keys that the prompt's last token chose, by layer."""
    cache = on.read(on.num_tokens)
    num_keys = cache.length
    sequence = _generated(on, cache)
    chosen: list[torch.Tensor] = []
    after = [0, *(1 << power for power in range(on.num_tokens.bit_length()) if 1 << power < on.num_tokens)]
    for number in [*after, on.num_tokens - 1]:
        position = num_keys + number
        with cache.replayed(position) as before:
            queries = on.target.queries(before, int(sequence.token_ids[position]))
        layers = list(attention(cache, queries, num_keys))
        chosen = chosen or [shares.topk(on.budget, dim=-1).indices for shares in layers]
        for layer, (shares, best) in enumerate(zip(layers, chosen, strict=True)):
            yield {"tokens": number, "layer": layer, "share": float(shares.gather(-1, best).sum(dim=-1).mean())}


def _generated(on: Measured, cache: FullKVCache) -> Sequence:
    sampling = SamplingParams(max_tokens=on.num_tokens, temperature=0.6, top_p=0.9, seed=on.seed, ignore_eos=True)
    prompt_ids = on.text_ids[: on.prefill]
    sequence = Sequence("locality", prompt_ids, sampling, on.target.vocab_size, on.target.device)
    engine = BenchEngine(on.target, AutoregressiveDrafter())
    engine.start(sequence, cache)
    while sequence.finish_reason is None:
        engine.step()
    return sequence


def needles(on: Measured) -> Iterator[Record]:
    """Yield figure 1, right: the needle's tokens that each cache alone finds, and its time per token.

    TriForce keeps the full cache, and so its tokens.
    """
    options = changed(TRIFORCE_PAPER, {"budget": on.budget})
    drafter = triforce(on.target, step_costs_of(on.target), on.parts_folder, options)
    [prompt] = make_prompts(Prompts("needle"), on.prefill, on.text_ids, on.target.files)
    num_tokens = len(prompt.expected_ids)
    read = read_prompt(on.target, prompt, num_tokens)
    for name in (*EVICTING, "full"):
        cache = on.target.new_cache(len(prompt.token_ids) + num_tokens)
        cache.load(read.cache.kv(0, read.cache.length))
        yield (record := _with_cache(on, prompt, cache, name))
    arms = PromptArms(on.target, [read], num_tokens, num_tokens, on.seed)
    figures = figures_of(*arms.run(drafter, 0.0), prompt.expected_ids)
    yield record | {"cache": "TriForce", "ms_per_token": figures["ms_per_token"]}


def _with_cache(on: Measured, prompt: Prompt, full: FullKVCache, name: str) -> Record:
    """Let one cache say each token of the needle behind the right ones before it."""
    sampling = SamplingParams(max_tokens=len(prompt.expected_ids), temperature=0.0, ignore_eos=True)
    sequence = Sequence("needle", prompt.token_ids, sampling, on.target.vocab_size, on.target.device)
    partial = None if name == "full" else PARTIAL_CACHES[name](on.target.cache_shape, on.budget, sequence)
    found, seconds = [], []
    for expected in prompt.expected_ids:
        newest, started = int(sequence.token_ids[-1]), time.perf_counter()
        if partial is not None:
            found.append(_said(on.target, partial, full, sequence))
            seconds.append(time.perf_counter() - started)
        [outputs] = on.target.verify([tree_rows(full, newest, DraftTree())])
        if partial is None:
            found.append(int(outputs.logits[0].argmax()))
            seconds.append(time.perf_counter() - started)
        full.commit([])
        sequence.extend([expected])
    accuracy = num_same(np.array(found), prompt.expected_ids) / len(found)
    return {"cache": name, "accuracy": accuracy, "ms_per_token": 1000 * statistics.median(seconds)}


def _said(target: TargetModel, partial: SparseCache, full: FullKVCache, sequence: Sequence) -> int:
    def queries(position: int) -> torch.Tensor:
        with full.replayed(position) as before:
            return target.queries(before, int(sequence.token_ids[position]))

    partial.follow(full, queries)
    [outputs] = target.check([partial_rows(partial, sequence.last_token_id, len(sequence) - 1, DraftTree())])
    return int(outputs.logits[0].argmax())


@dataclass(frozen=True)
class ForwardFigure:
    title: str
    measure: Callable[[Measured], Iterator[Record]]
    rows: str | None = None  # the field of the rows, where `column` and `values` make the others
    column: str = ""
    values: tuple[str, ...] = ()

    def shown(self, records: list[Record]) -> list[Record]:
        return records if self.rows is None else pivot(records, [self.rows], self.column, self.values)


FORWARD_FIGURES = {
    "1-right": ForwardFigure("Figure 1, right: needle retrieval, T = 0", needles),
    "2a": ForwardFigure(
        "Figure 2a: divergence of the draft model by the length of the text",
        divergences,
        "length",
        "draft",
        tuple(f"T = {t:g}" for t in DIVERGENCE_AT),
    ),
    "2b": ForwardFigure("Figure 2b, with 2c: weights, and keys with values, in time and memory", bottlenecks),
    "3a": ForwardFigure("Figure 3a: attention on the best keys by layer, means over heads", recovered),
    "3c": ForwardFigure(
        "Figure 3c: attention of later tokens on the prompt's keys that its last token chose, by layer",
        locality,
        "tokens",
        "layer",
        ("share",),
    ),
}
