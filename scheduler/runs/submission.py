"""Puts job files into a run: reads, tokenizes, rejects, adds."""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import groupby, islice
from types import MappingProxyType
from typing import TYPE_CHECKING, BinaryIO

import numpy as np
from numpy.typing import NDArray

from swiftbatch.jobs.errors import LineError, UserError, line_code
from swiftbatch.jobs.input.line_parsing import JobLine
from swiftbatch.jobs.input.parquet_rows import Columns
from swiftbatch.jobs.input.reader import JobReader, job_lines
from swiftbatch.jobs.input.rejects import Reject, Rejects
from swiftbatch.jobs.job import JobRecord, JobUrl, LoraAdapter, packed
from swiftbatch.jobs.python_processes import rare_garbage_collection
from swiftbatch.jobs.run.job_index import COLUMNS, JobIndex
from swiftbatch.jobs.run.job_table import in_groups, parts_of, table_schema, write_records, write_tables
from swiftbatch.jobs.run.run import Run
from swiftbatch.jobs.run.run_records import RunError, RunManifest
from swiftbatch.jobs.run.shards import ask_for_shards
from swiftbatch.jobs.sampling_params import RepetitionDetection, SamplingParams, ThinkingEnd, loop_guard
from swiftbatch.jobs.shared_prompts import prompt_keys
from swiftbatch.jobs.storage.store import spool
from swiftbatch.scheduler.driver.run_lease import RunLease
from swiftbatch.scheduler.process.signals import unheard
from swiftbatch.scheduler.runs.run_manifest import (
    CHANGEABLE,
    computation_of,
    kept_or_new_manifest,
    with_adapters,
    with_linear,
    with_markers,
    with_model,
    with_rows,
)
from swiftbatch.scheduler.runs.run_settings import Settings
from swiftbatch.worker.constraints.grammar import StructureError
from swiftbatch.worker.drafters.catalogue import engine_entry
from swiftbatch.worker.kv.kv_capacity import (
    MEMORY,
    KVRoom,
    KVRoomError,
    bytes_per_position,
    check_folder,
    held_of,
    place_of_caches,
    state_bytes,
)
from swiftbatch.worker.model.model_files import ModelFiles, locate_model, read_config, sampling_defaults_of
from swiftbatch.worker.text.tokenizer import NO_MARKERS, Chat, EncodedPrompt, TextCodec

if TYPE_CHECKING:
    from collections.abc import Sequence

    import pyarrow as pa

LINES_AT_ONCE = 256
CHARACTERS_AT_ONCE = 2**20

Encoded = EncodedPrompt | ValueError
"""A prompt in tokens, or why there is none."""

CONSTRAINT_FIELDS = (
    "thinking_token_budget",
    "thinking_end",
    "structured_outputs",
)  # fields that a model may not support


@dataclass(frozen=True)
class LineNotes:
    """Rejects, priorities other than 0, and counts of ignored fields."""

    rejects: Rejects = field(default_factory=Rejects)
    priorities: dict[str, int] = field(default_factory=dict)
    without_effect: Counter[str] = field(default_factory=Counter)


def make_records(
    lines: Iterable[tuple[int, JobLine]],
    notes: LineNotes,
    files: ModelFiles,
    codec: TextCodec,
    max_tokens: int | None = None,
    room: KVRoom | None = None,
    loop_guard: RepetitionDetection | None = None,
    thinking_end: ThinkingEnd | None = None,
    adapters: Mapping[str, LoraAdapter] = MappingProxyType({}),
) -> Iterator[JobRecord]:
    """Yield the jobs of lines, with tokenized prompts.

    Rejects lines with more positions than the model or the caches have, and lines with unknown tokens or adapters.
    `max_tokens`, `loop_guard` and `thinking_end` are defaults for lines that do not set these fields.
    """
    longest = 0  # length known to fit: looking up free memory is the most expensive step
    for line_number, line, encoded in _encoded(lines, codec):
        try:
            prompts = _prompts(line, encoded, max_tokens, files, codec)
            lora = _adapter_of(line, adapters)
            _refuse_unfit_sampling(line, min(limit for _, limit in prompts), codec, files.vocab_size)
            length = max(len(prompt.token_ids) + limit for prompt, limit in prompts)
            if room is not None and length > longest:
                room.refuse_too_long(length)
                longest = length
        except (ValueError, KVRoomError) as error:
            code = "context_length_exceeded" if isinstance(error, KVRoomError) else line_code(error)
            notes.rejects.add(Reject(line_number, line.custom_id, str(error), code=code))
            continue
        if line.priority:
            notes.priorities[line.custom_id] = line.priority
        if without_effect := _without_effect(line, codec):
            notes.without_effect.update(without_effect)
        jobs = iter(line.jobs([limit for _, limit in prompts], loop_guard, thinking_end, lora))
        for prompt, _ in prompts:
            ids = prompt.token_ids
            made = (len(ids), None, prompt_keys(ids, lora), packed(ids), prompt.last_marker)
            for job in islice(jobs, line.num_choices):
                yield JobRecord(job.job_id(files.fingerprint), job, line_number, *made, line.kept)


def _encoded(lines: Iterable[tuple[int, JobLine]], codec: TextCodec) -> Iterator[tuple[int, JobLine, list[Encoded]]]:
    _start_tokenizing_threads()
    for some in in_groups(lines, LINES_AT_ONCE, CHARACTERS_AT_ONCE, _num_letters):
        asked = [_asked(line) for _, line in some]
        are_cut = [
            line.sampling.get("truncate_prompt_tokens") is not None
            for (_, line), own in zip(some, asked, strict=True)
            for _ in own
        ]
        encoded = iter(codec.encode_all([each for own in asked for each in own], are_cut))
        for (line_number, line), own in zip(some, asked, strict=True):
            yield line_number, line, list(islice(encoded, len(own)))


def _start_tokenizing_threads() -> None:
    """Start the tokenizer library's lasting threads before Ray, with signals blocked."""
    from tokenizers import Tokenizer
    from tokenizers.models import BPE

    with unheard():
        Tokenizer(BPE()).encode_batch_fast(["", ""])


def _num_letters(numbered: tuple[int, JobLine]) -> int:
    _, line = numbered
    return sum(map(len, line.prompts)) + sum(len(message.content) for message in line.messages or ())


def _asked(line: JobLine) -> tuple[str | tuple[int, ...] | Chat, ...]:
    return line.prompts if line.messages is None else (Chat(line.messages, line.template),)


def _prompts(
    line: JobLine, encoded: list[Encoded], max_tokens: int | None, files: ModelFiles, codec: TextCodec
) -> list[tuple[EncodedPrompt, int]]:
    """Return each prompt of a line with its token limit. Raises ValueError."""
    prompts = []
    for number, found in enumerate(encoded, start=1):
        try:
            if isinstance(found, ValueError):
                raise found
            prompt = codec.cut(found, _num_kept(line, len(found.token_ids), max_tokens, files))
            prompts.append((prompt, _limit(line, len(prompt.token_ids), max_tokens, files)))
        except ValueError as error:
            which = f" (prompt {number} of {len(encoded)})" if len(encoded) > 1 else ""
            raise LineError(f"{error}{which}", line_code(error)) from None
    return prompts


def _adapter_of(line: JobLine, adapters: Mapping[str, LoraAdapter]) -> LoraAdapter | None:
    """Return the adapter that a line names in `lora`, or as clients of vLLM do in `model`. Raises LineError."""
    if line.lora is None:
        return adapters.get(line.model)
    if line.lora not in adapters:
        expected = f"expected one of {', '.join(adapters)}" if adapters else "expected a run with --lora NAME=FOLDER"
        raise LineError(f"field 'lora': found {line.lora!a:.80}, {expected}", "invalid_value")
    return adapters[line.lora]


def _num_kept(line: JobLine, num_prompt_tokens: int, max_tokens: int | None, files: ModelFiles) -> int:
    """Return how many of a prompt's last tokens the job keeps."""
    said = line.sampling.get("truncate_prompt_tokens")
    if said != -1:
        return said or num_prompt_tokens
    limit = line.max_tokens or max_tokens or 1
    return max(1, files.max_positions - limit)


def _limit(line: JobLine, num_prompt_tokens: int, max_tokens: int | None, files: ModelFiles) -> int:
    """Return a prompt's token limit. Raises ValueError if prompt and limit exceed the model's positions."""
    num_left = files.max_positions - num_prompt_tokens
    if line.max_tokens is None:
        if num_left < 1:
            raise LineError(
                f"prompt: its {num_prompt_tokens} tokens leave none to generate, expected fewer than the model's "
                f"{files.max_positions} positions",
                "context_length_exceeded",
            )
        return num_left if max_tokens is None else min(max_tokens, num_left)
    if line.max_tokens > num_left:
        num_positions = num_prompt_tokens + line.max_tokens
        raise LineError(
            f"max_tokens: prompt ({num_prompt_tokens} tokens) and max_tokens ({line.max_tokens}) need {num_positions} "
            f"positions, expected at most the model's {files.max_positions}",
            "context_length_exceeded",
        )
    return line.max_tokens


def _refuse_unfit_sampling(line: JobLine, limit: int, codec: TextCodec, vocab_size: int) -> None:
    """Raise ValueError for fields that only the model can refute."""
    sampling = line.sampling
    if sampling["min_tokens"] > limit:
        raise ValueError(
            f"field 'min_tokens': found {sampling['min_tokens']}, expected at most the {limit} that may come"
        )
    if sampling["bad_words"]:
        codec.bad_word_ids(sampling["bad_words"])
    try:
        has_tools = line.template is not None and bool(line.template.tools)
        if has_tools or any(sampling.get(name) is not None for name in CONSTRAINT_FIELDS):
            codec.rules(SamplingParams(**sampling, max_tokens=limit), None, line.template)
    except StructureError as error:
        raise (ValueError(f"field '{line.format_field}': {error.reason}") if line.format_field else error) from None
    biased = [token for token, _ in sampling["logit_bias"]]
    if biased and (textless := sorted({*biased}.intersection(codec.textless_ids))):
        raise ValueError(
            f"field 'logit_bias': token {textless[0]} has no text in this model's tokenizer, so it never comes"
        )
    for field_name, token_ids in (("logit_bias", biased), ("stop_token_ids", sampling["stop_token_ids"])):
        if token_ids and token_ids[-1] >= vocab_size:
            raise ValueError(
                f"field '{field_name}': found token {token_ids[-1]}, the model's are 0 to {vocab_size - 1}"
            )


def _without_effect(line: JobLine, codec: TextCodec) -> set[str]:
    found = {*line.without_effect, *codec.without_effect(line.prompts, line.sampling["stop"])}
    if line.sampling["stop_in_reasoning"] and (codec.markers is None or not line.sampling["stop"]):
        found.add("stop_in_reasoning")
    return found if line.messages is None else found.union(codec.chat.unread(line.messages, line.template))


# Puts job files into a run folder.


CHANGED = "field 'custom_id': this run has it with another prompt or sampling; use a new custom_id or a new run"

NO_COLUMNS = Columns()


class StrictError(UserError):
    """A file with rejects under `--strict`."""

    def __init__(self, path: str, rejects: Sequence[Reject]) -> None:
        first = rejects[0]
        place = first.place if first.file is not None else f"{path}, {first.place}"
        refusal = "--strict refuses the file, nothing was submitted"
        super().__init__(f"{place}: {first.reason} (rejected lines: {len(rejects)}; {refusal})")


@dataclass(frozen=True)
class Submission:
    """A held run, with the jobs and rejects of the submitted files."""

    run: Run
    hold: RunLease
    jobs: JobIndex
    rejects: Rejects
    without_effect: dict[str, int]
    sampling_defaults: dict[str, float]
    reader: JobReader


@contextmanager
def submission(
    jobs: str | Sequence[str],
    run_uri: str,
    settings: Settings,
    is_strict: bool = False,
    may_take_over: bool = False,
    columns: Columns = NO_COLUMNS,
    endpoint: JobUrl | None = None,
) -> Iterator[Submission]:
    """Add the jobs of files (see `found_files`) to the run at `run_uri`, creating it if needed.

    The run is held until the block ends. Raises InputFileError, KVRoomError, StrictError, ModelError, RunError
    (RunTakenError, see `refuse_if_taken`) and StoreError; then no job is added.
    """
    manifest = kept_or_new_manifest(run_uri, settings)
    is_for_gpus = not manifest.model_fingerprint and manifest.device != "cpu"  # otherwise its rows are set
    said = [jobs] if isinstance(jobs, str) else jobs
    files = locate_model(manifest.stored_model, is_whole=settings.address is None)
    text_settings = (manifest.thinking_markers, manifest.clock, manifest.lenient_schemas, manifest.plain_content)
    codec = TextCodec(files, *text_settings)
    manifest, adapters = with_adapters(with_markers(with_model(manifest, files), codec), files)
    defaults = sampling_defaults_of(files) if manifest.sampling_defaults == "model" else {}
    reader, notes = JobReader(manifest.seed, columns, endpoint, defaults), LineNotes()
    lines = _bounded(job_lines(said, reader), reader, notes)
    if manifest.thinking_end == "close" and codec.markers is None:
        raise UserError(f"--thinking-end: found close, {NO_MARKERS}; leave the option away")
    room, guard = kv_room(manifest, files, settings), loop_guard(manifest.loop_guard)
    fitting = (manifest.max_tokens, room, guard, manifest.thinking_end, adapters)
    with spool() as table:
        with rare_garbage_collection():
            write_records(table, make_records(lines, notes, files, codec, *fitting), manifest.run_id)
        if is_strict and (rejects := _in_order(reader, notes)):
            raise StrictError(said[0], rejects)
        if is_for_gpus:
            index = JobIndex.of(parts_of(table, COLUMNS))
            manifest = with_rows(with_linear(manifest, files, index, settings), files, index, settings)
        planned = Run.planned(run_uri, manifest, settings.start_retries)
        with RunLease(planned, may_take_over, forgets_cancel=True) as hold:
            run = _made(planned, manifest)
            if settings.shards is not None:
                ask_for_shards(run.store, settings.shards)
            added, changed = add_new(run, table)
            run.set_priorities(added.custom_ids(), notes.priorities)
            rejects = _in_order(reader, notes, changed)
            run.write_rejects(rejects)
            yield Submission(run, hold, added, rejects, dict(notes.without_effect), defaults, reader)


def _bounded(
    lines: Iterable[tuple[int, JobLine]], reader: JobReader, notes: LineNotes
) -> Iterator[tuple[int, JobLine]]:
    for line in lines:
        reader.refuse_endless(notes.rejects)
        yield line


def _in_order(reader: JobReader, notes: LineNotes, changed: Iterable[Reject] = ()) -> Rejects:
    """Return all rejects with their places, sorted by line number."""
    some = heapq.merge(reader.rejects, notes.rejects, changed, key=lambda reject: reject.line_number)
    return Rejects(map(reader.placed, some))


def _made(planned: Run, manifest: RunManifest) -> Run:
    """Write the planned run and return it. Raises RunError if another command made or changed it meanwhile."""
    run = planned.made()
    has_changed = any(getattr(run.manifest, name) != getattr(manifest, name) for name in CHANGEABLE)
    if run.manifest.run_id != manifest.run_id or (has_changed and run.has_begun()):
        raise RunError(f"the run at {run.store.shown_uri} was made by another command just now; submit once more")
    return run.with_other_settings(manifest) if has_changed else run


def kv_room(manifest: RunManifest, files: ModelFiles, settings: Settings) -> KVRoom | None:
    """Return the room for caches on this machine, or None if it is unknown. Raises KVRoomError."""
    computation = computation_of(manifest, settings)
    if settings.address is not None:
        return None
    kv_offload = computation.kv_offload
    check_folder(kv_offload)
    place = place_of_caches(manifest.device, kv_offload)
    config = read_config(files.name, files.path)
    num_bytes = bytes_per_position(config, manifest.dtype, manifest.kv_dtype)
    if place is None or num_bytes is None:
        return None
    forgets = place == MEMORY and not engine_entry(computation.engine).reads_caches
    return KVRoom(place, num_bytes, state_bytes(config, manifest.dtype), held_of(config) if forgets else None)


def add_new(run: Run, table: BinaryIO) -> tuple[JobIndex, list[Reject]]:
    """Add a table's new jobs; return the table's jobs that are now in the run, and the refused lines.

    A line is refused if the run has its `custom_id` with another prompt or sampling, because the id would be ambiguous.
    """
    found = JobIndex.of(parts_of(table, COLUMNS))
    known = run.job_index()
    rejects = _changed(run, found, known) if len(known) else []
    refused = np.array([reject.line_number for reject in rejects], np.int64)
    is_kept = ~np.isin(found.columns["line_number"], refused)
    is_new = is_kept & ~_is_in(found.columns["job_id"], run.all_job_ids())
    if is_new.all():
        _add(run, table, len(found))
    else:
        with spool() as rest:
            _add(run, rest, write_tables(rest, _some_of(table, is_new), run.manifest.run_id))
    return found.some(np.flatnonzero(is_kept)), rejects


def _add(run: Run, table: BinaryIO, num_jobs: int) -> None:
    if num_jobs:
        run.add_table(table)


def _some_of(table: BinaryIO, is_wanted: NDArray[np.bool_]) -> Iterator[pa.Table]:
    import pyarrow as pa

    num_before = 0
    for part in parts_of(table, table_schema().names):
        yield part.filter(pa.array(is_wanted[num_before : num_before + len(part)]))
        num_before += len(part)


def _is_in(texts: pa.Array, others: pa.Array) -> NDArray[np.bool_]:
    from pyarrow import compute

    found: NDArray[np.bool_] = compute.is_in(texts, value_set=others.cast(texts.type)).to_numpy(zero_copy_only=False)
    return found


def _changed(run: Run, found: JobIndex, known: JobIndex) -> list[Reject]:
    """Return rejects for lines whose jobs changed."""
    from pyarrow import compute

    names = found.columns["custom_id"]
    rows = compute.index_in(names, value_set=known.columns["custom_id"]).fill_null(-1).to_numpy()
    same = known.columns["job_id"].take(compute.if_else(rows < 0, None, rows))
    is_same = compute.equal(found.columns["job_id"], same).fill_null(False).to_numpy(zero_copy_only=False)
    is_alone = (found.columns["num_choices"] == 1) & (known.columns["num_choices"][rows] == 1)
    doubtful = found.some(np.flatnonzero((rows >= 0) & ~(is_same & is_alone)))
    return _refused(run, doubtful, known) if len(doubtful) else []


def _refused(run: Run, doubtful: JobIndex, known: JobIndex) -> list[Reject]:
    newest = {job_id: lineage[-1] for lineage in run.lineages() for job_id in lineage}  # newest ids of extended jobs
    theirs = known.some(known.rows_of("custom_id", doubtful.columns["custom_id"].to_pylist()))
    ids_of: dict[str, set[str]] = defaultdict(set)
    for entry in theirs.entries():
        ids_of[entry.custom_id].add(entry.job_id)
    rejects = []
    for line_number, choices in groupby(doubtful.entries(), key=lambda entry: entry.line_number):
        entries = list(choices)
        own = {newest.get(entry.job_id, entry.job_id) for entry in entries}
        if ids_of[entries[0].custom_id] != own:
            rejects.append(Reject(line_number, entries[0].custom_id, CHANGED, code="duplicate_custom_id"))
    return rejects
