"""Handles the signals that tell a command to end: SIGTERM and a closed terminal (SIGHUP) mean what Ctrl-C does.

The first signal raises KeyboardInterrupt wherever the command is: it ends with one line and exit code 130. A second one
ends the process at once, should that hang. While jobs run, `held` has the first signal ask for an end in good order.

A driver that a server has started is killed with the server.
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
SAME_SECONDS = 1.0  # a closed terminal, `timeout` and service managers tell the same thing twice
POLL_SECONDS = 0.05
AGAIN_SECONDS = 0.02

Handler = Callable[[int, FrameType | None], None]
BAD_INPUT = os.EX_DATAERR  # the exit code where the input file as a whole can't be read
SET_DEATH_SIGNAL = 1  # of prctl


def ending_signals() -> list[signal.Signals]:
    """The signals that ask to end. Under `nohup` a closed terminal does not."""
    is_kept = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    return [signal.SIGINT, signal.SIGTERM] if is_kept else [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]


def interrupt_on_signals() -> None:
    """Have the first signal from now on raise KeyboardInterrupt in the main thread, and the next end the process."""

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        _handle(_unless_same(lambda _number, _frame: os._exit(INTERRUPTED)))
        raise KeyboardInterrupt

    unheard = sys.unraisablehook

    def tell_again(told: sys.UnraisableHookArgs) -> None:
        """Interrupt again: Python drops what is raised in a destructor or in a callback, an import's among them."""
        if told.exc_type is not KeyboardInterrupt:
            unheard(told)
            return
        _handle(interrupt)
        signal.signal(signal.SIGALRM, lambda _number, _frame: signal.raise_signal(signal.SIGINT))
        signal.setitimer(signal.ITIMER_REAL, AGAIN_SECONDS)

    _handle(interrupt)
    sys.unraisablehook = tell_again


def end_on_signals() -> None:
    """Have a signal end the process without a word from now on: nothing is left that would have to be undone."""
    for number in ending_signals():
        signal.signal(number, signal.SIG_DFL)


@contextlib.contextmanager
def held(ask: Callable[[], None]) -> Iterator[None]:
    """Call `ask` at the first signal. The next one does what it did before, as all do behind the context."""
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
    """Keep the signals from all threads that start within the block, for as long as they live.

    For those that live while `call_interruptibly` makes a call: else a signal might reach a handler of that call there.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ending_signals())
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def call_interruptibly(call: Callable[[], None], ended: threading.Event) -> None:
    """Make a call in a thread that lives until `ended`, and raise what it raises, or KeyboardInterrupt at a signal.

    For a call that may hang outside of Python, and that sets handlers of its own below Python: they are taken back as
    soon as they are seen, and signals wait meanwhile. After an interruption the call goes on, unheard.
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
            heard = signal.sigtimedwait(awaited, 0)  # one that waits may give no signal at all behind a Ctrl-Z
        _hear_again()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    if heard is not None:
        signal.raise_signal(heard.si_signo)
        raise KeyboardInterrupt
    if errors:
        raise errors[0]


def _hear_again() -> None:
    """Have the system know the handlers that Python knows: compiled code sets and resets them without a word."""
    _restore({number: signal.getsignal(number) for number in ending_signals()})


def _unless_same(handler: Handler) -> Handler:
    """The handler, deaf for a moment."""
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
    """Have Linux's kernel kill this process when the thread that started it ends, however it does."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None, use_errno=True).prctl(SET_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != parent_pid:
        os._exit(1)  # it has ended before
