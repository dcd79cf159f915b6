"""The ablations of TokenSwift's paper as data: for each table, what its arms change and how it is laid out.

All arms start from the paper's setting (its table 10 for LLaMA3.1-8b, and section 4.3): a prompt of 4,096 tokens,
T = 1, min-p 0.1, penalty 1.2 over 1,024 tokens, digits 1,3,3,3, k = 20. Needs no torch, so that a command can name
the tables.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

PAPER_SAMPLING: dict[str, Any] = {
    "temperature": 1.0,
    "min_p": 0.1,
    "repetition_penalty": 1.2,
    "penalty_window": 1024,
}
PAPER_PREFILL = 4096

Engine = Literal["tokenswift-paper", "tokenswift"]
"""What arms change: the first one where nothing is said."""

Layout = Literal["by_length", "by_arm", "at_end"]
"""Rows are lengths and columns arms; rows arms and columns lengths; rows arms and columns measures at the end."""


@dataclass(frozen=True)
class AblationArm:
    """One generation: what it changes in `TokenSwiftOptions` (a cache by its name) and in the sampling."""

    label: str
    options: dict[str, Any] = field(default_factory=dict)
    sampling: dict[str, Any] = field(default_factory=dict)
    prefill: int = PAPER_PREFILL


@dataclass(frozen=True)
class View:
    """One table of the paper: `measures` are names in `tables.MEASURES`."""

    title: str
    layout: Layout
    measures: tuple[str, ...]


@dataclass(frozen=True)
class Ablation:
    arms: tuple[AblationArm, ...]
    views: tuple[View, ...]


RATES = ("alpha", "speedup")
DIVERSITY = ("distinct_1", "distinct_2", "distinct_3", "distinct_4", "distinct_average")
NO_REUSE = {"num_ngrams": 0}
NO_PENALTY = {"repetition_penalty": 1.0}
SAMPLERS: dict[str, dict[str, Any]] = {
    "top-p 0.9": {"min_p": 0.0, "top_p": 0.9},
    "min-p 0.1": {},
    "eta 2e-4": {"min_p": 0.0, "eta": 2e-4},
}
DIGITS = ((3, 3, 3, 3), (1, 9, 9, 9), (1, 3, 3, 3))  # 120, 820 and 40 nodes; the cache has room for 127
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
        tuple(AblationArm(str(list(digits)), NO_REUSE | {"digits": digits}) for digits in DIGITS),
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
