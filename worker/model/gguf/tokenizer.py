"""The tokenizer of a GGUF file, as `transformers` makes it of the metadata."""

from __future__ import annotations

import json
from pathlib import Path

from transformers import PreTrainedTokenizerFast

GENERIC = "TokenizersBackend"  # the class that reads `tokenizer.json` and adds no rules of its own
KEPT = ("bos_token", "eos_token", "unk_token", "pad_token", "tokenizer_class")


def save_tokenizer(file: Path, folder: Path) -> None:
    """Write `tokenizer.json` and `tokenizer_config.json`. Raises what the library does for metadata without sense."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(file.parent, gguf_file=file.name, local_files_only=True)
    tokenizer.chat_template = None  # which lies in a file of its own
    tokenizer.save_pretrained(folder)
    path = folder / "tokenizer_config.json"
    said = json.loads(path.read_text(encoding="utf-8"))
    said = {key: value for key, value in said.items() if key in KEPT} | {"tokenizer_class": GENERIC}
    path.write_text(json.dumps(said, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
