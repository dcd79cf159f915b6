"""The folder that makes a model of a GGUF file: its small files, derived once, and links to the weights.

All else that reads a model reads this folder. It lies in the user's cache, under a name of all that decides its
content, and is there as a whole or not at all, also where two processes make it at once.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

from swiftbatch.jobs.errors import ModelError
from swiftbatch.worker.model.config_numbers import line_of
from swiftbatch.worker.model.gguf.gguf_config import config_of, generation_of
from swiftbatch.worker.model.gguf.gguf_model import FREQUENCIES, GGUFModel, read_gguf, transformers_name
from swiftbatch.worker.model.gguf.header import GGUFError
from swiftbatch.worker.model.gguf.links import INDEX_FILE, link_name, link_names, write_index

# how tokenizers of GGUF files cut text before they merge it
KINDS = ("gpt2", "llama")  # merges of bytes, and SentencePiece's, which cuts in one way alone
OF_GPT2 = ("gpt-2", "granite-docling", "jais", "mpt", "olmo", "phi-2", "trillion")
# as GPT-2, with digits one by one: no merge joins digits there, so that is no difference
OF_DIGITS = ("codeshell", "command-r", "exaone", "minerva-7b", "refact", "smollm", "starcoder")
OTHERS = (
    *("dbrx", "deepseek-r1-qwen", "f2llmv2", "falcon-h1", "falcon3", "gpt-4o", "jina-v5-nano", "kanana2", "kormo"),
    *("lfm2", "llama-bpe", "llama-v3", "llama3", "llama4", "megrez", "midm-2.0", "minimax-m2", "pixtral", "qwen2"),
    *("qwen35", "smaug-bpe", "talkie", "tekken"),
)
KNOWN = sorted((*OF_GPT2, *OF_DIGITS, *OTHERS))

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")  # the last one is written last
GENERIC = "TokenizersBackend"  # the class that reads `tokenizer.json` and adds no rules of its own
KEPT = ("bos_token", "eos_token", "unk_token", "pad_token", "tokenizer_class")
FORM = 1  # of the derived files: another one where they are derived in another way
NAME_LENGTH = 32
MAX_WORDS = 500  # characters of an error
LIBRARIES = ("transformers", "tokenizers")  # that write the tokenizer


def gguf_folder(model: str, file: Path, with_tokenizer: bool) -> Path:
    """The folder of a model whose weights lie in this file, or begin in it. Raises ModelError."""
    try:
        read = read_gguf(file)
        folder = _base() / _key(read)
        if not (folder / INDEX_FILE).exists():
            _refuse_unknown_tensors(read)
            refuse_unknown_split(read)
            with _made_whole(folder) as aside:
                _write_small_files(read, aside)
    except GGUFError as error:
        raise ModelError(f"model {model}: {file} is no GGUF file that runs here: {line_of(error, MAX_WORDS)}") from None
    except OSError as error:
        raise ModelError(
            f"model {model}: its small files can't be kept in {_base()} ({error}); set XDG_CACHE_HOME"
        ) from None
    if with_tokenizer and not all((folder / name).exists() for name in TOKENIZER_FILES):
        _add_tokenizer(model, folder)
    return folder


def _base() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "swiftbatch" / "gguf"


def _key(model: GGUFModel) -> str:
    """A name for all that decides the content of the folder, the place of the weights among it."""
    parts = [FORM, *map(version, LIBRARIES), *(head.sha256 for head in model.heads), *map(os.path.abspath, model.files)]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:NAME_LENGTH]


def _refuse_unknown_tensors(model: GGUFModel) -> None:
    """Raise GGUFError for a tensor that the architecture has no place for."""
    for name in model.tensors:
        if name != FREQUENCIES:
            transformers_name(name, model.architecture)


def _write_small_files(model: GGUFModel, folder: Path) -> None:
    _write_json(folder / "config.json", config_of(model))
    _write_json(folder / "generation_config.json", generation_of(model))
    if isinstance(template := model.metadata.get("tokenizer.chat_template"), str):
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    links = {link_name(number, len(model.files)): file for number, file in enumerate(model.files)}
    for name, file in links.items():
        (folder / name).symlink_to(os.path.abspath(file))
    write_index(folder, model.name, list(links))


@contextlib.contextmanager
def _made_whole(folder: Path) -> Iterator[Path]:
    """A folder to write into, which gets its name at the end, unless another process was first."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        yield aside
        with contextlib.suppress(OSError):
            aside.rename(folder)
        if not folder.is_dir():
            raise OSError(f"{folder} can't be made")
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _add_tokenizer(model: str, folder: Path) -> None:
    """Derive the tokenizer as `transformers` does, which takes seconds, and put its files beside the others."""
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as aside:
        try:
            _save_tokenizer(folder / link_names(folder)[0], Path(aside))
        except Exception as error:  # of any kind: the library raises bare ones
            said = f"{type(error).__name__}: {line_of(error, MAX_WORDS)}"
            raise ModelError(f"model {model}: no tokenizer comes of its metadata: {said}") from error
        for name in TOKENIZER_FILES:
            os.replace(Path(aside) / name, folder / name)


def _save_tokenizer(file: Path, folder: Path) -> None:
    """Write `tokenizer.json` and `tokenizer_config.json`. Raises what the library does for metadata without sense."""
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast.from_pretrained(file.parent, gguf_file=file.name, local_files_only=True)
    tokenizer.chat_template = None  # which lies in a file of its own
    tokenizer.save_pretrained(folder)
    path = folder / "tokenizer_config.json"
    said = json.loads(path.read_text(encoding="utf-8"))
    said = {key: value for key, value in said.items() if key in KEPT} | {"tokenizer_class": GENERIC}
    path.write_text(json.dumps(said, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _write_json(file: Path, value: Any) -> None:
    file.write_text(json.dumps(value, indent=2, allow_nan=False) + "\n", encoding="utf-8")


def refuse_unknown_split(model: GGUFModel) -> None:
    """Raise GGUFError for a tokenizer that would give other tokens than the model's.

    `transformers`' loader takes GPT-2's way of cutting text for any name that it does not know.
    """
    kind, split = (model.metadata.get(f"tokenizer.ggml.{name}") for name in ("model", "pre"))
    if kind not in KINDS:
        raise GGUFError(f"its tokenizer.ggml.model is {kind!r:.60}, expected {' or '.join(KINDS)}")
    if kind == "gpt2" and split not in KNOWN:
        raise GGUFError(f"its tokenizer.ggml.pre is {split!r:.60}, expected one of {', '.join(KNOWN)}")
    tokens, types = (model.metadata.get(f"tokenizer.ggml.{name}") for name in ("tokens", "token_type"))
    if not isinstance(tokens, list) or not tokens or (types is not None and len(types) != len(tokens)):
        raise GGUFError("its metadata has no tokens, or other numbers of tokens and of their types")
