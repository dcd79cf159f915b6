"""The texts that fill caches before a measurement: a file's, or a model's own words."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np

from swiftbatch.jobs.errors import UserError
from swiftbatch.jobs.sampling_params import SamplingParams
from swiftbatch.worker.drafters.catalogue import DEFAULT_ENGINE, create_drafter
from swiftbatch.worker.engine.engine import Engine
from swiftbatch.worker.forward.step_costs import step_costs_of
from swiftbatch.worker.forward.target_model import TargetModel
from swiftbatch.worker.model.model_files import ModelFiles
from swiftbatch.worker.sampling.sequence import Sequence
from swiftbatch.worker.sampling.verification import Verification

PROMPT = (
    "The mill stood where the river bent, and the miller's daughter kept its accounts. Every evening she wrote down "
    "what the farmers had brought and what they had taken home, and every evening the sum came out a little short. "
    "On the first day of autumn she made up her mind to stay awake and see who was helping himself to the flour."
)


class BenchError(UserError):
    """A benchmark that cannot be run as asked."""


class BenchEngine(Engine):
    """An engine that has no use for sequences that failed."""

    def step(self) -> list[tuple[Sequence, Verification]]:
        """Step as `Engine.step` does. Raises BenchError where a sequence can't go on."""
        results = super().step()
        for sequence in self.sequences:
            if sequence.error is not None:
                raise BenchError(sequence.error)
        return results


def encode(files: ModelFiles, text: str) -> list[int]:
    """Token ids of a text, without special tokens."""
    from transformers import AutoTokenizer  # half a second, of which a benchmark that is refused has no use

    tokenizer = AutoTokenizer.from_pretrained(files.path, local_files_only=True, trust_remote_code=False)
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False, verbose=False)
    return ids


def read_text(path: Path) -> str:
    """A plain UTF-8 file, or the `text` fields of a `.jsonl` file one after the other. Raises BenchError."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise BenchError(f"text {path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise BenchError(f"text {path}: cannot be read as UTF-8: {error}") from error
    if path.suffix != ".jsonl":
        return text
    lines = [(number, line) for number, line in enumerate(text.splitlines(), 1) if line.strip()]
    return "\n\n".join(_text_field(path, number, line) for number, line in lines)


def _text_field(path: Path, line_number: int, line: str) -> str:
    try:
        text = json.loads(line)["text"]
    except (ValueError, KeyError, TypeError):
        text = None
    if not isinstance(text, str):
        raise BenchError(f'text {path}, line {line_number}: expected a JSON object with a string field "text"')
    return text


def text_tokens(path: Path, files: ModelFiles, num_tokens: int) -> list[int]:
    """The first `num_tokens` tokens of a text file. Raises BenchError where it has fewer."""
    ids = encode(files, read_text(path))
    if len(ids) < num_tokens:
        raise BenchError(f"text {path}: it has {len(ids)} tokens, the highest position needs {num_tokens}")
    return ids[:num_tokens]


def own_tokens(target: TargetModel, num_tokens: int) -> list[int]:
    """The first `num_tokens` tokens of a built-in prompt and what the model goes on to say; made once, kept on disk."""
    cache_home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    dtype = str(target.dtype).removeprefix("torch.")
    path = cache_home / "swiftbatch" / "bench" / f"{target.files.fingerprint[:16]}-{dtype}.npy"
    known = np.load(path, allow_pickle=False).tolist() if path.is_file() else encode(target.files, PROMPT)
    if len(known) < num_tokens:
        known = _continue(target, known, num_tokens)
        path.parent.mkdir(parents=True, exist_ok=True)
        aside = path.with_suffix(f".{os.getpid()}.npy")
        np.save(aside, np.array(known, dtype=np.uint32))
        aside.replace(path)
    return known[:num_tokens]


def _continue(target: TargetModel, token_ids: list[int], num_tokens: int) -> list[int]:
    """Sample on at temperature 1 with min-p 0.1, past any end-of-sequence token."""
    sampling = SamplingParams(
        max_tokens=num_tokens - len(token_ids), temperature=1.0, min_p=0.1, seed=1, ignore_eos=True
    )
    sequence = Sequence("bench-text", token_ids, sampling, target.vocab_size, target.device)
    engine = BenchEngine(target, create_drafter(DEFAULT_ENGINE, target, step_costs_of(target)))
    engine.start(sequence)
    while sequence.finish_reason is None:
        engine.step()
    return [int(token_id) for token_id in sequence.token_ids]
