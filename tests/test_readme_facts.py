"""What the README says of sizes, requests and error messages is what the code does and says."""

from __future__ import annotations

import ast
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from checkpoint_parts import JOB, Cache, output_ids, tokens_at
from command_lines import ROOT, page, section, table
from fault_proxy import FaultProxy
from report_parts import timeline
from run_parts import MANIFEST, PROGRESS

from jobs.checkpoint_writer import CheckpointWriter
from jobs.checkpoints import CheckpointStore
from jobs.run import Run
from jobs.segments import HEADERS_SIZE, Segment, encode_segment
from jobs.state_file import encode_state
from jobs.store import Store
from jobs.token_log import encode_tokens
from metrics.discovery import PATH
from scheduler.events import Event
from scheduler.heartbeat import BEAT_SECONDS_OBJECT_STORE
from scheduler.takeover import Epoch
from worker.config import EngineConfig
from worker.drafters.token_recycling import TokenRecyclingDrafter
from worker.kv_room import bytes_per_position
from worker.model_files import EMBEDDED

README = page("README.md")
SIZING = section(README, "Sizing")
MESSAGES = [row[0].strip("`").replace("\\|", "|") for row in table(README, "it says")]
LENGTH = 100_000
GAP = "\0"  # where an f-string has a value


def number(text: str) -> float:
    """The number at the beginning of a cell."""
    found = re.match(r"[\d,.]+", text)
    assert found is not None, text
    return float(found[0].replace(",", ""))


def model_config(layers: str, kv_heads: str, head_dim: str) -> dict[str, int]:
    return {"num_hidden_layers": int(layers), "num_key_value_heads": int(kv_heads), "head_dim": int(head_dim)}


@pytest.mark.parametrize("row", table(SIZING, "model"), ids=lambda row: row[0])
def test_the_caches_take_what_the_table_says(row: list[str], tmp_path: Path) -> None:
    name, layers, kv_heads, head_dim, position, all_positions = row
    config = model_config(layers, kv_heads, head_dim)
    (tmp_path / "config.json").write_text(json.dumps(config))
    expected = bytes_per_position(tmp_path, "bfloat16")
    assert expected == number(position)
    assert f"{expected * LENGTH / 1e9:.{1 if expected > 10_000 else 2}f}" == f"{number(all_positions):g}"
    if name == "embedded":
        assert config.items() <= json.loads((EMBEDDED / "config.json").read_text()).items()


def test_checkpoints_take_what_the_text_says() -> None:
    found = re.search(r"(\d+) bytes and (\d+) a token", SIZING)
    assert found is not None
    for num_tokens in (0, 1000):
        assert len(encode_tokens(np.zeros(num_tokens, dtype=np.uint32))) == int(found[1]) + int(found[2]) * num_tokens
    found = re.search(r"(\d+) bytes for every entry of the vocabulary and ([\d.]+) MB", SIZING)
    assert found is not None
    for vocab_size in (300, 4096):
        state = TokenRecyclingDrafter(vocab_size).state(None)  # type: ignore[arg-type]
        expected = int(found[1]) * vocab_size + float(found[2]) * 1e6
        assert len(encode_state(state)) == pytest.approx(expected, abs=5000)


def test_a_position_of_a_segment_takes_its_keys_and_values_and_four_bytes() -> None:
    assert "4 bytes more" in SIZING
    tokens, kv = np.zeros(1024, dtype=np.uint32), np.zeros((32, 1024, 64), dtype=np.uint16)
    assert 0 < len(encode_segment(Segment(0, tokens, kv))) - kv.nbytes - 4 * 1024 < HEADERS_SIZE


def requests_of(proxy: FaultProxy, action: Callable[[], object]) -> tuple[int, int]:
    """How many requests of the two prices an action makes: PUT and its like, GET and its like. DELETE is free."""
    proxy.requests.clear()
    action()
    kinds: Counter[str] = Counter()
    for method, path in (request.split(" ", 1) for request in proxy.requests):
        is_free = method == "DELETE" or (method == "POST" and path.endswith("?delete"))
        is_dear = method in ("PUT", "POST") or "list-type=" in path
        kinds["free" if is_free else "dear" if is_dear else "cheap"] += 1
    return kinds["dear"], kinds["cheap"]


def told_requests(what: str) -> tuple[int, int]:
    """The requests that the table says of something."""
    (row,) = [row for row in table(SIZING, "what") if row[0].startswith(what)]
    return int(number(row[2])), int(number(row[3]))


def test_a_heartbeat_makes_the_requests_that_the_table_says(s3_uri: str, s3_proxy: FaultProxy) -> None:
    run = Run.create_or_open(s3_uri, MANIFEST)
    epoch = Epoch.begin(run)

    def beat() -> None:  # as in `Driver`
        epoch.check()
        run.write_progress(PROGRESS)
        run.cancel_requests()

    assert requests_of(s3_proxy, beat) == told_requests("heartbeat")
    assert f"every {BEAT_SECONDS_OBJECT_STORE:g} s" in SIZING


def test_checkpoints_make_the_requests_that_the_table_says(s3_uri: str, s3_proxy: FaultProxy) -> None:
    checkpoints = CheckpointStore(Store(s3_uri))
    attempt = checkpoints.claim(JOB, "w1")
    writer = CheckpointWriter(checkpoints, 1024, lambda *_: None)
    writer.open(JOB, attempt, "suffix", Cache())

    def log() -> None:
        writer.put_tokens(JOB, output_ids(10))
        assert writer.flush(60)

    def time_line() -> None:
        writer.put_timeline(JOB, timeline(0.0, 1.0, 0, 10))
        assert writer.flush(60)

    def state(end: int) -> None:
        writer.put_state(JOB, tokens_at(0, end), {"table": np.arange(end)})
        assert writer.flush(60)

    state(1000)
    assert requests_of(s3_proxy, log) == told_requests("token log")
    assert requests_of(s3_proxy, time_line) == told_requests("timeline")
    assert requests_of(s3_proxy, lambda: state(2000)) == told_requests("state")
    writer.stop()


def test_the_example_follows_from_the_table() -> None:
    """Requests and cost of an hour with the defaults, one run with one job at 30 tokens/s."""
    config = EngineConfig()
    rates = {
        "heartbeat": 3600 / BEAT_SECONDS_OBJECT_STORE,
        "token log": 3600 / config.checkpoint_seconds,
        "state": 3600 * 30 / config.checkpoint_tokens,
    }
    for name, rate in rates.items():
        (row,) = [row for row in table(SIZING, "what") if row[0].startswith(name)]
        assert number(row[4]) == round(rate)
    dear_price, cheap_price = (float(price) for price in re.findall(r"\$([\d.]+) per 1,000", SIZING))
    cost = sum(
        rate * (dear * dear_price + cheap * cheap_price) / 1000
        for name, rate in rates.items()
        for dear, cheap in [told_requests(name)]
    )
    told = re.search(r"\$([\d.]+) an hour for the run and \$([\d.]+) for each job", SIZING)
    assert told is not None
    run_cost = rates["heartbeat"] * sum(np.multiply(told_requests("heartbeat"), (dear_price, cheap_price))) / 1000
    assert float(told[1]) == pytest.approx(run_cost, abs=0.0005)
    assert float(told[2]) == pytest.approx(cost - run_cost, abs=0.0005)


def _texts(node: ast.AST) -> Iterator[str]:
    """The texts of a syntax tree; where an f-string has a value, there is a gap."""
    for each in ast.walk(node):
        if isinstance(each, ast.JoinedStr):
            yield "".join(part.value if isinstance(part, ast.Constant) else GAP for part in each.values)  # type: ignore[misc]
        elif isinstance(each, ast.Constant) and isinstance(each.value, str):
            yield each.value


@pytest.fixture(scope="module")
def texts() -> list[str]:
    """All texts in the code."""
    files = [path for room in ("jobs", "metrics", "scheduler", "worker") for path in (ROOT / room).rglob("*.py")]
    return [text for path in files for text in _texts(ast.parse(path.read_text(encoding="utf-8")))]


def says(message: str, texts: list[str]) -> bool:
    """Whether one text of the code has the message's words, in order; `...` stands for what changes."""
    pattern = ".*".join(re.escape(part) for part in re.split(r"\s*\.\.\.\s*", message))
    return any(re.search(pattern, text, re.DOTALL) for text in texts)


@pytest.mark.parametrize("message", MESSAGES)
def test_the_code_says_each_message(message: str, texts: list[str]) -> None:
    assert len(message.replace("...", "").split()) >= 3, "too short to be told from others"
    assert says(message, texts)


def test_enough_messages_are_explained_and_a_stale_one_is_found(texts: list[str]) -> None:
    assert len(MESSAGES) == len(set(MESSAGES)) >= 12
    assert not says("the run at ... is held by a stranger", texts)
    assert not says("no GPU, and this machine has ... the run was made for cuda", texts)


def test_the_pages_and_addresses_that_are_named_exist() -> None:
    for link in re.findall(r"\]\(([^)#:]+)\)", README):
        assert (ROOT / link).exists(), link
    headings = {re.sub(r"[^\w -]", "", line).replace(" ", "-").lower() for line in re.findall(r"^#+ (.*)$", README, re.M)}
    assert set(re.findall(r"\]\(#([^)]+)\)", README)) <= headings
    assert PATH in section(README, "Watching a run")
    assert "scheduler/EVENTS.md" in section(README, "Watching a run")
    assert Event.__doc__


def test_the_two_pictures_are_shown() -> None:
    pictures = re.findall(r"!\[[^\]]{10,}\]\((\S+\.png)\)", README)
    assert len(pictures) == 2
    for picture in pictures:
        assert (ROOT / picture).read_bytes().startswith(b"\x89PNG")
