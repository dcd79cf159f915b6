"""Digests of the product's output, to compare before and after a change that must alter no token.

`python -m bench.digests --model embedded cli --out before.json`, then `--check before.json`.

A token cell is the SHA-256 of a job's choices. Engines must agree in any batch and after any kills. A `drafts` cell
hashes an engine's proposals, under a clock that advances at each reading.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import logging
import math
import os
import shutil
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from difflib import unified_diff
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any

os.environ.setdefault("TRITON_INTERPRET", "1")  # read at the first import; CPUs use Triton for nothing else
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import numpy as np

from bench.surface import surface
from swiftbatch.jobs.job import unpacked
from swiftbatch.jobs.run.run import Run
from swiftbatch.jobs.sampling_params import SamplingParams
from swiftbatch.scheduler.driver.queue_loading import put_logs_in_place
from swiftbatch.scheduler.runs.run_settings import Settings
from swiftbatch.scheduler.runs.submission import submission
from swiftbatch.worker.config import EngineConfig
from swiftbatch.worker.decode_bench import BY_NAME
from swiftbatch.worker.drafters.catalogue import CHECKPOINT_ENGINES, ENGINES, EngineEntry, create_drafter
from swiftbatch.worker.drafters.mtp.predictor import PredictorModule
from swiftbatch.worker.engine.engine import Engine
from swiftbatch.worker.forward.step_costs import StepCosts, measure_step_costs
from swiftbatch.worker.forward.target_model import TargetModel
from swiftbatch.worker.model.causal_lm import decoder_of
from swiftbatch.worker.model.model_files import ModelFiles, locate_model, read_config
from swiftbatch.worker.sampling.sequence import Sequence
from swiftbatch.worker.session.session import WorkerSession
from swiftbatch.worker.session.work_messages import Assignment, Orders
from swiftbatch.worker.training.train_mtp import save_mtp

Cells = dict[str, str]

EMBEDDED, INTERPRETER, CLI = "embedded", "interpreter", "cli"
NUM_TOKENS, FEW_TOKENS = 160, 24  # per job on the embedded model, and on others
REAL_ENGINES = ("auto", "autoregressive", "prompt-lookup", "suffix", "token-recycling")
ALONE = ("auto", "autoregressive")  # engines that also run one job at a time on any model
KILLED_AT = (0.2, 0.45, 0.7)  # shares of a job's tokens
MARKERS = ("<think>", "</think>")
PROMPT = (
    "The mill stood where the river bent, and the miller's daughter kept its accounts. Every evening she wrote down "
    "what the farmers had brought and what they had taken home, and every evening the sum came out a little short."
)
SCHEMA = {
    "type": "object",
    "properties": {
        "names": {"type": "array", "items": {"type": "string", "maxLength": 9}, "minItems": 9, "maxItems": 12},
        "sum": {"type": "integer"},
    },
    "required": ["names", "sum"],
    "additionalProperties": False,
}
FILTERS = {"temperature": 1.0, "top_k": 60, "top_p": 0.97, "min_p": 0.01, "eta": 1e-3}
PENALTIES = {"repetition_penalty": 1.2, "penalty_window": 64, "frequency_penalty": 0.4, "presence_penalty": 0.3}
OTHERS = {"logit_bias": {"11": 1.5, "40": -2.0}, "bad_words": ["miller", "the river"], "min_tokens": 20}


def day_book(num_days: int) -> str:
    return "".join(
        f"On day {day} they brought {7 * day % 101} sacks of wheat, {day % 13} of rye. " for day in range(num_days)
    )


KINDS: dict[str, dict[str, Any]] = {  # fields of lines; None skips a kind
    "greedy": {"temperature": 0.0},
    "filters": FILTERS,
    "penalties": {"temperature": 0.8, **PENALTIES, **OTHERS},
    "schema": {"temperature": 0.9, "ignore_eos": None, "structured_outputs": {"json": SCHEMA}},
    "thinking": {"prompt": f"{PROMPT}\n{MARKERS[0]}", "temperature": 0.7, "thinking_token_budget": 50},
    "logprobs": {"temperature": 0.7, "logprobs": 3},
    "n": FILTERS | {"n": 3},
    "long": FILTERS | {"prompt": day_book(190), "top_k": 0},  # longer than all partial caches
    "chat": {"prompt": None, "messages": [{"role": "user", "content": PROMPT}], "temperature": 0.0},
}
REAL_KINDS = {name: fields for name, fields in KINDS.items() if name != "chat"}  # some have no template
REAL_KINDS["long"] = KINDS["long"] | {"prompt": day_book(30)}  # longer than Gemma's window
REAL_KINDS["thinking"] = KINDS["thinking"] | {"thinking_token_budget": 10}
COSTS = StepCosts((64, 8192), 1e-3 * np.array([[2.0, 2.2, 2.5, 3.0, 4.0, 7.0], [3.5, 3.8, 4.2, 5.0, 7.0, 12.0]]))


class Setting(EngineEntry):
    """An engine that only benchmarks can name."""

    def factory(self) -> Any:
        return BY_NAME[self.place]


def prepare() -> None:
    """Share loaded models and skip timing forwards."""
    for name in BY_NAME.keys() - ENGINES.keys() - CHECKPOINT_ENGINES.keys():
        of = next(entry for known, entry in ENGINES.items() if name.startswith(known))
        CHECKPOINT_ENGINES[name] = Setting(**vars(of) | {"place": name})
    load, known = TargetModel.load, {}

    def loaded(files: ModelFiles, *how: Any) -> TargetModel:
        key = (files.path, how[0])
        if key not in known:
            known[key] = load(files, *how)
        return known[key]

    TargetModel.load = loaded  # type: ignore[method-assign,assignment]
    StepCosts.replay_seconds = lambda *_: math.inf  # type: ignore[method-assign]  # what can be loaded is loaded
    setattr(sys.modules[measure_step_costs.__module__], measure_step_costs.__name__, lambda _: COSTS)


def sha(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


class Bench:
    """A model, and a run that every cell copies."""

    def __init__(self, model: str, folder: Path) -> None:
        self.model, self.folder, self._numbers = model, folder, itertools.count()
        self.num_tokens, self._kinds = (NUM_TOKENS, KINDS) if model == EMBEDDED else (FEW_TOKENS, REAL_KINDS)
        base = {"prompt": PROMPT, "max_tokens": self.num_tokens, "seed": 5, "ignore_eos": True}
        lines = [{"custom_id": kind} | base | fields for kind, fields in self._kinds.items()]
        lines = [{name: value for name, value in line.items() if value is not None} for line in lines]
        (folder / "jobs.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines), encoding="utf-8")
        said = {"model": model, "num_threads": 1, "device": "cpu", "thinking_markers": MARKERS}
        with submission(str(folder / "jobs.jsonl"), str(folder / "run"), Settings(said), is_strict=True) as made:
            self.records = made.run.jobs()

    def run(self) -> Run:
        place = self.folder / f"run-{next(self._numbers)}"
        return Run.open(str(shutil.copytree(self.folder / "run", place)))

    def session(self, run: Run, engine: str, attempt: int) -> WorkerSession:
        config = EngineConfig(
            model=self.model,
            engine=engine,
            draft_model=str(self.folder) if engine == "mtp" else None,
            device="cpu",
            thinking_markers=MARKERS,
            checkpoint="tokens" if attempt == 2 else "state",
            checkpoint_seconds=0.01,
            checkpoint_tokens=max(8, self.num_tokens // 6),
        )
        return WorkerSession(config, run.store.uri, f"w{attempt}")

    def undisturbed(self, engine: str, num_slots: int) -> Cells:
        run = self.run()
        self._work(self.session(run, engine, 1), self._orders(run, 1, num_slots), math.inf)
        return self._cells(run, f"{engine}/{num_slots}/undisturbed")

    def killed(self, engine: str, num_slots: int) -> Cells:
        """Run the jobs in four workers in turn, the first three killed."""
        run, lost = self.run(), []
        ids = [record.job_id for record in self.records]
        for together in [ids] if num_slots > 1 else [[job_id] for job_id in ids]:
            for attempt, part in enumerate((*KILLED_AT, math.inf), 1):
                lost.append(self.session(run, engine, attempt))
                orders = self._orders(run, attempt, num_slots, set(together))
                self._work(lost[-1], orders, part * self.num_tokens)
        cells = self._cells(run, f"{engine}/{num_slots}/killed")
        for worker in lost:  # their threads hold caches
            worker.work(Orders(cancelled=tuple(ids)), 0.0)
        return cells

    def _orders(self, run: Run, attempt: int, num_slots: int, ids: set[str] | None = None) -> Orders:
        put_logs_in_place(run)
        ended, _ = run.ended()
        given = [
            Assignment.of(record, attempt, attempt)
            for record in self.records
            if record.job_id not in ended and (ids is None or record.job_id in ids)
        ]
        return Orders(tuple(given[:num_slots]), tuple(given[num_slots:]), num_slots=num_slots)

    def _work(self, worker: WorkerSession, orders: Orders, most: float) -> None:
        """Work until the jobs ended or have `most` tokens on average."""
        left, seconds = len(orders.assignments + orders.reserve), 0.5 if most == math.inf else 1e-5  # of one step
        while left:
            report = worker.work(orders, seconds)
            orders = Orders(num_slots=orders.num_slots)
            if refused := report.of("failed", "refused"):
                raise RuntimeError(f"{refused}")
            left -= len(report.of("finished"))
            if report.of("running") and fmean(each.num_generated_tokens for each in report.of("running")) >= most:
                return

    def _cells(self, run: Run, place: str) -> Cells:
        found = {line["custom_id"]: line["response"]["body"]["choices"] for line in run.joined_lines()}
        return {f"{kind}/{place}": sha([_without(each, "metrics") for each in found[kind]]) for kind in self._kinds}

    def drafts(self, engine: str, num_jobs: int) -> Cells:
        """Return an engine's proposals."""
        ticks, clock = itertools.count(), time.perf_counter
        time.perf_counter = lambda: 1e-4 * next(ticks)
        try:
            target = TargetModel.load(locate_model(self.model), "bfloat16", "cpu")
            parts = self.folder if engine == "mtp" else None
            drafted = drafts_of(target, engine, self._sequences(target, num_jobs), parts)
        finally:
            time.perf_counter = clock
        return {f"drafts/{engine}/{num_jobs}": sha(drafted)}

    def _sequences(self, target: TargetModel, num_jobs: int) -> list[Sequence]:
        """Leave out rules, which would need a session."""
        records = [each for each in self.records if each.custom_id in ("long", "filters", "greedy", "n")]
        return [
            Sequence(f"{number}", unpacked(each.prompt_token_ids), each.job.sampling, target.vocab_size)
            for number, each in enumerate(records[::-1][:num_jobs])
        ]


def _without(fields: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if name not in names}


def drafts_of(target: TargetModel, engine: str, sequences: list[Sequence], parts: Path | None = None) -> list[Any]:
    """Return the rows verified and tokens committed per step."""
    drafter = create_drafter(engine, target, lambda: COSTS, parts)
    runner, steps = Engine(target, drafter), []
    for sequence in sequences:
        runner.start(sequence)
    while runner.sequences:
        for sequence, found in runner.step():
            steps.append(
                [sequence.sequence_id, list(map(int, found.row_token_ids)), list(map(int, found.committed_ids))]
            )
        for sequence in [each for each in runner.sequences if each.finish_reason is not None]:
            runner.stop(sequence)
    return steps


def save_predictor(model: str, folder: Path) -> None:
    """Write an untrained MTP layer, a copy of the model's last one."""
    import torch

    files = locate_model(model)
    torch.manual_seed(0)
    module = PredictorModule(read_config(files.name, files.path))
    module.begin_as(decoder_of(TargetModel.load(files, "bfloat16", "cpu").model))
    save_mtp(folder, module, files.fingerprint)


def cells_of(model: str, engine: str, is_quick: bool) -> Cells:
    """Return all cells of an engine."""
    logging.disable()  # kills leave half-written files, which are logged
    np.seterr(all="ignore")
    prepare()
    with TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        if model == INTERPRETER:
            return interpreted(engine, Path(folder), is_quick)
        bench = Bench(model, Path(folder))
        if engine == "mtp":
            save_predictor(model, Path(folder))
        cells = bench.undisturbed(engine, 8) | bench.killed(engine, 8)
        if engine in ALONE or (model == EMBEDDED and not is_quick):
            cells |= bench.undisturbed(engine, 1)
        if model == EMBEDDED and not is_quick:
            cells |= bench.killed(engine, 1)
            cells |= bench.drafts(engine, 1) | bench.drafts(engine, 5)
        return cells


def interpreted(engine: str, folder: Path, is_quick: bool) -> Cells:
    """Run GPU forwards and draws in Triton's interpreter."""
    import torch

    from tests.tiny_model import write_tiny_model
    from tests.worker.forward.cuda.cuda_parts import cuda_target
    from tests.worker.interpreter import patched

    patched()
    torch.set_num_threads(1)
    files = locate_model(str(write_tiny_model(folder / "model", 1)))
    places = {
        "bfloat16": lambda: cuda_target(files, torch.bfloat16, 3),
        "float32": lambda: cuda_target(files, torch.float32, 3, linear="cublas"),
        "fp8": lambda: cuda_target(files, torch.bfloat16, 3, kv_dtype="fp8"),
    }
    cells = {}
    for place in places if engine in ("auto", "token-recycling") and not is_quick else ("bfloat16",):
        target = places[place]()
        sequences = interpreted_sequences(target.vocab_size)
        drafts_of(target, engine, sequences)
        for kind, sequence in zip(("greedy", "filters", "penalties"), sequences, strict=True):
            cells[f"{kind}/{engine}/{place}"] = sha(sequence.output_ids.tolist())
    return cells


def interpreted_sequences(vocab_size: int) -> list[Sequence]:
    made = []
    for number, (kind, length) in enumerate({"greedy": 6, "filters": 62, "penalties": 70}.items()):
        fields = _without(KINDS[kind], "bad_words", "min_tokens")
        params = SamplingParams(max_tokens=12, seed=number, ignore_eos=True, **fields)
        prompt = [(7 * number + 3 * place) % 50 + 5 for place in range(length)]
        made.append(Sequence(kind, prompt, params, vocab_size))
    return made


def engines_of(model: str, is_quick: bool) -> list[str]:
    if is_quick:
        return ["tokenswift", "auto", "autoregressive"] if model == EMBEDDED else ["auto"]
    if model == INTERPRETER:
        return [name for name in BY_NAME if name != "mtp"][::-1]  # it has no such layer
    return list(BY_NAME)[::-1] if model == EMBEDDED else list(REAL_ENGINES)


def digests(models: list[str], is_quick: bool) -> Cells:
    """Use a separate process per engine."""
    cells: Cells = {}
    for model in models:
        started, name = time.monotonic(), Path(model).stem
        if model == CLI:
            cells |= {f"{CLI}/{cell}": text for cell, text in surface().items()}
        else:
            engines = engines_of(model, is_quick)
            with ProcessPoolExecutor(2, get_context("spawn"), max_tasks_per_child=1) as pool:
                of_engines = pool.map(cells_of, [model] * len(engines), engines, [is_quick] * len(engines))
                for engine, found in zip(engines, of_engines, strict=True):
                    print(f"{time.monotonic() - started:6.1f} s  {name}: {engine}", file=sys.stderr)
                    cells |= {f"{name}/{cell}": value for cell, value in found.items()}
        print(f"{time.monotonic() - started:6.1f} s  {name}: all", file=sys.stderr)
    return cells


def disagreements(cells: Cells) -> list[str]:
    first: dict[tuple[str, str, str], str] = {}
    found = []
    for cell, value in cells.items():
        model, kind, *place = cell.split("/")
        is_of_tokens = model != CLI and kind != "drafts"
        where = (model, kind, place[-1] if model == INTERPRETER else "")
        if is_of_tokens and first.setdefault(where, value) != value:
            found.append(cell)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.digests", description=__doc__)
    parser.add_argument("--model", nargs="+", default=[EMBEDDED], help=f"{EMBEDDED}, {INTERPRETER}, {CLI} or a file")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    parser.add_argument("--check", type=Path, help="JSON file to compare with")
    parser.add_argument("--quick", action="store_true", help="a part of the cells")
    options = parser.parse_args()
    cells = digests(options.model, options.quick)
    text = json.dumps(cells, indent=1, sort_keys=True)
    if options.out:
        options.out.write_text(text + "\n", encoding="utf-8")
    elif not options.check:
        print(text)
    problems = [f"differs from other engines: {cell}" for cell in disagreements(cells)]
    if options.check:
        models = {Path(model).stem for model in options.model}
        known = json.loads(options.check.read_text(encoding="utf-8")).items()
        before = {cell: value for cell, value in known if cell.split("/")[0] in models}
        problems += changes(before, cells, options.quick)
    print("\n".join([*problems, f"{len(cells)} cells, {len(problems)} problems"]), file=sys.stderr)
    sys.exit(1 if problems else 0)


def changes(before: Cells, after: Cells, is_part: bool) -> list[str]:
    lost = [] if is_part else [f"missing: {cell}" for cell in before.keys() - after.keys()]
    new = [f"new: {cell}" for cell in after.keys() - before.keys()]
    changed = [cell for cell in before.keys() & after.keys() if before[cell] != after[cell]]
    texts = [f"changed: {cell}\n{_shown(before[cell], after[cell])}" for cell in changed]
    return sorted(lost) + sorted(new) + sorted(texts)


def _shown(before: str, after: str) -> str:
    return "\n".join(unified_diff(before.splitlines(), after.splitlines(), "before", "after", lineterm="", n=0))


if __name__ == "__main__":
    main()
