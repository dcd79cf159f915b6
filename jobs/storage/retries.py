"""Back-off with growing pauses, and retries of a storage that fails for a while."""

from __future__ import annotations

import errno
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeVar

from tenacity import RetryCallState, Retrying, retry_if_exception, stop_after_delay

MIN_JITTER_SECONDS = 0.2
MAX_DOUBLINGS = 64  # more would leave the range of floats some day


@dataclass(frozen=True)
class Backoff:
    """Pauses from `first` to `longest` seconds."""

    first: float
    longest: float

    def seconds(self, num_failures: int) -> float:
        """Return the pause after `num_failures` consecutive failures."""
        return min(self.longest, self.first * 2.0 ** min(num_failures - 1, MAX_DOUBLINGS))

    def at_random(self, state: RetryCallState) -> float:
        """Draw a random part of the pause, so that simultaneous failures do not return together."""
        return random.uniform(MIN_JITTER_SECONDS, max(MIN_JITTER_SECONDS, self.seconds(state.attempt_number)))


Result = TypeVar("Result")

STORE_RETRY_SECONDS = 120.0  # the default of --store-retry-seconds
START_RETRY_SECONDS = 10.0  # before anything runs: a wrong address should show soon
STORE_BACKOFF_SECONDS = 10.0  # the longest pause
STORE_BACKOFF = Backoff(
    first=0.2, longest=STORE_BACKOFF_SECONDS
).at_random  # random, so that workers do not return together

FULL_OR_BUSY = {errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.ESTALE, errno.EBUSY, errno.EAGAIN}
CONNECTION = {
    errno.ETIMEDOUT,
    errno.ECONNREFUSED,
    errno.ECONNRESET,
    errno.ECONNABORTED,
    errno.ENOTCONN,
    errno.EPIPE,
    errno.ENETDOWN,
    errno.ENETUNREACH,
    errno.ENETRESET,
    errno.EHOSTDOWN,
    errno.EHOSTUNREACH,
}
TRANSIENT = FULL_OR_BUSY | CONNECTION


def is_transient(error: BaseException) -> bool:
    """Return whether a retry may succeed. An `OSError` without an error number comes from the network or the server."""
    return isinstance(error, OSError) and (error.errno is None or error.errno in TRANSIENT)


@dataclass(frozen=True)
class Retries:
    """Retries of a failing storage for `seconds`; 0 means no second try.

    The waiting thread calls `on_retry` before each pause.
    """

    seconds: float = 0.0
    on_retry: Callable[[], None] = lambda: None

    def call(self, action: Callable[[], Result]) -> Result:
        """Return the result of `action`, repeated after transient errors until `seconds` have passed.

        Raises the last error. The last try begins within the bound.
        """
        started = time.monotonic()
        try:
            return action()  # millions of calls succeed at once and need no `tenacity`
        except OSError as error:
            seconds_left = self.seconds - (time.monotonic() - started)
            if seconds_left <= 0 or not is_transient(error):
                raise
            failed = [error]
        return replace(self, seconds=seconds_left)._call_again(action, failed)

    def _call_again(self, action: Callable[[], Result], failed: list[OSError]) -> Result:

        def action_again() -> Result:
            if failed:
                raise failed.pop()
            return action()

        tries = Retrying(
            stop=stop_after_delay(self.seconds),
            wait=self._pause,
            retry=retry_if_exception(is_transient),
            before_sleep=lambda _: self.on_retry(),
            reraise=True,
        )
        return tries(action_again)

    def _pause(self, state: RetryCallState) -> float:
        """Return the seconds to wait, shortened so that the last try comes when the time for retries ends."""
        return max(0.0, min(STORE_BACKOFF(state), self.seconds - (state.seconds_since_start or 0.0)))


NO_RETRIES = Retries()
BRIEF_RETRIES = Retries(seconds=5.0)
