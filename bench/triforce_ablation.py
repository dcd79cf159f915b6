"""`python -m bench ablation triforce`: a table of the paper; its arms all go on from prompts that are read once.

An arm's drafter is TriForce as the arm wants it, or the naive policy that the paper compares it with (5.1)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from pydantic import Field, model_validator
from rich.console import Group

from bench.ablation_arms import PromptArms, PromptFigures, num_plain_tokens
from bench.ablation_prompts import NEEDLE, Prompt, Prompts, length_of, make_prompts, num_text_tokens, read_prompt
from bench.compared_caches import StreamingKVCache, with_cache
from bench.long import Report
from bench.triforce_tables import OFFLOADED, PROMPT_TABLES, TOP_P, PromptArm, PromptTable, Results, render, summary
from bench.variants import TRIFORCE_PAPER as PAPER
from swiftbatch.worker.bench_texts import encode, text_tokens
from swiftbatch.worker.decode_bench import BenchOptions, bench_slots, check_length
from swiftbatch.worker.drafters.catalogue import check_parts
from swiftbatch.worker.drafters.self_speculation.draft_chain import RoundPlan
from swiftbatch.worker.drafters.self_speculation.round_planner import MeasuredPlanner
from swiftbatch.worker.drafters.self_speculation.self_speculation import SelfSpeculationDrafter
from swiftbatch.worker.drafters.triforce import DraftModel, DraftModelProposer, TriForceOptions, triforce
from swiftbatch.worker.forward.step_costs import Costs, step_costs_of
from swiftbatch.worker.forward.target_model import TargetModel
from swiftbatch.worker.kernels.kernel_sizes import TILE_ROWS
from swiftbatch.worker.kv.free_memory import check_folder
from swiftbatch.worker.kv.gpu_memory_plan import SlotsWanted
from swiftbatch.worker.kv.sparse_cache import NUM_PINNED
from swiftbatch.worker.model.model_files import ModelFiles, locate_model

MIN_PREFILL = 257  # the smallest budget of figure 6a, and one; a needle has room too


class PromptAblationOptions(BenchOptions):
    """The table asked for, how much is read before, and how many tokens each arm generates."""

    draft_model: Path | None = None
    table: str
    prefill: int = Field(ge=MIN_PREFILL)
    num_tokens: int = Field(gt=TILE_ROWS)  # more than the first step commits
    seed: int = Field(ge=0)
    text: Path
    kv_offload: Path | None = None

    @model_validator(mode="after")
    def _only_where_they_belong(self) -> PromptAblationOptions:
        if (self.kv_offload is not None) != (self.table in OFFLOADED):
            raise ValueError(f"table {self.table}: --kv-offload DIR belongs to table 3, and table 3 needs it")
        return self

    @property
    def num_plain_tokens(self) -> int:
        return num_plain_tokens(self.num_tokens, self.prefill)

    def layout(self) -> PromptTable:
        return PROMPT_TABLES[self.table](self.prefill, Path(self.model).name)


def run_prompt_ablation(options: PromptAblationOptions, report: Report = lambda line: None) -> Group:
    """Run all arms and lay out the tables. Writes JSON after each arm. Raises BenchError, ModelError."""
    files = locate_model(options.model)
    _check(options, files)
    table = options.layout()
    text_ids = text_tokens(options.text, files, max(num_text_tokens(p, options.prefill) for p in _all_prompts(table)))
    target = options.load(files, _slots_wanted(options, files, table))
    results: Results = {}
    for prompts in _all_prompts(table):
        made = make_prompts(prompts, options.prefill, text_ids, files)
        behind = _read(options, target, made, report)
        costs = step_costs_of(behind.target)
        for key, arm in _arms_behind(table, prompts):
            pair = behind.run(new_drafter(behind.target, costs, arm, options.draft_model), arm.temperature)
            results[key] = PromptFigures.of(*pair, made[0].expected_ids)
            report(summary(table, key, results[key]))
            _save(options, table, results, target)
        del behind  # its caches make room for the next ones
    return render(table, results)


def _slots_wanted(options: PromptAblationOptions, files: ModelFiles, table: PromptTable) -> SlotsWanted | None:
    """Return the needs of all prompts; None where caches go to a folder."""
    if options.kv_offload is not None:
        return None
    num_tokens = max(options.num_tokens, len(encode(files, NEEDLE)))
    longest = max(length_of(prompts, options.prefill) for prompts in _all_prompts(table)) + num_tokens
    return bench_slots(["triforce"], longest, max(prompts.num_sequences for prompts in _all_prompts(table)))


def _check(options: PromptAblationOptions, files: ModelFiles) -> None:
    """Refuse what cannot run before minutes of reading. Raises BenchError, ModelError, KVRoomError."""
    length = max(length_of(prompts, options.prefill) for prompts in _all_prompts(options.layout()))
    check_length(files, length, options.num_tokens)
    check_parts("triforce", options.model, files.fingerprint, options.draft_model)
    check_folder(None if options.kv_offload is None else str(options.kv_offload))


def _read(options: PromptAblationOptions, target: TargetModel, prompts: list[Prompt], report: Report) -> PromptArms:
    """Read the prompts, in memory; then move them to where the arms want them. A needle is to be said to its end."""
    num_expected = len(prompts[0].expected_ids)
    num_tokens, num_plain = num_expected or options.num_tokens, num_expected or options.num_plain_tokens
    report(
        f"reading {len(prompts)} x {len(prompts[0].token_ids):,} tokens{' with a needle' if num_expected else ''}; "
        f"each arm generates {num_tokens} behind each, in turns with plain decoding of {num_plain}"
    )
    read = [read_prompt(target, prompt, num_tokens) for prompt in prompts]
    if options.kv_offload is not None:
        target = TargetModel(target.forwards, target.files, str(options.kv_offload))
        read = [prompt.copy_to(target, num_tokens) for prompt in read]
    return PromptArms(target, read, num_tokens, num_plain, options.seed, TOP_P)


def _all_prompts(table: PromptTable) -> list[Prompts]:
    """List the prompts that are to be read, each once."""
    return list(dict.fromkeys(arm.prompts for row in table.rows for arm in row.arms.values()))


def _arms_behind(table: PromptTable, prompts: Prompts) -> Iterator[tuple[tuple[int, str], PromptArm]]:
    """The arms that go on from these prompts, with row number and name."""
    for number, row in enumerate(table.rows):
        for name, arm in row.arms.items():
            if arm.prompts == prompts:
                yield (number, name), arm


def _save(options: PromptAblationOptions, table: PromptTable, results: Results, target: TargetModel) -> None:
    options.write({"arms": _documents(table, results)}, target)


def _documents(table: PromptTable, results: Results) -> list[dict[str, Any]]:
    return [
        {"row": table.rows[number].labels, "name": name}
        | asdict(table.rows[number].arms[name])
        | {"figures": figures.model_dump()}
        for (number, name), figures in results.items()
    ]


def new_drafter(target: TargetModel, costs: Costs, arm: PromptArm, parts_folder: Path | None) -> SelfSpeculationDrafter:
    """A drafter that has seen nothing yet. Raises ModelError where no draft model fits this target."""
    if arm.plan == "naive":
        return _naive_policy(target, costs, parts_folder)
    return triforce(target, costs, parts_folder, triforce_options(arm))


def triforce_options(arm: PromptArm) -> TriForceOptions:
    return replace(PAPER if arm.plan == "paper" else TriForceOptions(), **with_cache(arm.options))


class NaivePlanner(MeasuredPlanner):
    """Never plans a round, so that the naive policy is as fast as it can be."""

    def plan(self, length: int, num_sequences: int, max_depth: int) -> RoundPlan:
        return RoundPlan(0, 0, 0, self.tree(length, num_sequences, max_depth).num_nodes)


def _naive_policy(target: TargetModel, costs: Costs, parts_folder: Path | None) -> SelfSpeculationDrafter:
    """Make a drafter whose draft model's tokens go straight to the full verification."""
    proposer = DraftModelProposer(DraftModel.load(parts_folder, target), 1, target.forwards.new_batch_sampler())
    planner = NaivePlanner(costs(), NUM_PINNED, proposer.node_seconds)
    return SelfSpeculationDrafter(
        target, proposer, planner, StreamingKVCache, NUM_PINNED
    )  # no round ever asks for the cache
