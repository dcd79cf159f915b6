"""Converts the tokenizer of a GGUF file for the library `tokenizers`.

A file only names its pre-tokenizer, so the patterns here are copied from the models' own tokenizers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swiftbatch.worker.model.gguf.gguf_model import GGUFModel
from swiftbatch.worker.model.gguf.header import GGUFError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

KINDS = ("gpt2", "llama")  # byte-level BPE, and SentencePiece, which needs no pattern

# how byte-level tokenizers split text before merging: patterns of the models' own tokenizers
CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
SIGNS, SPACES = r" ?[^\s\p{L}\p{N}]+", r"\s*[\r\n]+|\s+(?!\S)|\s+"
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
FRONT = r"[^\r\n\p{L}\p{N}]?"
LLAMA3 = rf"{CONTRACTIONS}|{FRONT}\p{{L}}+|\p{{N}}{{1,3}}|{SIGNS}[\r\n]*|{SPACES}"
QWEN2 = rf"{CONTRACTIONS}|{FRONT}\p{{L}}+|\p{{N}}|{SIGNS}[\r\n]*|{SPACES}"
QWEN35 = rf"{CONTRACTIONS}|{FRONT}[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{SPACES}"
TEKKEN = rf"{FRONT}{UPPER}*{LOWER}+|{FRONT}{UPPER}+{LOWER}*|\p{{N}}|{SIGNS}[\r\n/]*|{SPACES}"
GPT4O = (
    rf"{FRONT}{UPPER}*{LOWER}+{CONTRACTIONS}?|{FRONT}{UPPER}+{LOWER}*{CONTRACTIONS}?"
    rf"|\p{{N}}{{1,3}}|{SIGNS}[\r\n/]*|{SPACES}"
)
GPT2, DIGITS = "", "digits"  # GPT-2's pattern, which the library has, and the same after splitting single digits
WHOLE_WORDS = (  # a word in the vocabulary is one token even if no merges produce it, and texts begin with BOS
    *("falcon-h1", "falcon3", "jina-v5-nano", "lfm2", "llama-bpe", "llama-v3", "llama3", "midm-2.0", "pixtral"),
    "tekken",
)
SPLITS = {
    **dict.fromkeys(("gpt-2", "granite-docling", "jais", "mpt", "olmo", "phi-2", "trillion"), GPT2),
    **dict.fromkeys(("codeshell", "command-r", "exaone", "minerva-7b", "refact", "smollm", "starcoder"), DIGITS),
    **dict.fromkeys(("dbrx", "smaug-bpe", *WHOLE_WORDS), LLAMA3),
    **dict.fromkeys(("deepseek-r1-qwen", "f2llmv2", "kormo", "megrez", "qwen2"), QWEN2),
    **dict.fromkeys(("gpt-4o", "kanana2", "llama4", "minimax-m2", "talkie"), GPT4O),
    "qwen35": QWEN35,
    "tekken": TEKKEN,
}
COMPOSED = ("deepseek-r1-qwen", "mpt", "olmo", "qwen2")  # text is normalized to NFC first, as by Qwen and GPT-NeoX

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")  # in the order in which they are written
GENERIC = "TokenizersBackend"  # the class that reads `tokenizer.json` and adds no rules of its own

SPECIAL = {
    "bos_token_id": "tokenizer.ggml.bos_token_id",
    "eos_token_id": "tokenizer.ggml.eos_token_id",
    "pad_token_id": "tokenizer.ggml.padding_token_id",
}
NAMED = {**SPECIAL, "unk_token_id": "tokenizer.ggml.unknown_token_id"}
UNSAID = {NAMED["bos_token_id"]: 1, NAMED["eos_token_id"]: 2, NAMED["unk_token_id"]: 0}  # SentencePiece's defaults
ENDS = tuple(f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom"))
ENDING = {  # as in llama.cpp, these end a turn or a text in every model that has them
    "<|eot_id|>",
    "<|eom_id|>",
    "<|im_end|>",
    "<|end|>",
    "<end_of_turn>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<EOT>",
}
FILLING = re.compile(r"<\|(fim_(prefix|suffix|middle|pad|repo)|file_sep|repo_name)\|>|<fim[-_](prefix|suffix|middle)>")
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED = 1, 2, 3, 4, 5  # types of tokens; the last one has no text
KEEPING_SPACES = ("<unk>", "<s>", "<|endoftext|>")  # Phi-3's; its other special tokens absorb spaces after them


def refuse_unknown_split(model: GGUFModel) -> None:
    """Raise GGUFError for a tokenizer whose conversion could give other tokens than the model's own."""
    kind, split = (model.metadata.get(f"tokenizer.ggml.{name}") for name in ("model", "pre"))
    if kind not in KINDS:
        raise GGUFError(f"its tokenizer.ggml.model is {kind!r:.60}, expected {' or '.join(KINDS)}")
    if kind == "gpt2" and split not in SPLITS:
        raise GGUFError(f"its tokenizer.ggml.pre is {split!r:.60}, expected one of {', '.join(sorted(SPLITS))}")
    tokens, types = (model.metadata.get(f"tokenizer.ggml.{name}") for name in ("tokens", "token_type"))
    if not isinstance(tokens, list) or not tokens or (types is not None and len(types) != len(tokens)):
        raise GGUFError("its metadata has no tokens, or other numbers of tokens and of their types")
    needed = "tokenizer.ggml.merges" if kind == "gpt2" else "tokenizer.ggml.scores"
    if needed not in model.metadata or (kind == "llama" and len(model.metadata[needed]) != len(tokens)):
        raise GGUFError(f"its metadata lacks {needed}")
    texts = {number: text for number, text, _ in tokens_of(model)}
    if len(set(texts.values())) < len(texts):
        raise GGUFError("its tokenizer.ggml.tokens has a text twice")
    for name in ("bos", "eos"):
        if adds(model, name) and token_of(model, f"tokenizer.ggml.{name}_token_id") not in texts:
            raise GGUFError(f"its tokenizer adds a token to each text, and no tokenizer.ggml.{name}_token_id names it")


SAMPLING = {
    "general.sampling.temp": "temperature",
    "general.sampling.top_k": "top_k",
    "general.sampling.top_p": "top_p",
    "general.sampling.min_p": "min_p",
    "general.sampling.penalty_repeat": "repetition_penalty",
}


def generation_of(model: GGUFModel) -> dict[str, Any]:
    """Return a generation config: the tokens that end a text or a turn, and the recommended sampling."""
    found = {number for key in ENDS if (number := token_of(model, key)) is not None}
    found |= {number for number, text, _ in tokens_of(model) if text in ENDING}
    sampling = {name: model.metadata[key] for key, name in SAMPLING.items() if key in model.metadata}
    return sampling | ({"eos_token_id": sorted(found)} if found else {})


def token_of(model: GGUFModel, key: str) -> int | None:
    """Return the id of a special token that the metadata names, or None if it names none. Raises GGUFError."""
    token, tokens = model.metadata.get(key), model.metadata.get("tokenizer.ggml.tokens", [])
    if token is not None and type(token) is not int:
        raise GGUFError(f"its metadata has {key} = {token!r:.60}, expected a token id")
    if token is None or not 0 <= token < len(tokens):
        token = UNSAID.get(key) if model.metadata.get("tokenizer.ggml.model") == "llama" else None
    return token if token is not None and token < len(tokens) else None


def adds(model: GGUFModel, name: str) -> bool:
    """Return whether each text begins with a `bos`, or ends with an `eos`, by `name`."""
    said = model.metadata.get(f"tokenizer.ggml.add_{name}_token")
    if said is not None:
        return bool(said)
    kind, split = (model.metadata.get(f"tokenizer.ggml.{each}") for each in ("model", "pre"))
    return name == "bos" and (kind == "llama" or split in WHOLE_WORDS)


def tokens_of(model: GGUFModel) -> Iterator[tuple[int, str, int]]:
    """Yield ids, texts and types of tokens; converters pad vocabularies and give some tokens a wrong type."""
    tokens, types = (model.metadata.get(f"tokenizer.ggml.{name}") for name in ("tokens", "token_type"))
    for number, text in enumerate(tokens or []):
        kind = NORMAL if types is None else int(types[number])
        if text and kind != UNUSED and text != f"[PAD{number}]":
            yield number, text, CONTROL if text in ENDING or FILLING.fullmatch(text) else kind


def save_tokenizer(model: GGUFModel, folder: Path) -> None:
    """Write the tokenizer's files. Raises any error of the library."""
    tokenizer = (_of_pieces if model.metadata["tokenizer.ggml.model"] == "llama" else _of_bytes)(model)
    _add_whole_tokens(tokenizer, model)
    numbers = {name: token_of(model, key) for name, key in NAMED.items()}
    texts = {name: tokenizer.id_to_token(number) for name, number in numbers.items() if number is not None}
    _add_ends(tokenizer, model, texts)
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    said = {name.removesuffix("_id"): text for name, text in texts.items() if text is not None}
    said["tokenizer_class"] = GENERIC
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(said, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _of_bytes(model: GGUFModel) -> Tokenizer:
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    name = model.metadata["tokenizer.ggml.pre"]
    vocabulary = {text: number for number, text, _ in tokens_of(model)}
    merges = [_halves(merge) for merge in model.metadata["tokenizer.ggml.merges"]]
    known = [(left, right) for left, right in merges if {left, right, left + right} <= vocabulary.keys()]
    tokenizer = Tokenizer(models.BPE(vocabulary, known, ignore_merges=name in WHOLE_WORDS))
    tokenizer.normalizer = normalizers.NFC() if name in COMPOSED else None
    split = SPLITS[name]
    steps: list[pre_tokenizers.PreTokenizer] = []
    if split == DIGITS:
        steps = [pre_tokenizers.Digits(individual_digits=True)]
    elif split != GPT2:
        steps = [pre_tokenizers.Split(Regex(split), "isolated")]
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split in (GPT2, DIGITS))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*steps, level])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _halves(merge: str) -> tuple[str, str]:
    place = merge.find(" ", 1)
    return merge[:place], merge[place + 1 :]


def _of_pieces(model: GGUFModel) -> Tokenizer:
    """Build a SentencePiece tokenizer that encodes unknown characters as bytes."""
    from tokenizers import Tokenizer, decoders, models, normalizers

    vocabulary = {text: number for number, text, _ in tokens_of(model)}
    unknown = token_of(model, NAMED["unk_token_id"])
    bpe = models.BPE(
        vocabulary,
        _merges_of(model),
        unk_token=next((text for text, number in vocabulary.items() if number == unknown), None),
        fuse_unk=True,
        byte_fallback=True,
    )
    tokenizer = Tokenizer(bpe)
    steps: list[normalizers.Normalizer] = [normalizers.Replace(" ", "▁")]
    decoding = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if model.metadata.get("tokenizer.ggml.add_space_prefix", True):  # each text between special tokens gets one
        steps.insert(0, normalizers.Prepend("▁"))
        decoding.append(decoders.Strip(" ", 1, 0))
    tokenizer.normalizer = normalizers.Sequence(steps)
    tokenizer.decoder = decoders.Sequence(decoding)
    return tokenizer


def _merges_of(model: GGUFModel) -> list[tuple[str, str]]:
    """Return SentencePiece's merges: all pairs of pieces that form a third piece, ordered by its score."""
    scores = model.metadata["tokenizer.ggml.scores"].tolist()
    pieces = {text: -scores[number] for number, text, kind in tokens_of(model) if kind == NORMAL}
    found = [
        (rank, -place, text)
        for text, rank in pieces.items()
        for place in range(1, len(text))
        if text[:place] in pieces and text[place:] in pieces
    ]
    return [(text[:-place], text[-place:]) for _, place, text in sorted(found)]


def _add_whole_tokens(tokenizer: Tokenizer, model: GGUFModel) -> None:
    from tokenizers import AddedToken

    takes_spaces = model.form.tokens_take_spaces and model.metadata["tokenizer.ggml.model"] == "llama"
    for kinds in ((CONTROL, UNKNOWN), (USER_DEFINED,)):
        special = CONTROL in kinds
        found = [
            AddedToken(text, rstrip=takes_spaces and text not in KEEPING_SPACES, normalized=False, special=special)
            for _, text, kind in tokens_of(model)
            if kind in kinds
        ]
        (tokenizer.add_special_tokens if special else tokenizer.add_tokens)(found)


def _add_ends(tokenizer: Tokenizer, model: GGUFModel, texts: dict[str, Any]) -> None:
    """Make the tokenizer add the tokens that begin and end each text."""
    from tokenizers import processors

    first, last = ([texts[f"{name}_token_id"]] if adds(model, name) else [] for name in ("bos", "eos"))
    known = [(text, tokenizer.token_to_id(text)) for text in dict.fromkeys([*first, *last])]
    tokenizer.post_processor = processors.TemplateProcessing(single=[*first, "$A", *last], special_tokens=known)
