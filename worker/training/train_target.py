"""Training of a small target model from scratch, with its tokenizer: `swiftbatch train target`."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from swiftbatch.worker.forward.hardware import resolve_device
from swiftbatch.worker.forward.target_model import TargetModel
from swiftbatch.worker.kv.gpu_memory_plan import SlotsWanted
from swiftbatch.worker.model.model_files import EMBEDDED, let_others_read, locate_model
from swiftbatch.worker.training import recipes, target_evaluation
from swiftbatch.worker.training.corpus import TEST, read_books
from swiftbatch.worker.training.data_parallel import Report
from swiftbatch.worker.training.model_card import write_card
from swiftbatch.worker.training.target_evaluation import (
    NUM_SCORED,
    SCORED_FROM,
    Evaluation,
    LongContext,
    evaluate_target,
    measure_long_context,
)
from swiftbatch.worker.training.target_recipe import CONFIGS, VOCAB_SIZE, TargetRecipe
from swiftbatch.worker.training.target_stages import run_stages, stages_of
from swiftbatch.worker.training.training_folder import TrainingFiles, TrainingFolder, held, write_record
from swiftbatch.worker.training.training_layers import ATTENTION_NAME, use_chunks
from swiftbatch.worker.training.training_texts import encode_books

FILES = TrainingFiles("train_log.jsonl", "train_state.pt", "model.safetensors", "train_training.png")
NUM_TEST_STRETCHES = 4
END_OF_TEXT = "<|endoftext|>"
# Words keep their leading space, digits are single, and a run of newlines is one piece.
WORD_PATTERN = r"'(?:s|t|re|ve|m|ll|d)\b| ?\p{L}+| ?\p{N}|\n+| ?[^\s\p{L}\p{N}]+|[^\S\n]+"
# A plain-text model has no roles: a chat is its messages, separated by blank lines.
CHAT_TEMPLATE = "{{ bos_token }}{% for message in messages %}{{ message['content'] }}\n\n{% endfor %}"


@dataclass(frozen=True)
class TrainedRecord(Evaluation):
    """Log record of a trained model."""

    long_context: LongContext
    when: str
    num_parameters: int
    num_corpus_tokens: int


def train_target(
    data: Path, output: Path, recipe: TargetRecipe, report: Report, kind: str = recipes.TARGET_KIND
) -> None:
    """Train tokenizer and model on books under `data`; write both, and the log, to `output`.

    Other kinds than the embedded model's use its tokenizer, to make losses comparable. A killed training resumes, to
    the same weights on the same kind of device; a finished training is kept. Raises CorpusError, and ModelError if the
    folder has another training or a process that trains.
    """
    books = list(read_books(data))
    with held(output):
        _train(books, data, output, recipe, report, kind)


def _train(books: list[str], data: Path, output: Path, recipe: TargetRecipe, report: Report, kind: str) -> None:
    device, corpus = resolve_device("auto"), {"num_books": len(books), "num_characters": sum(map(len, books))}
    identity = {"corpus": corpus, "recipe": asdict(recipe)} | ({} if _is_embedded(kind) else {"kind": kind})
    folder = TrainingFolder(output, FILES, identity)
    if folder.is_finished(report):
        return
    tokenizer = train_tokenizer(books, VOCAB_SIZE) if _is_embedded(kind) else embedded_tokenizer()
    encoded, test_file = encode_books(books, tokenizer), _test_file(data, tokenizer, report)
    torch.manual_seed(recipe.seed)
    config = CONFIGS[kind](tokenizer.bos_token_id, tokenizer.eos_token_id)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).to(device)
    model.set_attn_implementation(ATTENTION_NAME)
    use_chunks(model)
    num_tokens = sum(map(len, encoded))
    report(f"{len(books)} books, {num_tokens:,} tokens; {model.num_parameters():,} parameters on {device.type}")
    run_stages(model, stages_of(model, encoded, tokenizer.bos_token_id, recipe, report), folder, report)
    save_target(model, tokenizer, output)
    if test_file is not None:
        evaluation = evaluate_target(output, test_file, max_stretches=NUM_TEST_STRETCHES)
        losses = f"loss by position {evaluation.loss_by_position}, without far text {evaluation.near_loss_by_position}"
        report(f"{evaluation.bits_per_byte:.3f} bits per byte; {losses}")
        trained = TrainedRecord(
            **asdict(evaluation),
            long_context=long_context_of(output, test_file, tokenizer),
            when="after",
            num_parameters=model.num_parameters(),
            num_corpus_tokens=num_tokens,
        )
        with folder.open_log(recipe.all_steps) as log:
            write_record(log, trained)
        write_card(output)
    folder.plot()
    folder.finish()


def _is_embedded(kind: str) -> bool:
    return kind == recipes.TARGET_KIND


def embedded_tokenizer() -> PreTrainedTokenizerFast:
    tokenizer: PreTrainedTokenizerFast = PreTrainedTokenizerFast.from_pretrained(EMBEDDED, local_files_only=True)
    return tokenizer


def _test_file(data: Path, tokenizer: PreTrainedTokenizerFast, report: Report) -> Path | None:
    """Return the file to score the model on, or None if there is not enough text."""
    path = next(iter(sorted(data.rglob(TEST))), None)
    if path is None:
        report(f"{data}: no {TEST}; the model is not scored")
        return None
    num_tokens = sum(map(len, encode_books(list(read_books(path)), tokenizer)))
    if num_tokens < target_evaluation.STRETCH:
        report(f"{path}: {num_tokens:,} tokens, and {target_evaluation.STRETCH:,} are needed; the model is not scored")
        return None
    return path


def long_context_of(output: Path, test_file: Path, tokenizer: PreTrainedTokenizerFast) -> LongContext:
    slots = SlotsWanted(longest_job=SCORED_FROM + NUM_SCORED, num_slots=1)
    target = TargetModel.load(locate_model(str(output)), "bfloat16", "auto", slots=slots)
    return measure_long_context(target, encode_books(list(read_books(test_file)), tokenizer), tokenizer.bos_token_id)


def save_target(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, output: Path) -> None:
    """Write the model in bf16 as safetensors, with config and tokenizer."""
    state = {name: tensor.to(torch.bfloat16) for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    model.save_pretrained(output, state_dict=state)
    let_others_read(output / FILES.product)
    config = json.loads((output / "config.json").read_text())
    config["dtype"] = "bfloat16"
    (output / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    tokenizer.save_pretrained(output)


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Train a lossless byte-level BPE tokenizer; it puts `<|endoftext|>` before every text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORD_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    first = (END_OF_TEXT, tokenizer.token_to_id(END_OF_TEXT))
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{END_OF_TEXT} $A", special_tokens=[first])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )
