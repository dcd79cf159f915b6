from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from swiftbatch.scheduler.serve.records.api_keys import (
    ApiKeyError,
    Keyring,
    Rights,
    make_key,
    parse_keys,
    parse_line,
)
from tests.scheduler.commands.command_parts import invoke, refusal

HASH, OTHER_HASH = "a" * 64, "b" * 64


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [1000.0]
    monkeypatch.setattr("swiftbatch.scheduler.serve.records.api_keys.time.monotonic", lambda: now[0])
    return now


def write(path: Path, *lines: str) -> None:
    new = path.with_suffix(".new")
    new.write_text("\n".join(lines))
    new.rename(path)


def test_a_new_key_is_random_and_its_line_holds_the_hash_alone() -> None:
    (secret, line), (other, _) = make_key("alice"), make_key("alice")
    assert secret != other
    assert secret.startswith("sb_")
    assert len(secret) == len("sb_") + 43  # 256 bits, 6 per character
    assert line == f"alice:sha256:{hashlib.sha256(secret.encode()).hexdigest()}"
    result = invoke("serve", "--make-key", "alice")
    assert result.exit_code == 0
    shown, kept = result.stderr.split()[-1], result.stdout.strip()
    assert parse_line(kept).digest == hashlib.sha256(shown.encode()).hexdigest()
    assert "--make-key" in refusal("serve", "--make-key", "a:b")


def test_a_line_says_whose_a_key_is_and_what_it_may_do() -> None:
    line = f"team-a:sha256:{HASH} max_running=2 max_unfinished=9 max_tokens_per_day=5000 metrics=yes"
    key = parse_line(line)
    assert (key.name, key.digest) == ("team-a", HASH)
    assert key.rights == Rights(max_running=2, max_unfinished=9, max_tokens_per_day=5000, metrics=True)
    assert parse_line(f"a:sha256:{HASH}").rights == Rights()


@pytest.mark.parametrize(
    "line",
    [
        "",
        "alice",
        "alice:sb_secret",
        "alice:md5:secret",
        "alice:sha256:secret",
        f"alice:sha256:{HASH}secret",
        f"../x:sha256:{HASH}",
        f":sha256:{HASH}",
        f"{'a' * 65}:sha256:{HASH}",
        f"a:sha256:{HASH} max_running",
        f"a:sha256:{HASH} max_running=0",
        f"a:sha256:{HASH} max_running=1 max_running=1",
        f"a:sha256:{HASH} max_jobs=1",
    ],
)
def test_a_bad_line_is_refused_and_shows_no_secret(line: str) -> None:
    with pytest.raises(ApiKeyError) as refused:
        parse_line(line)
    assert "secret" not in str(refused.value)
    assert HASH not in str(refused.value)
    with pytest.raises(ApiKeyError, match=r"^line 3: ") as in_file:
        parse_keys(f"# keys\n\n{line or '?'}\n")
    assert "\n" not in str(in_file.value)


def test_a_name_may_have_two_keys_with_the_same_limits() -> None:
    assert len(parse_keys(f"a:sha256:{HASH}\na:sha256:{OTHER_HASH}")) == 2
    for line in (f"a:sha256:{OTHER_HASH} max_running=1", f"b:sha256:{HASH}"):
        with pytest.raises(ApiKeyError, match="line 2: "):
            parse_keys(f"a:sha256:{HASH}\n{line}")


def test_a_file_that_changes_is_read_again_and_a_broken_one_keeps_the_keys(tmp_path: Path, clock: list[float]) -> None:
    path, told = tmp_path / "keys", []
    (old, old_line), (new, new_line) = make_key("alice"), make_key("alice")
    write(path, "# of the team", old_line + " max_running=3", "")
    keyring = Keyring(str(path), told.append)
    assert (keyring.find(old).name, keyring.rights("alice").max_running) == ("alice", 3)
    assert [keyring.find(secret) for secret in (new, "", "\udcff", old + " ")] == [None] * 4

    write(path, new_line)
    assert keyring.find(new) is None  # the file is checked once a second
    clock[0] += 1
    assert keyring.find(new) is not None
    assert keyring.find(old) is None

    write(path, old_line, "alice:sha256:torn")
    for _ in range(3):
        clock[0] += 1
        assert keyring.find(new) is not None
    path.unlink()
    for _ in range(3):
        clock[0] += 1
        assert keyring.find(new) is not None
    assert len(told) == 2  # each once
    assert "line 2: " in told[0]
    write(path, old_line)
    clock[0] += 1
    assert keyring.find(old) is not None


@pytest.mark.parametrize("content", [None, b"", b"# none\n", b"\xff\xfe"])
def test_a_server_does_not_start_without_a_key(content: bytes | None, tmp_path: Path) -> None:
    path = tmp_path / "keys"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ApiKeyError, match=f"--api-keys {path}: "):
        Keyring(str(path), lambda _: None)
