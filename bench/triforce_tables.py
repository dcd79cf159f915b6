"""The tables of the TriForce paper as data, and the figures of arms in them.

Below the paper's tables stands what each arm's time went into.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from rich.console import Group
from rich.table import Table

from bench.ablation_arms import PromptFigures
from bench.ablation_prompts import Prompts, length_of
from bench.tables import new_table, number

TOP_P = 0.9  # at every temperature above 0, as in the authors' scripts
BUDGET = 4096
OWN_BUDGET = 1024  # of the engine itself, beside its summaries
MAX_BUDGET_SHARE = 8  # a prompt is at least so many budgets long: it would be no partial cache otherwise

Plan = Literal["own", "paper", "naive"]
"""As many tokens as pay; the paper's gammas; or the draft model's tokens straight to the full verification."""


@dataclass(frozen=True)
class PromptArm:
    """One generation behind the prompts."""

    options: dict[str, Any] = field(default_factory=dict)  # what it changes in `TriForceOptions`, its cache by name
    temperature: float = 0.6
    plan: Plan = "own"
    prompts: Prompts = field(default_factory=Prompts)


@dataclass(frozen=True)
class Row:
    """One row of a table: what it is called, and its arms by the names that columns use."""

    labels: tuple[str, ...]
    arms: dict[str, PromptArm]


@dataclass(frozen=True)
class Column:
    """Cells with a figure of one arm: `measure` is a name in `tables.MEASURES`."""

    header: str
    arm: str
    measure: str


@dataclass(frozen=True)
class PromptTable:
    """Rows and columns as in the paper."""

    title: str
    label_headers: tuple[str, ...]
    columns: tuple[Column, ...]
    rows: tuple[Row, ...]
    note: str


CACHES = {
    "topk": "Top-K (ref.)",
    "streaming": "StreamingLLM",
    "h2o": "H2O",
    "retrieval": "retrieval",
    "summary": "summary (ours)",
}
TEMPERATURES = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0, 1.2)
BATCHES = ((2, 0.56, 1024), (6, 0.19, 768), (10, 0.12, 768))  # sequences, share of the prompt, budget
BUDGETS = (256, 512, 1024, 2048, 4096, 8192, 16384)
CHUNK_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)
SPEEDUP = Column("speed-up\n(acceptance)", "triforce", "speedup_and_acceptance")
MIDDLE = Column("middle\nacceptance", "triforce", "middle_acceptance")
FIGURE = (Column("acceptance", "triforce", "acceptance"), MIDDLE, Column("speed-up", "triforce", "speedup"))
AT = "At T = 0.6."


def budget_for(prefill: int, most: int) -> int:
    """A budget, or an eighth of a short prompt."""
    return min(most, prefill // MAX_BUDGET_SHARE)


def _table_1(prefill: int, model: str) -> PromptTable:
    def arms(cache: str) -> dict[str, PromptArm]:
        options = {"cache": cache, "gammas": (0, 6), "budget": budget_for(prefill, BUDGET)}
        return {kind: PromptArm(options, 0.0, prompts=Prompts(kind)) for kind in ("books", "needle")}

    return PromptTable(
        "Table 1: acceptance of self-speculation, gamma 6, T = 0",
        ("method",),
        (
            Column("books", "books", "acceptance"),
            Column("needle", "needle", "acceptance"),
            Column("needle repeated\nby plain decoding", "needle", "needle_share"),
        ),
        tuple(Row((label,), arms(cache)) for cache, label in CACHES.items()),
        "The summary holds one entry more for every 32 positions. A model that does not repeat the needle with its "
        "full cache retrieves nothing: then that column is a second text, not a test of retrieval.",
    )


def _table_2(prefill: int, model: str) -> PromptTable:
    own, budget = {"budget": budget_for(prefill, OWN_BUDGET)}, {"budget": budget_for(prefill, BUDGET)}
    by_temperature = (
        Row(("TriForce", f"{t:.1f}"), {"triforce": PromptArm(own, t), "naive": PromptArm(own, t, "naive")})
        for t in TEMPERATURES
    )
    others = {
        "TriForce, retrieval cache": PromptArm(budget | {"cache": "retrieval"}),
        "the same, gammas 2 and 6": PromptArm(budget, plan="paper"),
        "retrieval w/o hierarchy": PromptArm(budget | {"cache": "retrieval", "gammas": (0, 6)}),
        "StreamingLLM w/ hierarchy": PromptArm(budget | {"cache": "streaming"}),
    }
    return PromptTable(
        "Table 2: speed-up over plain decoding, and the share of drafted tokens that was accepted",
        ("method", "T"),
        (SPEEDUP, MIDDLE, Column("naive policy", "naive", "speedup_and_acceptance")),
        (*by_temperature, *(Row((label, "0.6"), {"triforce": arm}) for label, arm in others.items())),
        "Where no gamma stands, drafts have as many tokens as pay; of longer ones a smaller share is accepted.",
    )


def _table_3(prefill: int, model: str) -> PromptTable:
    budget = {"budget": budget_for(prefill, OWN_BUDGET)}
    return PromptTable(
        "Table 3: caches outside the device",
        ("target model", "T"),
        (
            Column("TriForce\n(ms)", "triforce", "ms_per_token"),
            Column("AR\n(ms)", "triforce", "plain_ms_per_token"),
            Column("speed-up", "triforce", "speedup"),
        ),
        tuple(Row((model, f"{t:.1f}"), {"triforce": PromptArm(budget, t)}) for t in (0.6, 0.0)),
        "AR is plain decoding with its cache in the same place.",
    )


def _table_4(prefill: int, model: str) -> PromptTable:
    rows = []
    for num_sequences, share, budget in BATCHES:
        prompts = Prompts("books", num_sequences, share)
        batch = f"({num_sequences}, {length_of(prompts, prefill) / 1000:.1f}K)"
        for t in (0.0, 0.6):
            arms = {
                "triforce": PromptArm({"budget": budget}, t, prompts=prompts),
                "naive": PromptArm({"budget": budget}, t, "naive", prompts),
            }
            rows.append(Row((batch, f"({num_sequences}, {budget})", f"{t:.1f}"), arms))
    return PromptTable(
        "Table 4: batches, speed-up of tokens per second over plain decoding of the same batch",
        ("batch", "budget", "T"),
        (Column("speed-up", "triforce", "speedup"), Column("naive policy", "naive", "speedup")),
        tuple(rows),
        "Until the last sequence of a batch has all its tokens.",
    )


def _figure_6a(prefill: int, model: str) -> PromptTable:
    budgets = [budget for budget in BUDGETS if budget < prefill]
    rows = (Row((f"{budget:,}",), {"triforce": PromptArm({"budget": budget}, plan="paper")}) for budget in budgets)
    return PromptTable("Figure 6a: cache budget, gammas 2 and 6", ("budget",), FIGURE, tuple(rows), AT)


def _figure_6b(prefill: int, model: str) -> PromptTable:
    budget = budget_for(prefill, BUDGET)
    sizes = [size for size in CHUNK_SIZES if 2 * size <= budget]
    arms = {size: PromptArm({"budget": budget, "chunk_size": size}, plan="paper") for size in sizes}
    title = f"Figure 6b: chunk size at a budget of {budget:,}, gammas 2 and 6"
    rows = (Row((f"{size:,}",), {"triforce": arm}) for size, arm in arms.items())
    return PromptTable(title, ("chunk size",), FIGURE, tuple(rows), AT)


PROMPT_TABLES: dict[str, Callable[[int, str], PromptTable]] = {
    "1": _table_1,
    "2": _table_2,
    "3": _table_3,
    "4": _table_4,
    "6a": _figure_6a,
    "6b": _figure_6b,
}
"""Each takes the prompt's length and the model's name."""
OFFLOADED = ("3",)


Key = tuple[int, str]  # row number and name of an arm
Results = dict[Key, PromptFigures]

RATE = ".3f"


def _speedup(figures: PromptFigures) -> str:
    return f"{figures.speedup:.2f}x"


MEASURES: dict[str, Callable[[PromptFigures], str]] = {
    "acceptance": lambda figures: number(figures.acceptance, RATE),
    "middle_acceptance": lambda figures: number(figures.middle_acceptance, RATE),
    "speedup": _speedup,
    "speedup_and_acceptance": lambda figures: f"{_speedup(figures)} ({number(figures.acceptance, RATE)})",
    "ms_per_token": lambda figures: f"{figures.ms_per_token:.2f}",
    "plain_ms_per_token": lambda figures: f"{figures.plain_ms_per_token:.2f}",
    "needle_share": lambda figures: number(figures.needle_share, ".0%"),
}


def render(table: PromptTable, results: Results) -> Group:
    """The paper's table, speed and counts of each arm, and its time per step."""
    notes = f"{table.note}\n{_compared(results)}"
    return Group(_paper(table, results), _speeds(table, results), _per_step(table, results), notes)


def summary(table: PromptTable, key: Key, figures: PromptFigures) -> str:
    """One arm in a line, as soon as it has run."""
    return (
        f"{arm_name(table, key)}: {figures.ms_per_token:.2f} ms a token, plain decoding "
        f"{figures.plain_ms_per_token:.2f} ({_speedup(figures)}), acceptance {number(figures.acceptance, RATE)}"
    )


def arm_name(table: PromptTable, key: Key) -> str:
    """The row's labels and, where it is not TriForce itself, the arm's own name."""
    row, name = table.rows[key[0]], key[1]
    return " ".join([*row.labels, *([name] if name != "triforce" else [])])


def _paper(table: PromptTable, results: Results) -> Table:
    """Rows and columns of the paper; a dash where a row has no such arm."""
    rich = new_table(table.title, table.label_headers, [column.header for column in table.columns])
    for index, row in enumerate(table.rows):
        cells = [
            MEASURES[column.measure](results[index, column.arm]) if column.arm in row.arms else "-"
            for column in table.columns
        ]
        rich.add_row(*row.labels, *cells)
    return rich


def _speeds(table: PromptTable, results: Results) -> Table:
    headers = ["ms per\ntoken", "plain\nms", "speed-\nup", "tokens", "drafted", "rounds"]
    rich = new_table("Speed, and counts per step of one sequence", ("arm",), headers)
    for key, figures in results.items():
        counts = (figures.tokens_per_step, figures.drafted_per_step, figures.rounds_per_step)
        times = f"{figures.ms_per_token:.2f}", f"{figures.plain_ms_per_token:.2f}", _speedup(figures)
        rich.add_row(arm_name(table, key), *times, *(f"{count:.2f}" for count in counts))
    return rich


def _per_step(table: PromptTable, results: Results) -> Table:
    headers = ["draft\nmodel", "checks", "partial\ncaches", "verify", "commit", "first\nstep"]
    rich = new_table("Time per step (ms), the first one apart", ("arm",), headers)
    for key, figures in results.items():
        draft, step = figures.draft_ms, figures.step_ms
        times = (draft["propose"], draft["check"], draft["follow"], step["verify"], step["commit"])
        rich.add_row(arm_name(table, key), *(f"{ms:.2f}" for ms in times), f"{figures.first_step_ms:,.0f}")
    return rich


def _compared(results: Results) -> str:
    plain = sorted({figures.num_plain_tokens for figures in results.values()})
    tokens = sorted({figures.num_tokens for figures in results.values()})
    return (
        f"{_either(tokens)} tokens with each arm, in turns with plain decoding, which said the same: "
        f"{_either(plain)} tokens, from the same state."
    )


def _either(counts: list[int]) -> str:
    return " or ".join(f"{count:,}" for count in counts)
