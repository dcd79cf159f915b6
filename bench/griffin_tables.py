"""Rows and layouts of the GRIFFIN paper's tables."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

TEMPERATURES = (0.0, 1.0)

Plan = Literal["own", "paper", "chain"]
"""As many nodes and levels as pay; the paper's whole trees of 60 nodes and depth 6 (appendix C.2); chains of 2."""

Expansion = Literal["hidden", "double"]
"""The sizes of the second fusion besides the target's feed-forward size: its hidden size, or twice the former."""

Layout = Literal["arms", "forwards", "order", "steps", "tasks", "batches"]
"""Speed-up and accept length of every row; misaligned rates per forward; means and ranges over seeds; accept lengths by
method and training steps; speed-up and accept length by kind of prompt; speed-up by batch."""


@dataclass(frozen=True)
class Variant:
    """A training's folder and changes of `GriffinRecipe`."""

    name: str
    changes: dict[str, Any] = field(default_factory=dict)
    expansion: Expansion | None = None


@dataclass(frozen=True)
class GriffinTable:
    """A table's rows by label, as in the paper."""

    title: str
    rows: dict[str, Variant]
    note: str
    layout: Layout = "arms"
    plans: tuple[Plan, ...] = ("own", "paper")
    temperatures: tuple[float, ...] = TEMPERATURES
    engines: dict[str, str] = field(default_factory=dict)  # rows of engines that need no training
    needs_data: bool = True  # False: some rows can be had without trainings


NO_HEAD = {"has_token_enhanced_head": False}
NO_FUSION = {"fusion": "none"}
NO_MASK = {"align_top_k": None}
ONE_PASS = {"num_passes": 1, **NO_MASK}

GRIFFIN = Variant("griffin")
WITHOUT_HEAD = Variant("without-head", NO_HEAD)
WITHOUT_FUSION = Variant("without-fusion", NO_FUSION)
WITHOUT_BOTH = Variant("without-fusion-and-head", NO_FUSION | NO_HEAD)
ONE_STEP = Variant("one-step", ONE_PASS)
EAGLE_2 = Variant("eagle-2", NO_FUSION | NO_HEAD | ONE_PASS)
HASS = Variant("hass", NO_FUSION | NO_HEAD | NO_MASK)


def _top_k(k: int) -> Variant:
    return Variant(f"top-k-{k}", {"align_top_k": k})


def _steps(n: int) -> Variant:
    return Variant(f"steps-{n}", {"num_passes": n})


def _hass(n: int) -> Variant:
    return {1: EAGLE_2, 3: HASS}.get(n) or Variant(f"hass-steps-{n}", HASS.changes | {"num_passes": n})


BY_STEPS = {"1": ONE_STEP, "2": _steps(2), "3": GRIFFIN, "4": _steps(4), "5": _steps(5)}
PAPER_TREES: tuple[Plan, ...] = ("paper",)
GRIFFIN_TABLES: dict[str, GriffinTable] = {
    "1": GriffinTable(
        "Table 1: methods by kind of prompt",
        {"EAGLE-2": EAGLE_2, "HASS": HASS, "GRIFFIN": GRIFFIN},
        "PLD: prompt lookup. Without --data, GRIFFIN is the model's own part.",
        layout="tasks",
        plans=PAPER_TREES,
        engines={"PLD": "prompt-lookup"},
        needs_data=False,
    ),
    "1b": GriffinTable(
        "Figure 1b: accept length by training steps N",
        {f"HASS, N = {n}": _hass(n) for n in range(1, 6)} | {f"GRIFFIN, N = {n}": row for n, row in BY_STEPS.items()},
        "HASS with one step is EAGLE-2.",
        layout="steps",
        plans=PAPER_TREES,
    ),
    "1c": GriffinTable(
        "Figure 1c: misaligned tokens per draft forward",
        {"EAGLE-2": EAGLE_2, "HASS": HASS, "GRIFFIN": GRIFFIN},
        "Of the drafts whose earlier tokens were right, the share whose n-th is not what the target draws.",
        layout="forwards",
        plans=(),
    ),
    "2": GriffinTable(
        "Table 2: token-alignable training (TAT) and draft model (TAD)",
        {
            "GRIFFIN": GRIFFIN,
            "w/o TAT": ONE_STEP,
            "w/o TAD": WITHOUT_BOTH,
            "w/o both (EAGLE-2)": EAGLE_2,
            "HASS (ours, added)": HASS,
        },
        "Without TAT one forward is trained; without TAD the draft model is EAGLE's; HASS trains 3 without the mask.",
    ),
    "3": GriffinTable(
        "Table 3: top-k of the alignment mask",
        {"NA": Variant("top-k-na", NO_MASK), "1": _top_k(1), "3": GRIFFIN, "5": _top_k(5), "10": _top_k(10)},
        "NA: no mask.",
    ),
    "4": GriffinTable("Table 4: training steps", BY_STEPS, "Step n trains the n-th forward of a draft."),
    "5": GriffinTable(
        "Table 5: what the first fusion is fused with once more",
        {
            "token (ours)": GRIFFIN,
            "feature": Variant("fusion-feature", {"fusion": "feature"}),
            "fused": Variant("fusion-fused", {"fusion": "fused"}),
        },
        "In place of x in equation 7: the feature F, or the first fusion h.",
    ),
    "6": GriffinTable(
        "Table 6: parts of the token-guided fusion",
        {
            "GRIFFIN": GRIFFIN,
            "ablation 1": Variant("fusion-not-expanded", {"expansion_size": 0}),
            "ablation 2": Variant("fusion-without-token", {"fusion": "without-token"}),
            "ablation 3": Variant("fusion-without-fused", {"fusion": "without-fused"}),
        },
        "1: neither up-projector nor SiLU. 2: without x in equation 7. 3: without h in equation 7.",
    ),
    "7": GriffinTable(
        "Table 7: size of the expansion",
        {
            "hidden size": Variant("expansion-hidden", expansion="hidden"),
            "feed-forward size (ours)": GRIFFIN,
            "twice that": Variant("expansion-double", expansion="double"),
        },
        "In the target: its hidden size and that of its feed-forward layers.",
    ),
    "8": GriffinTable(
        "Table 8: parts of the token-alignable draft model",
        {"GRIFFIN": GRIFFIN, "w/o TEH": WITHOUT_HEAD, "w/o TGF": WITHOUT_FUSION, "w/o both": WITHOUT_BOTH},
        "TEH: token-enhanced head. TGF: token-guided fusion.",
    ),
    "9": GriffinTable(
        "Table 9: tokens per second by batch, over plain decoding of the same batch",
        {"EAGLE-2": EAGLE_2, "HASS": HASS, "GRIFFIN": GRIFFIN},
        "Chains of at most 2 tokens, T = 0. Without --data, GRIFFIN is the model's own part.",
        layout="batches",
        plans=("chain",),
        temperatures=(0.0,),
        needs_data=False,
    ),
    "10": GriffinTable(
        "Table 10: the loss of features, by kind of prompt",
        {"GRIFFIN": GRIFFIN, "w/o feature loss": Variant("without-feature-loss", {"feature_weight": 0.0})},
        "EAGLE-3, the paper's third row, is not built.",
        layout="tasks",
        plans=PAPER_TREES,
    ),
    "order": GriffinTable(
        "Order of the parts by what they bring",
        {
            "GRIFFIN": GRIFFIN,
            "w/o head": WITHOUT_HEAD,
            "w/o fusion": WITHOUT_FUSION,
            "w/o alignment": ONE_STEP,
            "none of them (EAGLE-2)": EAGLE_2,
        },
        "Rows stand in the paper's order. Mean and range over trainings with other seeds; trees of 60 nodes, depth 6.",
        layout="order",
        plans=("paper",),
    ),
}
