from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import unicodedata
from dataclasses import replace
from pathlib import Path

import pytest
import tokenizers
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from swiftbatch.jobs.errors import ModelError
from swiftbatch.jobs.job import Job, Message, packed
from swiftbatch.jobs.sampling_params import SamplingParams
from swiftbatch.scheduler.cli import main
from swiftbatch.worker.model.model_files import ModelFiles, locate_model
from swiftbatch.worker.text.tokenizer import Chat, EncodedPrompt, TextCodec, max_chars_per_token
from tests import ROOT
from tests.scheduler.commands.submit_parts import submit_file
from tests.tiny_targets import model as model

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
SAMPLING = SamplingParams(max_tokens=5, seed=1)


def test_many_prompts_come_to_the_tokens_that_each_comes_to_alone(embedded_files: ModelFiles) -> None:
    codec = TextCodec(replace(embedded_files, max_positions=1000))
    assert codec._is_the_library_s
    texts = ["once", "", "na\u00efve \U0001f642\n\n", "<|endoftext|>", "x" * 10**6, "the river " * 50]
    chat, too_large = Chat([Message(role="user", content="hi")], None), (1, 10**6)
    found = codec.encode_all([*texts, chat, (3, 4), too_large])
    for text, each in zip(texts, found, strict=False):
        if text == texts[4]:
            with pytest.raises(ValueError, match=re.escape(str(each))):
                codec.encode_one(text)
        else:
            num_added = int(text == texts[3])  # it begins with the BOS token itself
            assert isinstance(each, EncodedPrompt)
            assert each.token_ids == codec._tokenizer.encode(text)[num_added:] == codec.encode_one(text).token_ids
    assert found[-3] == codec.encode_one(chat)
    assert found[-2] == EncodedPrompt([3, 4])
    assert "found the token id 1,000,000" in str(found[-1])


def test_the_tokenizer_is_the_one_that_transformers_chooses(embedded_files: ModelFiles, model: Path) -> None:
    text = "It had rained since noon.\n\n  naïve — 12,345 <|endoftext|> \U0001f642"
    other = Path(shutil.copytree(model, model.with_name("other")))
    said = json.loads((other / "tokenizer_config.json").read_text())
    (other / "tokenizer_config.json").write_text(json.dumps(said | {"tokenizer_class": "Qwen2Tokenizer"}))
    for files in (embedded_files, locate_model(str(model)), locate_model(str(other))):
        chosen, ours = AutoTokenizer.from_pretrained(files.path), TextCodec(files)._tokenizer
        assert type(ours) is type(chosen)
        assert ours.encode(text) == chosen.encode(text)
        assert ours.decode(range(200)) == chosen.decode(range(200), clean_up_tokenization_spaces=False)
        assert ours.special_tokens_map == chosen.special_tokens_map
        assert ours.chat_template == chosen.chat_template


def test_the_text_of_the_embedded_model_needs_no_torch() -> None:
    """Driver, `tail` and `status` start seconds sooner."""
    program = (
        "import sys; from swiftbatch.worker.model.model_files import locate_model\n"
        "from swiftbatch.worker.text.tokenizer import TextCodec\n"
        "print(TextCodec(locate_model('embedded')).encode('a') != [], 'torch' in sys.modules)"
    )
    process = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert process.stdout == "True False\n"


def prompt_job(prompt: str) -> Job:
    return Job(custom_id="a", url="/v1/completions", prompt=prompt, sampling=SAMPLING)


def chat_job(*roles: str) -> Job:
    messages = tuple(Message(role=role, content="Hello") for role in roles)
    return Job(custom_id="a", url="/v1/chat/completions", messages=messages, sampling=SAMPLING)


@pytest.mark.parametrize(
    ("refusal", "words"),
    [
        ("{{ raise_exception('No system\\nrole here') }}", "No system role here"),
        ("{{ message.absent.deeper }}", "has no attribute 'absent'"),
        ("{{ messages.append(message) }}", "unsafe"),
        ("{{ message.content + 1 }}", "can only concatenate str"),
        ("{{ 1 // 0 }}", "by zero"),
    ],
)
def test_a_line_that_the_chat_template_refuses_is_a_reject_in_its_words_and_the_others_are_taken(
    model: Path, tmp_path: Path, refusal: str, words: str
) -> None:
    loop = "{% for message in messages %}{% if message.role == 'system' %}" + refusal + "{% endif %}"
    (model / "chat_template.jinja").write_text(loop + "{{ message.content }}{% endfor %}")
    lines = [
        {"custom_id": name, "messages": [{"role": role, "content": "Hello"}], "max_tokens": 5}
        for name, role in (("a", "user"), ("b", "system"), ("c", "user"))
    ]
    path = tmp_path / "jobs.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    submission = submit_file(str(path), str(tmp_path / "run"), model=str(model))
    assert [record.job.custom_id for record in submission.run.jobs()] == ["a", "c"]
    (reject,) = submission.run.rejects()
    assert (reject.line_number, reject.custom_id) == (2, "b")
    assert reject.reason.startswith("messages: the model's chat template refuses them: ")
    assert words in reject.reason
    assert "\n" not in reject.reason


def test_a_long_speech_of_a_template_is_cut(model: Path) -> None:
    (model / "chat_template.jinja").write_text("{{ raise_exception('x' * 10000) }}")
    with pytest.raises(ValueError, match=r"refuses them: x{500}\.\.\.$"):
        TextCodec(locate_model(str(model))).prompt_of(chat_job("user"))


@pytest.mark.parametrize(
    "content",
    ["{torn", "{}", "[]", '{"version": "9.0", "model": {"type": "Quantum"}}', '{"version": "1.0", "model": null}'],
)
def test_a_tokenizer_that_can_t_be_read_is_refused_in_one_line(model: Path, tmp_path: Path, content: str) -> None:
    (model / "tokenizer.json").write_text(content)
    with pytest.raises(ModelError, match=r"^model \S+: its tokenizer cannot be loaded from [^\n]+$"):
        TextCodec(locate_model(str(model)))
    path = tmp_path / "jobs.jsonl"
    path.write_text('{"custom_id": "a", "prompt": "Once", "max_tokens": 5}\n')
    result = CliRunner().invoke(main, ["submit", str(path), "--run", str(tmp_path / "run"), "--model", str(model)])
    assert result.exit_code == 2
    assert result.stderr.count("\n") == 1
    assert not (tmp_path / "run").exists()


def fast(
    vocab: list[str],
    normalizer: normalizers.Normalizer | None = None,
    pre_tokenizer: pre_tokenizers.PreTokenizer | None = None,
    added: AddedToken | None = None,
    **options: object,
) -> PreTrainedTokenizerFast:
    """Merges build each entry from its first letters and its last."""
    merges = [(token[:-1], token[-1]) for token in vocab if len(token) > 1 and token[:-1] in vocab]
    backend = Tokenizer(models.BPE({token: number for number, token in enumerate(vocab)}, merges, **options))
    if normalizer is not None:
        backend.normalizer = normalizer
    if pre_tokenizer is not None:
        backend.pre_tokenizer = pre_tokenizer
    if added is not None:
        backend.add_tokens([added])
    return PreTrainedTokenizerFast(tokenizer_object=backend)


BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
WORDS = [*ALPHABET, "aa", "aaa", "aaaa", "Ã©"]
BYTE_LEVEL = pre_tokenizers.ByteLevel(add_prefix_space=False)
SENTENCE_PIECE = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
BOUNDED = {
    "byte level": (fast(WORDS, None, BYTE_LEVEL), 4),
    "composing": (fast([*ALPHABET, "á¾", "á¾Ĥ"], normalizers.NFC(), BYTE_LEVEL), 12),
    "composing more": (fast(WORDS, normalizers.NFKC(), BYTE_LEVEL, AddedToken("<end of it>", normalized=True)), 44),
    "byte fallback": (fast([*BYTES, "a", "aa", "▁"], SENTENCE_PIECE, None, byte_fallback=True, fuse_unk=True), 6),
}
LETTERS = st.sampled_from("aé ́ͅ\u1f82ﬃ각ᄀ가\n\t<>👍") | st.characters(exclude_categories=["Cs"])


DECOMPOSED = st.sampled_from("\u1f82é각").map(normalizers.NFD().normalize_str)


@given(
    text=st.text(LETTERS) | st.lists(DECOMPOSED).map("".join) | st.integers(0, 50).map("a".__mul__),
    name=st.sampled_from(sorted(BOUNDED)),
    times=st.integers(1, 4),
)
def test_no_text_has_fewer_tokens_than_its_length_says(text: str, name: str, times: int) -> None:
    tokenizer, bound = BOUNDED[name]
    assert max_chars_per_token(tokenizer) == bound
    assert len(tokenizer.encode(text * times, add_special_tokens=False)) * bound >= len(text * times)


def word_level() -> PreTrainedTokenizerFast:
    backend = Tokenizer(models.WordLevel({"a": 0, "?": 1}, unk_token="?"))
    return PreTrainedTokenizerFast(tokenizer_object=backend)


UNBOUNDED = {
    "unknown words": word_level(),
    "whitespace dropped": fast(WORDS, None, pre_tokenizers.Sequence([pre_tokenizers.Whitespace(), BYTE_LEVEL])),
    "pieces dropped": fast(WORDS, None, pre_tokenizers.Sequence([pre_tokenizers.Split(" ", "removed"), BYTE_LEVEL])),
    "text stripped": fast(WORDS, normalizers.Sequence([normalizers.NFC(), normalizers.Strip()]), BYTE_LEVEL),
    "text shortened": fast(WORDS, normalizers.Replace(Regex(" +"), " "), BYTE_LEVEL),
    "a byte without token": fast(WORDS[1:], None, BYTE_LEVEL),
    "no bytes at all": fast(["a"], None, None),
    "space around a token": fast(WORDS, None, BYTE_LEVEL, AddedToken("<end>", rstrip=True)),
}


@pytest.mark.parametrize("name", sorted(UNBOUNDED))
def test_where_characters_may_vanish_no_bound_is_claimed(name: str) -> None:
    assert max_chars_per_token(UNBOUNDED[name]) is None


def test_no_character_is_composed_of_more_than_four() -> None:
    normalize = tokenizers.normalizers.NFD().normalize_str
    letters = [chr(point) for point in range(0x110000) if unicodedata.decomposition(chr(point))]
    assert max(len(normalize(letter)) for letter in letters) == 4


def test_a_text_with_no_room_in_the_model_is_refused_by_its_length(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    codec = TextCodec(locate_model(str(tiny_model)))
    longest = max_chars_per_token(codec._tokenizer)
    assert longest == len("<|endoftext|>")
    longest_fitting = "<|endoftext|>" * 4096
    token_ids = codec.prompt_of(prompt_job(longest_fitting)).token_ids
    assert len(token_ids) == 4096  # it begins with the BOS token itself
    monkeypatch.setattr(codec, "encode", lambda *_: pytest.fail("it was tokenized"))
    with pytest.raises(ValueError, match=r"its 53,249 characters are at least 4,097 tokens, expected at most .* 4,096"):
        codec.prompt_of(prompt_job(longest_fitting + "s"))


def test_a_prompt_with_tokens_that_the_model_lacks_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny_model, tmp_path / "model")
    config = tmp_path / "model" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"vocab_size": 5}))
    codec = TextCodec(locate_model(str(tmp_path / "model")))
    with pytest.raises(ValueError, match=r"prompt: token \d+ \('.+'\) comes of it, and the model has 5 tokens"):
        codec.prompt_of(prompt_job("the quick brown fox"))


def test_a_dropout_of_merges_is_for_training_alone(model: Path, tmp_path: Path) -> None:
    said = json.loads((model / "tokenizer.json").read_text())
    plain = TextCodec(locate_model(str(model)))
    said["model"]["dropout"] = 0.5
    (model / "tokenizer.json").write_text(json.dumps(said))
    text = "the quick brown fox jumps over the lazy dog, " * 5
    codec = TextCodec(locate_model(str(model)))
    assert [each.token_ids for each in codec.encode_all([text] * 20)] == [plain.encode(text)] * 20
    lines = "".join(f'{{"custom_id": "{i}", "prompt": "{text}", "max_tokens": 5}}\n' for i in range(20))
    (tmp_path / "jobs.jsonl").write_text(lines)
    run = submit_file(str(tmp_path / "jobs.jsonl"), str(tmp_path / "run"), model=str(model)).run
    assert {record.prompt_token_ids for record in run.jobs()} == {packed(plain.encode(text))}
