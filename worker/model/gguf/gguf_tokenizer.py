"""The tokenizer of a GGUF file: how it cuts text, which tokens end one, its files as `transformers` derives them."""

from __future__ import annotations

import json
from pathlib import Path

from swiftbatch.worker.model.gguf.architectures import Config
from swiftbatch.worker.model.gguf.gguf_model import GGUFModel
from swiftbatch.worker.model.gguf.header import GGUFError

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

SPECIAL = {
    "bos_token_id": "tokenizer.ggml.bos_token_id",
    "eos_token_id": "tokenizer.ggml.eos_token_id",
    "pad_token_id": "tokenizer.ggml.padding_token_id",
}
ENDS = tuple(f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom"))
ENDING = {  # tokens that end a turn or a text in every model that has them, as llama.cpp takes them
    "<|eot_id|>",
    "<|eom_id|>",
    "<|im_end|>",
    "<|end|>",
    "<end_of_turn>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<EOT>",
}
CONTROL = 3  # the type of a token that is no text


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


def generation_of(model: GGUFModel) -> Config:
    """The tokens that end a text: those that the metadata names, and those that end a turn in all models."""
    found = {number for key in ENDS if (number := token_of(model, key)) is not None}
    tokens, types = (model.metadata.get(f"tokenizer.ggml.{name}", []) for name in ("tokens", "token_type"))
    pairs = enumerate(zip(tokens, types, strict=False))
    found |= {number for number, (token, kind) in pairs if kind == CONTROL and token in ENDING}
    return {"eos_token_id": sorted(found)} if found else {}


def token_of(model: GGUFModel, key: str) -> int | None:
    """The id of a token that the metadata names; None where it names none. Raises GGUFError for what is no token."""
    token = model.metadata.get(key)
    if token is not None and type(token) is not int:
        raise GGUFError(f"its metadata has {key} = {token!r:.60}, expected a token id")
    return token


def save_tokenizer(file: Path, folder: Path) -> None:
    """Write `tokenizer.json` and `tokenizer_config.json`. Raises what the library does for metadata without sense."""
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast.from_pretrained(file.parent, gguf_file=file.name, local_files_only=True)
    tokenizer.chat_template = None  # which lies in a file of its own
    tokenizer.save_pretrained(folder)
    path = folder / "tokenizer_config.json"
    said = json.loads(path.read_text(encoding="utf-8"))
    said = {key: value for key, value in said.items() if key in KEPT} | {"tokenizer_class": GENERIC}
    path.write_text(json.dumps(said, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
