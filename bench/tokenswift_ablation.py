"""The TokenSwift paper's ablations, one long generation per arm.

All start from table 10's setting for LLaMA3.1-8b: 4,096 prompt tokens, T = 1, min-p 0.1, penalty 1.2 over 1,024 tokens,
digits 3,3,3 below the drawn token, k = 20.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from bench import long
from bench.compared_caches import without_cache
from bench.long import METERED, generated, metered_drafter
from bench.options import ALL, one_of
from bench.tables import Curve, Record, pivot
from swiftbatch.worker.decode_bench import BenchOptions, bench_slots, check_length
from swiftbatch.worker.drafters.engine_options import TokenSwiftOptions, changed
from swiftbatch.worker.forward.step_costs import step_costs_of
from swiftbatch.worker.kv.sparse_cache import SparseCacheFactory
from swiftbatch.worker.model.model_files import locate_model

PAPER_SAMPLING = {"temperature": 1.0, "min_p": 0.1, "repetition_penalty": 1.2, "penalty_window": 1024}
PAPER_PREFILL = 4096
NUM_LENGTHS = 5  # the paper's 20K, 40K, ... 100K, scaled
PLAIN_EVERY = 2500
Layout = Literal["by_length", "by_arm", "at_end"]
"""Rows are lengths and columns arms; rows arms and columns lengths; rows arms and columns measures at the end."""


@dataclass(frozen=True)
class AblationArm:
    """One generation with its changes of `TokenSwiftOptions`, the cache by name, and of sampling."""

    label: str
    options: dict[str, Any] = field(default_factory=dict)
    sampling: dict[str, Any] = field(default_factory=dict)
    prefill: int = PAPER_PREFILL


@dataclass(frozen=True)
class View:
    """One table of the paper; `measures` are fields of records."""

    title: str
    layout: Layout
    measures: tuple[str, ...]


@dataclass(frozen=True)
class Ablation:
    arms: tuple[AblationArm, ...]
    views: tuple[View, ...]


RATES = ("alpha", "speedup")
DIVERSITY = ("distinct_1", "distinct_2", "distinct_3", "distinct_4", "average")
NO_REUSE = {"num_ngrams": 0}
NO_PENALTY = {"repetition_penalty": 1.0}
SAMPLERS: dict[str, dict[str, Any]] = {
    "top-p 0.9": {"min_p": 0.0, "top_p": 0.9},
    "min-p 0.1": {},
    "eta 2e-4": {"min_p": 0.0, "eta": 2e-4},
}
DIGITS = ((9, 9, 9), (3, 3, 3))  # below the drawn token: 819 and 39 nodes; the cache has room for 127
CACHES = {
    "full": "full cache",
    "static": "partial cache",
    "dynamic": "dynamic partial",
    "summary": "summary (ours)",
}
PREFILLS = (2048, 3072, 4096, 5120, 6144, 7168, 8192)
WINDOWS = (20, 50, 128, 256, 512, 1024, 2048)


def _by_reuse(*nums_ngrams: int) -> tuple[AblationArm, ...]:
    return tuple(AblationArm(f"k = {k}", {"num_ngrams": k}) for k in nums_ngrams)


ABLATIONS: dict[str, Ablation] = {
    "5": Ablation(
        tuple(AblationArm(label, NO_REUSE | {"cache": cache}) for cache, label in CACHES.items()),
        (
            View(
                "Table 5: KV management, k = 0; the summary holds one entry more for every 32 positions",
                "by_length",
                RATES,
            ),
        ),
    ),
    "6": Ablation(
        tuple(
            AblationArm(f"{name}{note}", sampling=sampling | change)
            for name, sampling in SAMPLERS.items()
            for note, change in (("", {}), (" w/o penalty", NO_PENALTY))
        ),
        (View("Table 6: contextual penalty and sampling methods", "at_end", (*DIVERSITY, "speedup")),),
    ),
    "7": Ablation(
        tuple(AblationArm(str(list(digits)), NO_REUSE | {"tree": digits}) for digits in DIGITS),
        (View("Table 7: tree configurations, at most 127 nodes, k = 0", "by_length", RATES),),
    ),
    "8": Ablation(
        tuple(AblationArm(f"theta {t}", sampling={"repetition_penalty": t}) for t in (1.0, 1.1, 1.2, 1.3, 1.4, 1.5)),
        (View("Table 8: penalty value", "at_end", DIVERSITY),),
    ),
    "12": Ablation(
        tuple(AblationArm(name, NO_REUSE, sampling) for name, sampling in SAMPLERS.items()),
        (View("Table 12: sampling methods, k = 0", "by_length", RATES),),
    ),
    "13": Ablation(
        tuple(
            AblationArm(f"T {t}", sampling=SAMPLERS["top-p 0.9"] | {"temperature": t})
            for t in (0.4, 0.6, 0.8, 1.0, 1.2)
        ),
        (View("Table 13: temperatures, top-p 0.9", "by_length", RATES),),
    ),
    "14": Ablation(
        tuple(AblationArm(f"{p:,}", NO_REUSE | {"budget": p}, prefill=p) for p in PREFILLS),
        (View("Table 14: prefill length, which is the budget too, k = 0", "by_arm", RATES),),
    ),
    "15": Ablation(
        tuple(AblationArm(f"W {w:,}", sampling={"penalty_window": w}) for w in WINDOWS),
        (
            View("Table 15: penalty window", "by_arm", RATES),
            View("Table 16: penalty window and diversity", "at_end", DIVERSITY),
        ),
    ),
    "fig3": Ablation(
        _by_reuse(20, 0),
        (View("Figure 3: token reuse", "by_length", ("alpha", "beta", "speedup")),),
    ),
    "fig4": Ablation(
        _by_reuse(0, 5, 10, 20, 40),
        (View("Figure 4: number of n-gram candidates", "at_end", ("alpha", "beta", "speedup")),),
    ),
}

CURVES = {
    "fig3": Curve("tokens", tuple((f"k = 20 {rate}", f"k = 0 {rate}") for rate in ("alpha", "speedup"))),
    "fig4": Curve("arm", (("alpha", "beta"), ("speedup",))),
}


class Options(BenchOptions):
    """Options; a table's five lengths are fifths of `num_tokens`."""

    table: str = ALL  # a name in `ABLATIONS`; 15 also gives 16
    engine: str = "tokenswift-paper"  # the engine to vary: K = 1 with whole trees, or `tokenswift` with what pays
    draft_model: Path | None = None
    num_tokens: int = 20_000  # at least 320, so that two records are more than one step apart
    seed: int = 0
    text: Path | None = None

    def arm_options(self, arm: AblationArm) -> long.Options:
        shared = self.model_dump(include={"model", "engine", "dtype", "device", "num_threads", "text", "seed"})
        every = self.num_tokens // NUM_LENGTHS
        own = PAPER_SAMPLING | arm.sampling | {"num_tokens": every * NUM_LENGTHS, "prefill": arm.prefill}
        return long.Options(every=every, plain_every=min(PLAIN_EVERY, every), **shared | own)

    def drafting(self, arm: AblationArm) -> tuple[TokenSwiftOptions, SparseCacheFactory | None]:
        changes, new_cache = without_cache(arm.options)
        return changed(one_of(METERED, self.engine), changes), new_cache


def each_table(options: Options) -> list[Options]:
    """Return the options of each wanted table."""
    return [options.model_copy(update={"table": name}) for name in ABLATIONS] if options.table == ALL else [options]


def run(options: Options) -> Iterator[Record]:
    """Repeat an ablation of the TokenSwift paper. Its five lengths are fifths of `--tokens`.

    \b
    Example:
      python -m bench papers tokenswift --table 5 --tokens 20000 --json table5.jsonl
    """
    files, arms = locate_model(options.model), one_of(ABLATIONS, options.table).arms
    longest = max(arm.prefill + options.arm_options(arm).num_tokens for arm in arms)
    check_length(files, longest, 0)
    target = options.load(files, bench_slots([options.engine], longest))
    costs = step_costs_of(target)
    for arm in arms:
        asked = options.arm_options(arm)
        metered = metered_drafter(options.engine, target, costs, options.draft_model, *options.drafting(arm))
        for length, record in zip(asked.record_stops(), generated(asked, target, *metered), strict=True):
            yield {"table": options.table, "arm": arm.label, "tokens": length} | _measures(record) | record


def _measures(record: Record) -> Record:
    total, distinct = record["total"], record["distinct"]
    average = statistics.mean(distinct.values())
    measures: Record = {name: total[name] for name in ("alpha", "beta", "speedup")} | distinct | {"average": average}
    return measures


def shown(records: list[Record], options: Options) -> Iterator[Record]:
    for view in ABLATIONS[options.table].views if records else ():
        yield {"words": view.title}
        if view.layout == "by_length":
            yield from pivot(records, ["tokens"], "arm", view.measures)
        elif view.layout == "by_arm":
            yield from pivot(records, ["arm"], "tokens", view.measures)
        else:
            last = [each for each in records if each["tokens"] == records[-1]["tokens"]]
            yield from ({name: each[name] for name in ("arm", "tokens", *view.measures)} for each in last)
