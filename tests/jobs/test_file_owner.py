"""Identities differ if tokens may differ, and not for speed alone."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from swiftbatch.jobs.file_owner import Identity
from tests.jobs.run.run_parts import MANIFEST

OWN = Identity(job_id="a-0123456789abcdef", fingerprint="fp_0123456789abcdef")
NAME = st.text("abcXYZ019-_", min_size=1, max_size=80)


@given(job_id=NAME, fingerprint=NAME, behind=st.binary(max_size=9))
def test_a_packed_identity_comes_back_with_its_size(job_id: str, fingerprint: str, behind: bytes) -> None:
    identity = Identity(job_id=job_id, fingerprint=fingerprint)
    packed = identity.pack()
    assert Identity.unpack(packed + behind) == (identity, len(packed))
    assert Identity.unpack(memoryview(packed)) == (identity, len(packed))


@given(data=st.binary(max_size=60))
@example(data=b"\x00\x01 ")  # cut in the middle
def test_bytes_without_an_identity_are_told(data: bytes) -> None:
    with contextlib.suppress(ValueError):
        found, size = Identity.unpack(data)
        assert found.pack() == data[:size]
    with pytest.raises(ValueError, match="found no job's name"):
        Identity.unpack(OWN.pack()[: len(data) % len(OWN.pack().split(b" ")[0])])


def test_what_another_file_says_of_itself_is_printed_as_one_line() -> None:
    assert OWN.difference(OWN) is None
    problem = OWN.difference(Identity(job_id="a\nb\x1b", fingerprint=OWN.fingerprint)) or ""
    assert problem == f'found a file of job "a\\nb\\u001b", expected one of job {OWN.job_id}'


@pytest.mark.parametrize(
    "change",
    [
        {"model_fingerprint": "f2"},
        {"text_fingerprint": "t2"},
        {"dtype": "float32"},
        {"kv_dtype": "int8"},
        {"kv_dtype": "fp8"},
        {"logprobs_mode": "processed_logprobs"},
        {"thinking_markers": ("<t>", "</t>")},
    ],
)
def test_runs_that_would_draw_other_tokens_have_other_fingerprints(change: dict[str, object]) -> None:
    assert MANIFEST.model_copy(update=change).fingerprint != MANIFEST.fingerprint


def test_engine_hardware_and_name_are_no_part_of_a_run_s_fingerprint() -> None:
    others = {"run_id": "r", "created": 2.0, "engine": "auto", "device": "cuda", "num_threads": 9, "versions": {}}
    folders = {"draft_model": "d", "kv_offload": "k", "model": "m"}
    later = {"cpu_capability": "AVX2", "exactness": "exact up to ties", "seed": 8, "max_tokens": 3}
    assert MANIFEST.model_copy(update=others | folders | later).fingerprint == MANIFEST.fingerprint


def test_the_fingerprint_of_a_run_stays_what_its_files_say() -> None:
    assert MANIFEST.fingerprint == "fp_1a062a3c534761f1"
