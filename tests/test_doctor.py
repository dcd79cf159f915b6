"""`doctor` says what it measured, and a run's manifest knows it afterwards."""

from __future__ import annotations

from pathlib import Path

import pytest

from worker import attention
from worker.config import EngineConfig
from worker.doctor import diagnose
from worker.verdicts import known_verdict


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_an_exact_machine_is_called_exact_and_remembered(tiny_model: Path) -> None:
    config = EngineConfig(model=str(tiny_model), num_threads=2)
    diagnosis = diagnose(config, num_rows=300)
    assert diagnosis.verdict == "exact"
    assert diagnosis.num_rows >= 300
    assert "every engine, batch and resume gives the same tokens" in diagnosis.summary()
    assert known_verdict(diagnosis.key()) == "exact"
    other = diagnosis.model_copy(update={"num_threads": 1})
    assert known_verdict(other.key()) == "not probed"


def test_a_machine_whose_rows_differ_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "QUERY_ROW_QUANTUM", 1)
    diagnosis = diagnose(EngineConfig(num_threads=2), num_rows=600)
    assert diagnosis.verdict == "exact up to ties"
    assert "can change where two candidates nearly tie" in diagnosis.summary()
