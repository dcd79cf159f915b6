from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from swiftbatch.jobs.checkpoints.kv_segments import decode_state
from swiftbatch.jobs.checkpoints.token_log import Rewind, TokenIds, TokenLog, decode_log, encode_log
from swiftbatch.jobs.file_owner import DamagedFileError
from tests.jobs.checkpoints.checkpoint_parts import IDENTITY

TOKEN_IDS = st.lists(st.integers(0, 2**32 - 1), max_size=40).map(lambda ids: np.array(ids, dtype=np.uint32))


@pytest.mark.parametrize("wrong", [np.zeros(3, np.int64), np.zeros((1, 3), np.uint32)])
def test_token_ids_of_another_type_or_shape_are_refused(wrong: Any) -> None:
    with pytest.raises(TypeError, match="expected uint32"):
        encode_log(TokenLog(wrong), IDENTITY)


@given(token_ids=TOKEN_IDS)
def test_a_token_log_gives_back_its_tokens(token_ids: TokenIds) -> None:
    assert np.array_equal(decode_log(encode_log(TokenLog(token_ids), IDENTITY), IDENTITY).token_ids, token_ids)


REWINDS = st.lists(st.builds(Rewind, st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1)), max_size=4).map(tuple)


@given(token_ids=TOKEN_IDS, rewinds=REWINDS)
def test_a_token_log_gives_back_its_rewinds(token_ids: TokenIds, rewinds: tuple[Rewind, ...]) -> None:
    data = encode_log(TokenLog(token_ids, rewinds), IDENTITY)
    found = decode_log(data, IDENTITY)
    assert (found.token_ids.tolist(), found.rewinds) == (token_ids.tolist(), rewinds)
    for end in range(len(data)):
        with pytest.raises(DamagedFileError, match="found"):
            decode_log(data[:end], IDENTITY)


@given(data=st.binary(max_size=60))
def test_bytes_that_are_no_log_and_no_state_are_told_apart(data: bytes) -> None:
    for decode in (partial(decode_log, identity=IDENTITY), decode_state):
        with pytest.raises(DamagedFileError, match="found"):
            decode(data)
