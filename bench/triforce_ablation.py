"""The TriForce paper's tables; all arms continue prompts read once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from bench.compared_caches import StreamingKVCache, without_cache
from bench.independent_sequences import IndependentSequences
from bench.options import ALL, one_of
from bench.prompt_arms import (
    NEEDLE,
    Prompt,
    PromptArms,
    Prompts,
    figures_of,
    length_of,
    make_prompts,
    num_plain_tokens,
    num_text_tokens,
    read_prompt,
)
from bench.tables import Curve, Record, only
from bench.text_samples import sampled_tokens
from bench.triforce_figures import DIVERGENCE_AT, FORWARD_FIGURES, Measured
from swiftbatch.worker.decode_bench import BenchError, BenchOptions, bench_slots, check_length, encode
from swiftbatch.worker.drafters.catalogue import check_parts
from swiftbatch.worker.drafters.drafter_interface import Drafter
from swiftbatch.worker.drafters.engine_options import TRIFORCE_PAPER, WINDOW, TriForceOptions, changed
from swiftbatch.worker.drafters.self_speculation import RoundPlan, SelfSpeculationDrafter, partial_cache
from swiftbatch.worker.drafters.triforce import DraftModel, DraftModelProposer, hierarchy, triforce
from swiftbatch.worker.forward.step_costs import Costs, step_costs_of
from swiftbatch.worker.forward.target_model import TargetModel
from swiftbatch.worker.kv.gpu_memory_plan import SlotsWanted
from swiftbatch.worker.kv.kv_capacity import check_folder
from swiftbatch.worker.kv.sparse_cache import NUM_PINNED, SparseCacheFactory
from swiftbatch.worker.model.model_files import ModelFiles, locate_model

COLUMNS = (
    *("row", "arm", "ms_per_token", "plain_ms_per_token", "speedup", "acceptance", "tokens_per_step"),
    *("drafted_per_step", "rounds_per_step"),
)
TOP_P = 0.9  # at every temperature above 0, as in the authors' scripts
BUDGET = 4096
OWN_BUDGET = 1024  # the engine's own, besides its summaries
MAX_BUDGET_SHARE = 8  # prompts have at least so many budgets, otherwise the cache would not be partial

Plan = Literal["own", "paper", "naive", "independent"]
"""The paper's gammas where they pay; at every step; the draft model's tokens straight to the full verification; or as
many independent chains as the width says, at every step."""
NAIVE = RoundPlan(num_rounds=0, num_round_nodes=0, chain_length=0, num_nodes=6)


@dataclass(frozen=True)
class PromptArm:
    """One generation after the prompts."""

    options: dict[str, Any] = field(default_factory=dict)  # its changes of `TriForceOptions`, the cache by name
    temperature: float = 0.6
    plan: Plan = "own"
    prompts: Prompts = field(default_factory=Prompts)


@dataclass(frozen=True)
class Row:
    """A table's row: labels, and arms by the names that columns use."""

    labels: tuple[str, ...]
    arms: dict[str, PromptArm]


@dataclass(frozen=True)
class Column:
    """A column: the field `measure` of one arm's record."""

    header: str
    arm: str
    measure: str


@dataclass(frozen=True)
class PromptTable:
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
LENGTH_PARTS = (16, 8, 4, 2, 1)  # contexts of figure 5, as parts of the prompt
WIDTHS = (1, 2, 4, 8)
TREE, CHAINS = "tokens per step, best candidates", "tokens per step, independent chains"
SPEEDUP = Column("speed-up", "triforce", "speedup")
ACCEPTANCE = Column("acceptance", "triforce", "acceptance")
MIDDLE = Column("middle acceptance", "triforce", "middle_acceptance")
FIGURE = (ACCEPTANCE, MIDDLE, SPEEDUP)
AT = "At T = 0.6."


def budget_for(prefill: int, most: int) -> int:
    """Return a budget, at most an eighth of the prompt."""
    return min(most, prefill // MAX_BUDGET_SHARE)


WITHOUT_HIERARCHY = {"gamma_1": 0, "gamma_2": 6, "at_every_step": True}


def _table_1(prefill: int, model: str) -> PromptTable:
    def arms(cache: str) -> dict[str, PromptArm]:
        options = WITHOUT_HIERARCHY | {"cache": cache, "budget": budget_for(prefill, BUDGET)}
        return {kind: PromptArm(options, 0.0, prompts=Prompts(kind)) for kind in ("books", "needle")}

    return PromptTable(
        "Table 1: acceptance of self-speculation, gamma 6, T = 0",
        ("method",),
        (
            Column("books", "books", "acceptance"),
            Column("needle", "needle", "acceptance"),
            Column("needle repeated by plain decoding", "needle", "needle_share"),
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
        "retrieval w/o hierarchy": PromptArm(budget | WITHOUT_HIERARCHY | {"cache": "retrieval"}),
        "StreamingLLM w/ hierarchy": PromptArm(budget | {"cache": "streaming"}),
    }
    return PromptTable(
        "Table 2: speed-up over plain decoding, and the share of drafted tokens that was accepted",
        ("method", "T"),
        (SPEEDUP, ACCEPTANCE, MIDDLE, *(Column(f"naive {name}", "naive", name) for name in ("speedup", "acceptance"))),
        (*by_temperature, *(Row((label, "0.6"), {"triforce": arm}) for label, arm in others.items())),
        "Where no gamma stands, steps have drafts of gammas 2 and 6 only where these pay.",
    )


def _table_3(prefill: int, model: str) -> PromptTable:
    budget = {"budget": budget_for(prefill, OWN_BUDGET)}
    return PromptTable(
        "Table 3: caches outside the device",
        ("target model", "T"),
        (
            Column("TriForce (ms)", "triforce", "ms_per_token"),
            Column("AR (ms)", "triforce", "plain_ms_per_token"),
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


def _figure_5(prefill: int, model: str) -> PromptTable:
    rows = []
    for part in LENGTH_PARTS:
        prompts = Prompts(share=1 / part)
        budget = {"budget": budget_for(length_of(prompts, prefill), BUDGET)}
        arms = {
            "triforce": PromptArm(budget, plan="paper", prompts=prompts),
            "naive": PromptArm(budget, 0.6, "naive", prompts),
        }
        rows.append(Row((f"{length_of(prompts, prefill):,}",), arms))
    columns = SPEEDUP, Column("bound", "triforce", "speedup_bound"), ACCEPTANCE, Column("naive", "naive", "speedup")
    note = "The bound is the speed-up if the same steps had accepted every drafted token. " + AT
    return PromptTable("Figure 5: speed-up by context length, gammas 2 and 6", ("context",), columns, tuple(rows), note)


def _figure_6c(prefill: int, model: str) -> PromptTable:
    budget = {"budget": budget_for(prefill, BUDGET)}
    rows = []
    for width in WIDTHS:
        options = budget | {"width": width}
        arms = {"triforce": PromptArm(options, plan="paper"), "independent": PromptArm(options, plan="independent")}
        rows.append(Row((str(width), str(6 * width)), arms))
    columns = (
        Column(TREE, "triforce", "tokens_per_step"),
        Column("speed-up", "triforce", "speedup"),
        Column(CHAINS, "independent", "tokens_per_step"),
        Column("speed-up of these", "independent", "speedup"),
    )
    return PromptTable("Figure 6c: trees in the hierarchy", ("width", "nodes"), columns, tuple(rows), AT)


PROMPT_TABLES: dict[str, Callable[[int, str], PromptTable]] = {
    "1": _table_1,
    "2": _table_2,
    "3": _table_3,
    "4": _table_4,
    "5": _figure_5,
    "6a": _figure_6a,
    "6b": _figure_6b,
    "6c": _figure_6c,
}
"""Each takes the prompt's length and the model's name."""
ON_DISK = "3"  # the table of caches outside the device
CURVES = {
    name: Curve(x, (("acceptance", "middle acceptance"), ("speed-up",)))
    for name, x in (("6a", "budget"), ("6b", "chunk size"))
} | {
    "2a": Curve("length", tuple((f"StreamingLLM T = {t:g}", f"sliding window T = {t:g}") for t in DIVERGENCE_AT)),
    "5": Curve("context", (("speed-up", "bound", "naive"),)),
    "6c": Curve("nodes", ((TREE, CHAINS), ("speed-up", "speed-up of these"))),
}


class Options(BenchOptions):
    table: str = ALL  # a name in `PROMPT_TABLES` or `FORWARD_FIGURES`
    text: Path  # whole books; a prompt begins anywhere in it, as the seed says
    draft_model: Path | None = None
    naive_window: int = WINDOW  # newest tokens of the naive policy's draft model; the paper's sees 1K in all: 504
    prefill: int = 32_768  # at least 257; in table 4 the total
    num_tokens: int = 256  # more than the first step commits
    seed: int = 0
    kv_offload: Path | None = None  # table 3: the folder of caches

    def layout(self) -> PromptTable:
        known: dict[str, object] = {**PROMPT_TABLES, **FORWARD_FIGURES}
        one_of(known, self.table)
        return PROMPT_TABLES[self.table](self.prefill, Path(self.model).name)


def each_table(options: Options) -> list[Options]:
    if options.table != ALL:
        return [options]
    names = [name for name in (*PROMPT_TABLES, *FORWARD_FIGURES) if name != ON_DISK or options.kv_offload is not None]
    folders = {ON_DISK: options.kv_offload}
    return [options.model_copy(update={"table": name, "kv_offload": folders.get(name)}) for name in names]


def run(options: Options) -> Iterator[Record]:
    """Repeat a table or figure of the TriForce paper, with prompts of `--prefill` tokens (table 4: in all).

    Every arm continues the same prompt, as plain decoding does, and must give the same tokens. Table 3 needs
    --kv-offload DIR for its caches.

    \b
    Example:
      python -m bench papers triforce --table 2 --prefill 100000 --text books.jsonl --json table2.jsonl
    """
    if options.table in FORWARD_FIGURES:
        yield from _forward_figure(options)
        return
    table, files = options.layout(), locate_model(options.model)
    if (options.kv_offload is not None) != (options.table == ON_DISK):
        raise BenchError(f"table {options.table}: --kv-offload DIR belongs to table 3, and table 3 needs it")
    check_length(files, max(length_of(prompts, options.prefill) for prompts in _all_prompts(table)), options.num_tokens)
    check_parts("triforce", options.model, files.fingerprint, options.draft_model)
    check_folder(None if options.kv_offload is None else str(options.kv_offload))
    most = max(num_text_tokens(prompts, options.prefill) for prompts in _all_prompts(table))
    text_ids = sampled_tokens(options.text, files, most, options.seed)
    target = options.load(files, _slots_wanted(options, files, table))
    for prompts in _all_prompts(table):
        made = make_prompts(prompts, options.prefill, text_ids, files)
        behind = _read(options, target, made)
        costs = step_costs_of(behind.target)
        for labels, name, arm in _arms_behind(table, prompts):
            pair = behind.run(
                new_drafter(behind.target, costs, arm, options.draft_model, options.naive_window), arm.temperature
            )
            place = {"table": options.table, "row": " ".join(labels), "arm": name, "temperature": arm.temperature}
            yield place | {"plan": arm.plan, "options": arm.options} | figures_of(*pair, made[0].expected_ids)
        del behind  # frees its caches for the next ones


def _forward_figure(options: Options) -> Iterator[Record]:
    files = locate_model(options.model)
    longest = options.prefill + max(options.num_tokens, len(encode(files, NEEDLE)))
    check_length(files, options.prefill, longest - options.prefill)
    text_ids = sampled_tokens(options.text, files, options.prefill + options.num_tokens, options.seed)
    target = options.load(files, bench_slots(["triforce"], longest))
    budget = budget_for(options.prefill, BUDGET)
    on = Measured(target, text_ids, options.prefill, options.num_tokens, budget, options.seed, options.draft_model)
    for record in FORWARD_FIGURES[options.table].measure(on):
        yield {"table": options.table, "budget": budget} | record


def shown(records: list[Record], options: Options) -> Iterator[Record]:
    """Yield the paper's table, then speed and counts of each arm."""
    if (figure := FORWARD_FIGURES.get(options.table)) is not None:
        yield {"words": figure.title}
        yield from figure.shown(records)
        return
    table, found = options.layout(), {(record["row"], record["arm"]): record for record in records}
    if records:
        yield {"words": table.title}
    for row in table.rows if records else ():
        cells = {
            column.header: found.get((" ".join(row.labels), column.arm), {}).get(column.measure)
            for column in table.columns
        }
        yield dict(zip(table.label_headers, row.labels, strict=True)) | cells
    yield {"words": table.note}
    yield from only(records, COLUMNS)


def _slots_wanted(options: Options, files: ModelFiles, table: PromptTable) -> SlotsWanted | None:
    """Return None for a folder of caches."""
    if options.kv_offload is not None:
        return None
    num_tokens = max(options.num_tokens, len(encode(files, NEEDLE)))
    longest = max(length_of(prompts, options.prefill) for prompts in _all_prompts(table)) + num_tokens
    return bench_slots(["triforce"], longest, max(prompts.num_sequences for prompts in _all_prompts(table)))


def _read(options: Options, target: TargetModel, prompts: list[Prompt]) -> PromptArms:
    """Read the prompts into the arms' place."""
    num_expected = len(prompts[0].expected_ids)
    num_tokens = num_expected or options.num_tokens
    num_plain = num_expected or num_plain_tokens(options.num_tokens, options.prefill)
    read = [read_prompt(target, prompt, num_tokens) for prompt in prompts]
    if options.kv_offload is not None:
        target = TargetModel(target.forwards, target.files, str(options.kv_offload))
        read = [prompt.copy_to(target, num_tokens) for prompt in read]
    return PromptArms(target, read, num_tokens, num_plain, options.seed, TOP_P)


def _all_prompts(table: PromptTable) -> list[Prompts]:
    return list(dict.fromkeys(arm.prompts for row in table.rows for arm in row.arms.values()))


def _arms_behind(table: PromptTable, prompts: Prompts) -> Iterator[tuple[tuple[str, ...], str, PromptArm]]:
    for row in table.rows:
        yield from ((row.labels, name, arm) for name, arm in row.arms.items() if arm.prompts == prompts)


def new_drafter(
    target: TargetModel, costs: Costs, arm: PromptArm, parts_folder: Path | None, naive_window: int = WINDOW
) -> Drafter:
    """Raises ModelError if no draft model fits."""
    if arm.plan == "naive":
        return _naive_policy(target, parts_folder, naive_window)
    if arm.plan == "independent":
        return _independent(target, parts_folder, drafting(arm)[0])
    return triforce(target, costs, parts_folder, *drafting(arm))


def drafting(arm: PromptArm) -> tuple[TriForceOptions, SparseCacheFactory | None]:
    changes, new_cache = without_cache(arm.options)
    return changed(TriForceOptions() if arm.plan == "own" else TRIFORCE_PAPER, changes), new_cache


def _naive_policy(target: TargetModel, parts_folder: Path | None, window: int) -> Drafter:
    draft_model = DraftModel.load(parts_folder, target, TriForceOptions(window=window))
    proposer = DraftModelProposer(draft_model, target.forwards.new_batch_sampler())
    # no round ever uses the cache
    return SelfSpeculationDrafter(target, proposer, StreamingKVCache, NUM_PINNED, NAIVE)


def _independent(target: TargetModel, parts_folder: Path | None, options: TriForceOptions) -> Drafter:
    draft_model = DraftModel.load(parts_folder, target, options)
    proposer = IndependentSequences(draft_model, target.forwards.new_batch_sampler(), options.width)
    plan = hierarchy(options.gamma_1, options.gamma_2, options.width)
    return SelfSpeculationDrafter(target, proposer, partial_cache(options), options.partial_budget, plan)
