from __future__ import annotations

from typing import Any

import pytest
import torch

from swiftbatch.worker.exactness.gpu_doctor import machine_checks as noise
from swiftbatch.worker.exactness.gpu_doctor.machine_checks import check_noise, noise_of
from swiftbatch.worker.model.model_files import ModelFiles
from tests.worker.exactness.gpu_doctor.small_parts import small_parts


def test_the_noise_of_the_kernels_is_that_of_the_cpu(embedded_files: ModelFiles) -> None:
    finding = check_noise(small_parts(embedded_files))
    assert finding.passed, finding.words
    assert all(row["words differing"] == 0 for row in finding.rows)


def one_word_off(words: torch.Tensor, numbers: torch.Tensor) -> None:
    words[7] ^= 1


def one_number_far_off(words: torch.Tensor, numbers: torch.Tensor) -> None:
    numbers[7] += 0.1


@pytest.mark.parametrize("spoil", [one_word_off, one_number_far_off])
def test_other_noise_is_found(embedded_files: ModelFiles, monkeypatch: pytest.MonkeyPatch, spoil: Any) -> None:
    def spoilt(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
        words, numbers = noise_of(*args)
        spoil(words, numbers)
        return words, numbers

    monkeypatch.setattr(noise, "noise_of", spoilt)
    assert not check_noise(small_parts(embedded_files)).passed
