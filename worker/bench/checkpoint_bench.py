"""`swiftbatch bench checkpoints`: what writing state costs, and what it saves on a resume."""

from __future__ import annotations

import shutil
import statistics
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

from pydantic import Field
from rich.table import Table

from swiftbatch.jobs.frozen_records import Frozen
from swiftbatch.worker.bench.bench_engine import text_tokens
from swiftbatch.worker.bench.bench_options import BenchOptions, Positions, check_length
from swiftbatch.worker.bench.bench_tables import new_table, write_json
from swiftbatch.worker.bench.bench_worker import BenchWorker, Turn, make_run
from swiftbatch.worker.config import EngineConfig
from swiftbatch.worker.model.model_files import locate_model
from swiftbatch.worker.model.tokenizer import TextCodec

MIB = 2**20
SPARE_TOKENS = 1024  # the last step goes beyond what is measured: the job may not end with it


class CheckpointBenchOptions(BenchOptions):
    """The measurement asked for: `num_rounds` times `checkpoint_tokens` tokens behind each of `positions`."""

    engine: str
    positions: Positions
    checkpoint_tokens: int = Field(ge=128)  # more than a step generates
    num_rounds: int = Field(ge=1)
    text: Path

    def engine_config(self, checkpoint: Literal["tokens", "state"]) -> EngineConfig:
        fields = self.model_dump(include={"model", "engine", "dtype", "device", "num_threads", "checkpoint_tokens"})
        return EngineConfig(checkpoint=checkpoint, **fields)


class CheckpointRecord(Frozen):
    """Figures at one position. `overhead`: time with state over time without, less 1; the median of the rounds."""

    position: int
    tokens_ms_per_token: float
    state_ms_per_token: float
    overhead: float
    segment_bytes: int
    num_bytes_per_token: float  # of state, drafter included
    num_peak_bytes_above: int  # resident memory in a round with state above that of one without
    kv_seconds: float  # from the assignment to the first new token
    replay_seconds: float
    has_same_tokens: bool  # of both resumes and of the worker that went on


def run_checkpoint_bench(
    options: CheckpointBenchOptions, report: Callable[[str], None] = lambda line: None
) -> list[CheckpointRecord]:
    """Measure at all positions; `report` gets a line about each stage. Raises BenchError, ModelError."""
    files = locate_model(options.model)
    num_tokens = (options.num_rounds + 3) * options.checkpoint_tokens
    check_length(files, options.positions[-1], num_tokens)
    text = text_tokens(options.text, files, options.positions[-1])
    records = []
    for position in options.positions:
        report(f"position {position}: reading the prompt, then {options.num_rounds} rounds with and without state")
        with tempfile.TemporaryDirectory(prefix="swiftbatch-bench-") as folder:
            prompt = TextCodec(files).decode(text[:position])
            most = min(num_tokens + SPARE_TOKENS, files.max_positions - position)
            make_run(Path(folder) / "state", options.model, prompt, most)
            records.append(_measure(options, position, Path(folder)))
    if options.json_path is not None:
        settings = options.model_dump(mode="json", exclude={"json_path"})
        document = {"results": [r.model_dump() for r in records], "settings": settings}
        write_json(options.json_path, document)
    return records


def _measure(options: CheckpointBenchOptions, position: int, folder: Path) -> CheckpointRecord:
    first = BenchWorker(folder / "state", options.engine_config("state"))
    first.generate_to(1)
    first.drain()
    shutil.copytree(folder / "state", folder / "tokens")
    pair = [BenchWorker(folder / name, options.engine_config(name)) for name in ("tokens", "state")]
    rounds = list(_rounds(pair, options))
    tokens_ms, state_ms = ([turn.ms_per_token for turn in turns] for turns in zip(*rounds, strict=True))
    undisturbed, preempted = pair
    preempted.drain()  # writes in the background are done, and counted
    shutil.copytree(folder / "state", folder / "replay", ignore=shutil.ignore_patterns("*.arrow", "manifest.json"))
    resumed = [BenchWorker(folder / name, options.engine_config("state")) for name in ("state", "replay")]
    kv_seconds, replay_seconds = (worker.resume_seconds() for worker in resumed)
    num_tokens = resumed[0].num_tokens + options.checkpoint_tokens
    for worker in (undisturbed, *resumed):
        worker.generate_to(num_tokens)
    outputs = {tuple(worker.output_ids[:num_tokens]) for worker in (undisturbed, *resumed)}
    for worker in (undisturbed, *resumed):
        worker.drain()  # nothing writes into the folder any more
    return CheckpointRecord(
        position=position,
        tokens_ms_per_token=round(statistics.median(tokens_ms), 3),
        state_ms_per_token=round(statistics.median(state_ms), 3),
        overhead=round(statistics.median(s / t for t, s in zip(tokens_ms, state_ms, strict=True)) - 1, 4),
        segment_bytes=max(path.stat().st_size for path in (folder / "state").glob("checkpoints/*/*/kv-*")),
        num_bytes_per_token=round(preempted.num_state_bytes / (preempted.num_tokens - first.num_tokens), 1),
        num_peak_bytes_above=round(statistics.median(s.num_peak_bytes - t.num_peak_bytes for t, s in rounds)),
        kv_seconds=round(kv_seconds, 3),
        replay_seconds=round(replay_seconds, 3),
        has_same_tokens=len(outputs) == 1,
    )


def _rounds(pair: list[BenchWorker], options: CheckpointBenchOptions) -> Iterator[tuple[Turn, Turn]]:
    """Generate one interval's tokens with both in turn, each time in the other order. Yields turns (tokens, state)."""
    half = options.checkpoint_tokens // 2  # a state falls due in the middle of a turn, and is written within it
    for worker in pair:
        worker.generate_to(half)
    for number in range(1, options.num_rounds + 1):
        num_tokens = half + number * options.checkpoint_tokens
        ordered = pair if number % 2 else pair[::-1]
        turns = {worker: worker.generate_to(num_tokens) for worker in ordered}
        yield turns[pair[0]], turns[pair[1]]


def render(records: list[CheckpointRecord]) -> Table:
    headers = ("position", "tokens\nms", "state\nms", "over-\nhead", "segment\nMiB", "peak\nMiB", "kv\ns", "replay\ns")
    table = new_table("", (), (*headers, "same\ntokens"))
    for record in records:
        table.add_row(
            str(record.position),
            f"{record.tokens_ms_per_token:.2f}",
            f"{record.state_ms_per_token:.2f}",
            f"{record.overhead:.1%}",
            f"{record.segment_bytes / MIB:.1f}",
            f"{record.num_peak_bytes_above / MIB:.1f}",
            f"{record.kv_seconds:.2f}",
            f"{record.replay_seconds:.2f}",
            "yes" if record.has_same_tokens else "no",
        )
    return table
