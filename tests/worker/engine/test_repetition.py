from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from swiftbatch.jobs.sampling_params import RepetitionDetection, loop_guard
from swiftbatch.worker.engine import stopping
from swiftbatch.worker.engine.stopping import LoopDetector

GUARD = loop_guard("stop") or RepetitionDetection()


def ends_in_a_loop(token_ids: list[int], detection: RepetitionDetection) -> bool:
    """Decide by vLLM's description."""
    for size in range(max(1, detection.min_pattern_size), detection.max_pattern_size + 1):
        pattern, count = token_ids[-size:], detection.min_count
        if len(token_ids) >= size * count and token_ids[-size * count :] == pattern * count:
            return True
    return False


@st.composite
def detections(draw: st.DrawFn) -> RepetitionDetection:
    most = draw(st.integers(1, 9))
    least, count = draw(st.integers(0, most)), draw(st.integers(2, 5))
    return RepetitionDetection(max_pattern_size=most, min_pattern_size=least, min_count=count)


def texts() -> st.SearchStrategy[list[int]]:
    """Generate texts of few tokens, and with repeated patterns."""
    patterns = st.tuples(st.lists(st.integers(0, 2), min_size=1, max_size=9), st.integers(1, 6))
    return st.lists(patterns, max_size=6).map(lambda parts: [token for part, count in parts for token in part * count])


@given(detections(), texts(), st.integers(0, 60))
def test_a_loop_is_found_where_the_plain_definition_has_it(
    detection: RepetitionDetection, text: list[int], num_known: int
) -> None:
    """Also if the first tokens were known before, as after a resume."""
    known = text[:num_known]
    detector = LoopDetector(detection, np.array(known, dtype=np.int64))
    assert detector.is_loop() == ends_in_a_loop(known, detection)
    for end, token in enumerate(text[num_known:], len(known) + 1):
        detector.push(token)
        assert detector.is_loop() == ends_in_a_loop(text[:end], detection)


def test_a_loop_is_found_wherever_the_window_has_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stopping, "ROOM", 5)
    detection = RepetitionDetection(max_pattern_size=7, min_count=3)
    for num_before in range(30):
        text = [*range(100, 100 + num_before), *[1, 2, 3, 4] * 3]
        detector = LoopDetector(detection, np.zeros(0, dtype=np.int64))
        found = []
        for token in text:
            detector.push(token)
            found.append(detector.is_loop())
        assert found == [False] * (len(text) - 1) + [True]


@pytest.mark.parametrize("size", [1, 2, 3, 5, 15, 16, 50, 64, 200, 256])
def test_the_guard_finds_patterns_of_all_sizes_within_a_few_repetitions(size: int) -> None:
    """Multiples reveal short ones."""
    detector = LoopDetector(GUARD, np.arange(1000, 2000))
    for num_tokens in range(1, 4 * size + 65):
        detector.push(num_tokens % size)
        if detector.is_loop():
            break
    assert detector.is_loop()
    assert 64 <= num_tokens <= max(4 * size, 4 * (16 + size))


def test_a_refrain_or_a_row_of_dots_is_no_loop_to_the_guard() -> None:
    detector = LoopDetector(GUARD, np.zeros(0, dtype=np.int64))
    for token in [*[7] * 60, *list(range(40)) * 3, *[8] * 60]:
        detector.push(token)
        assert not detector.is_loop()
