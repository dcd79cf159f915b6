"""The TokenSwift paper's tables, one long generation per arm.

All start from a setting of table 10, by default LLaMA3.1-8b's: 4,096 prompt tokens, T = 1, min-p 0.1, penalty 1.2 over
1,024 tokens, digits 3,3,3 below the drawn token, k = 20.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from bench import long
from bench.compared_caches import without_cache
from bench.large_trees import LargeTrees, room_for
from bench.long import METERED, ReuseTally, generated, metered_drafter
from bench.options import ALL, one_of
from bench.tables import Curve, Record, pivot
from swiftbatch.worker.config import Computation
from swiftbatch.worker.decode_bench import BenchOptions, bench_slots, check_length
from swiftbatch.worker.drafters.drafter_interface import Drafter
from swiftbatch.worker.drafters.engine_options import TokenSwiftOptions, changed
from swiftbatch.worker.forward.step_costs import Costs, step_costs_of
from swiftbatch.worker.forward.target_model import TargetModel
from swiftbatch.worker.kv.sparse_cache import SparseCacheFactory
from swiftbatch.worker.model.model_files import locate_model

SHARED_SAMPLING: dict[str, Any] = {"temperature": 1.0, "penalty_window": 1024}
SETTINGS: dict[str, dict[str, Any]] = {
    "llama3.1-8b": {"min_p": 0.1, "repetition_penalty": 1.2},
    "yarn-llama2-7b": {"min_p": 0.0, "top_p": 0.9, "repetition_penalty": 1.15},
    "qwen2.5-1.5b": {"min_p": 0.0, "top_p": 0.9, "repetition_penalty": 1.15},
    "qwen2.5-7b": {"min_p": 0.05, "repetition_penalty": 1.15},
    "qwen2.5-14b": {"min_p": 0.05, "repetition_penalty": 1.13},
}
"""Table 10; all have T = 1 and a window of 1,024 tokens."""
PAPER_PREFILL = 4096
NUM_LENGTHS = 5  # the paper's 20K, 40K, ... 100K, scaled
PLAIN_EVERY = 2500
Layout = Literal["by_length", "by_arm", "by_prefill", "at_end"]
"""Rows are lengths and columns arms; rows arms and columns lengths; rows lengths and arms, columns prefills; rows arms
and columns measures at the end."""
Method = Literal["given", "medusa", "triforce"]
"""The engine of `--engine`; the same with Medusa's heads; or TriForce, whose cache follows the output here, too."""


@dataclass(frozen=True)
class AblationArm:
    """One generation with its changes of `TokenSwiftOptions`, the cache by name, and of sampling."""

    label: str  # "": the model's name
    options: dict[str, Any] = field(default_factory=dict)
    sampling: dict[str, Any] = field(default_factory=dict)
    prefill: int = PAPER_PREFILL
    method: Method = "given"
    num_first: int = 1  # tokens of the partial cache that stand on top of the tree


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
    "min-p 0.1": {"min_p": 0.1, "top_p": 1.0},
    "eta 2e-4": {"min_p": 0.0, "top_p": 1.0, "eta": 2e-4},
}
DIGITS = ((3, 3, 3, 3), (1, 9, 9, 9), (1, 3, 3, 3))  # the partial cache's tokens, then each head's: 120, 820, 40 nodes
CACHES = {
    "full": "full cache",
    "static": "partial cache",
    "dynamic": "dynamic partial",
    "summary": "summary (ours)",
}
PREFILLS = (2048, 3072, 4096, 5120, 6144, 7168, 8192)
TABLE_3_PREFILLS = (2048, 4096, 8192)
MINUTES = ("plain_minutes", "minutes", "saved_minutes")
WINDOWS = (20, 50, 128, 256, 512, 1024, 2048)


def _by_reuse(*nums_ngrams: int) -> tuple[AblationArm, ...]:
    return tuple(AblationArm(f"k = {k}", {"num_ngrams": k}) for k in nums_ngrams)


def _methods() -> Iterator[AblationArm]:
    """Yield table 3's arms. TriForce has no penalty (4.2), Medusa no reused n-grams."""
    for prefill in TABLE_3_PREFILLS:
        yield AblationArm("Medusa*", NO_REUSE, prefill=prefill, method="medusa")
        yield AblationArm("TriForce*", sampling=NO_PENALTY, prefill=prefill, method="triforce")
        yield AblationArm("TokenSwift", prefill=prefill)


ABLATIONS: dict[str, Ablation] = {
    "3": Ablation(tuple(_methods()), (View("Table 3: methods and prefill lengths", "by_prefill", RATES),)),
    "4": Ablation((AblationArm(""),), (View("Table 4: models", "by_length", (*RATES, *MINUTES)),)),
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
        tuple(
            AblationArm(str(list(digits)), NO_REUSE | {"tree": digits[1:]}, num_first=digits[0]) for digits in DIGITS
        ),
        (View("Table 7: tree configurations, k = 0", "by_length", RATES),),
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
    "fig5": Ablation(
        (AblationArm("w/o penalty", sampling=NO_PENALTY), AblationArm("with penalty")),
        (View("Figures 5 and 6: where the text begins to repeat itself", "at_end", ("loop_start", "average", "loop")),),
    ),
}

CURVES = {
    "fig3": Curve("tokens", tuple((f"k = 20 {rate}", f"k = 0 {rate}") for rate in ("alpha", "speedup"))),
    "fig4": Curve("arm", (("alpha", "beta"), ("speedup",))),
}


class Options(BenchOptions):
    """Options; a table's five lengths are fifths of `num_tokens`."""

    table: str = ALL  # a name in `ABLATIONS`; 15 also gives 16
    model: str = Field(default=Computation.model, description="Several, separated by commas, for table 4.")
    engine: str = "tokenswift-paper"  # the engine to vary: K = 1 with whole trees, or `tokenswift` with what pays
    setting: str = "llama3.1-8b"  # a name in `SETTINGS`
    draft_model: Path | None = None
    medusa: Path | None = Field(default=None, description="Folder of Medusa's heads, for their rows of table 3.")
    num_tokens: int = 20_000  # at least 320, so that two records are more than one step apart
    seed: int = 0
    text: Path | None = None  # a prompt begins anywhere in it, as the seed says

    def arms(self) -> list[AblationArm]:
        arms = one_of(ABLATIONS, self.table).arms
        return [arm for arm in arms if self.medusa is not None or arm.method != "medusa"]

    def arm_options(self, arm: AblationArm) -> long.Options:
        shared = self.model_dump(include={"model", "dtype", "device", "num_threads", "text", "seed"})
        every, sampling = self.num_tokens // NUM_LENGTHS, SHARED_SAMPLING | one_of(SETTINGS, self.setting)
        own = sampling | arm.sampling | {"num_tokens": every * NUM_LENGTHS, "prefill": arm.prefill}
        own |= {"engine": self.engine_of(arm), "sampled": True, "with_text": self.table == "fig5"}
        return long.Options(every=every, plain_every=min(PLAIN_EVERY, every), **shared | own)

    def engine_of(self, arm: AblationArm) -> str:
        return "triforce-paper" if arm.method == "triforce" else self.engine

    def drafting(self, arm: AblationArm) -> tuple[TokenSwiftOptions, SparseCacheFactory | None]:
        changes, new_cache = without_cache(arm.options)
        return changed(one_of(METERED, self.engine), changes), new_cache

    def metered(self, arm: AblationArm, target: TargetModel, costs: Costs) -> tuple[Drafter, ReuseTally | None]:
        """Make an arm's drafter. Raises ModelError."""
        if arm.method == "triforce":
            return metered_drafter("triforce-paper", target, costs, self.draft_model)
        parts = self.medusa if arm.method == "medusa" else self.draft_model
        drafting, new_cache = self.drafting(arm)
        if room_for(drafting) or arm.num_first > 1:
            return LargeTrees.make(target, parts, drafting, arm.num_first), None
        return metered_drafter(self.engine, target, costs, parts, drafting, new_cache)


def each_table(options: Options) -> list[Options]:
    return [options.model_copy(update={"table": name}) for name in ABLATIONS] if options.table == ALL else [options]


def run(options: Options) -> Iterator[Record]:
    """Repeat a table of the TokenSwift paper. Its five lengths are fifths of `--tokens`.

    \b
    Example:
      python -m bench papers tokenswift --table 5 --tokens 20000 --json table5.jsonl
    """
    models = options.model.split(",")
    for model in models:
        own = options.model_copy(update={"model": model})
        for record in _with_model(own):
            name = [Path(model).name] if len(models) > 1 or not record["arm"] else []
            yield record | {"arm": " ".join([*name, record["arm"]]).strip()}


def _with_model(options: Options) -> Iterator[Record]:
    files, arms = locate_model(options.model), options.arms()
    longest = max(arm.prefill + options.arm_options(arm).num_tokens for arm in arms)
    check_length(files, longest, 0)
    target = options.load(files, bench_slots({options.engine_of(arm) for arm in arms}, longest))
    costs = step_costs_of(target)
    for arm in arms:
        asked, room = options.arm_options(arm), room_for(options.drafting(arm)[0])
        found = generated(asked, target, *options.metered(arm, target, costs), room)
        for length, record in zip(asked.record_stops(), found, strict=True):
            place = {"table": options.table, "arm": arm.label, "prefill": arm.prefill, "tokens": length}
            yield place | _measures(record) | record


def _measures(record: Record) -> Record:
    total, distinct = record["total"], record["distinct"]
    average, minutes, plain = statistics.mean(distinct.values()), total["seconds"] / 60, total["plain_seconds"] / 60
    measures: Record = {name: total[name] for name in ("alpha", "beta", "speedup")} | distinct | {"average": average}
    return measures | {"minutes": minutes, "plain_minutes": plain, "saved_minutes": plain - minutes}


def shown(records: list[Record], options: Options) -> Iterator[Record]:
    for view in ABLATIONS[options.table].views if records else ():
        yield {"words": view.title}
        if view.layout == "by_length":
            yield from pivot(records, ["tokens"], "arm", view.measures)
        elif view.layout == "by_arm":
            yield from pivot(records, ["arm"], "tokens", view.measures)
        elif view.layout == "by_prefill":
            yield from pivot(
                sorted(records, key=lambda each: each["tokens"]), ["tokens", "arm"], "prefill", view.measures
            )
        else:
            last = [each for each in records if each["tokens"] == records[-1]["tokens"]]
            yield from ({name: each[name] for name in ("arm", "tokens", *view.measures)} for each in last)
