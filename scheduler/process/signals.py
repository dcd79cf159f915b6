"""Signals that end a command: SIGTERM and SIGHUP act as Ctrl-C.

The first raises KeyboardInterrupt, or inside `held` asks for an orderly end; a second one ends the process.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from types import FrameType
from typing import Any

INTERRUPTED = 130
SAME_SECONDS = 1.0  # terminals, `timeout` and service managers send signals twice
POLL_SECONDS = 0.05
AGAIN_SECONDS = 0.02

Handler = Callable[[int, FrameType | None], None]
BAD_INPUT, EMPTY_INPUT = os.EX_DATAERR, os.EX_NOINPUT  # exit codes for an input file without a readable job
SET_DEATH_SIGNAL = 1  # an option of prctl


def ending_signals() -> list[signal.Signals]:
    """Return the signals that end a command; `nohup` keeps SIGHUP ignored."""
    is_kept = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    return [signal.SIGINT, signal.SIGTERM] if is_kept else [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]


def interrupt_on_signals() -> None:
    """Make the first signal raise KeyboardInterrupt, and the next one end the process."""

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        _handle(_unless_same(lambda _number, _frame: os._exit(INTERRUPTED)))
        raise KeyboardInterrupt

    unheard = sys.unraisablehook

    def tell_again(told: sys.UnraisableHookArgs) -> None:
        """Interrupt again: Python drops exceptions in destructors and callbacks, as of imports."""
        if told.exc_type is not KeyboardInterrupt:
            unheard(told)
            return
        _handle(interrupt)
        signal.signal(signal.SIGALRM, lambda _number, _frame: signal.raise_signal(signal.SIGINT))
        signal.setitimer(signal.ITIMER_REAL, AGAIN_SECONDS)

    _handle(interrupt)
    sys.unraisablehook = tell_again


def end_on_signals() -> None:
    """Let signals end the process silently."""
    for number in ending_signals():
        signal.signal(number, signal.SIG_DFL)


@contextlib.contextmanager
def held(ask: Callable[[], None]) -> Iterator[None]:
    """Call `ask` at the first signal; later ones act as before."""
    before = {number: signal.getsignal(number) for number in ending_signals()}

    def again(number: int, _frame: FrameType | None) -> None:
        _restore(before)
        signal.raise_signal(number)

    def first(_number: int, _frame: FrameType | None) -> None:
        _handle(_unless_same(again))
        ask()

    _handle(first)
    try:
        yield
    finally:
        _restore(before)


@contextlib.contextmanager
def unheard() -> Iterator[None]:
    """Block signals in all threads started inside the block.

    A signal there could reach a handler of `call_interruptibly`'s call.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ending_signals())
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def call_interruptibly(call: Callable[[], None], ended: threading.Event) -> None:
    """Call in a thread that lives until `ended`; raise its error, or KeyboardInterrupt at a signal.

    For calls that may hang outside Python and set handlers of their own. After an interruption the call continues.
    """
    returned, errors = threading.Event(), list[BaseException]()

    def run() -> None:
        try:
            call()
        except BaseException as error:
            errors.append(error)
        finally:
            returned.set()
        ended.wait()

    awaited = ending_signals()
    before, heard = signal.pthread_sigmask(signal.SIG_BLOCK, awaited), None  # in its threads, too
    try:
        threading.Thread(target=run, name="interruptible-call", daemon=True).start()
        while heard is None and not returned.wait(POLL_SECONDS):
            _hear_again()  # other libraries' threads do not wait with their signals
            heard = signal.sigtimedwait(awaited, 0)  # waiting may return no signal after Ctrl-Z
        _hear_again()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    if heard is not None:
        signal.raise_signal(heard.si_signo)
        raise KeyboardInterrupt
    if errors:
        raise errors[0]


def _hear_again() -> None:
    """Restore Python's handlers, which compiled code may change."""
    _restore({number: signal.getsignal(number) for number in ending_signals()})


def _unless_same(handler: Handler) -> Handler:
    first = time.monotonic()

    def handle(number: int, frame: FrameType | None) -> None:
        if time.monotonic() - first > SAME_SECONDS:
            handler(number, frame)

    return handle


def _handle(handler: Handler) -> None:
    for number in ending_signals():
        signal.signal(number, handler)


def _restore(handlers: Mapping[signal.Signals, Any]) -> None:
    for number, handler in handlers.items():
        signal.signal(number, handler)


def die_with(parent_pid: int) -> None:
    """Make the kernel kill this process when the parent's starting thread ends."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None, use_errno=True).prctl(SET_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != parent_pid:
        os._exit(1)  # the parent ended before
