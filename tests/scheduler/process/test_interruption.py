"""Signals: the first asks for an orderly end, the second ends at once, repeats are ignored."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from swiftbatch.scheduler import __main__ as command_process
from swiftbatch.scheduler.process import signals
from swiftbatch.scheduler.process.signals import call_interruptibly, held, interrupt_on_signals


@pytest.fixture(autouse=True)
def _own_handlers() -> Iterator[None]:
    """Lets signals raise, also under nohup or in a shell's background."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    for number in before:
        signal.signal(number, signal.default_int_handler)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_the_first_signal_asks_and_the_second_one_interrupts(
    number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(signals, "SAME_SECONDS", -1.0)
    asked: list[None] = []
    with held(lambda: asked.append(None)):
        signal.raise_signal(number)
        assert len(asked) == 1
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(number)
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(number)
    assert len(asked) == 1


def test_behind_the_context_signals_do_what_they_did_before() -> None:
    asked: list[None] = []
    with held(lambda: asked.append(None)):
        pass
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGTERM)
    assert asked == []


def test_what_is_told_twice_at_once_is_told_once() -> None:
    asked: list[None] = []
    with held(lambda: asked.append(None)):  # as a closed terminal, `timeout` and service managers do
        for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGHUP):
            signal.raise_signal(number)
    assert len(asked) == 1


def test_under_nohup_a_closed_terminal_is_none_of_its_business() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    asked: list[None] = []
    interrupt_on_signals()
    with held(lambda: asked.append(None)):
        signal.raise_signal(signal.SIGHUP)
    signal.raise_signal(signal.SIGHUP)
    assert asked == []


def test_a_call_that_hangs_is_left_at_a_signal() -> None:
    hangs, ended = threading.Event(), threading.Event()

    def call() -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        hangs.wait()

    with pytest.raises(KeyboardInterrupt):
        call_interruptibly(call, ended)
    hangs.set()
    ended.set()
    assert signal.SIGTERM not in signal.pthread_sigmask(signal.SIG_BLOCK, [])


def test_a_call_raises_what_it_raises_and_its_thread_lives_until_it_is_told() -> None:
    ended = threading.Event()
    threads: list[threading.Thread] = []
    call_interruptibly(lambda: threads.append(threading.current_thread()), ended)
    assert threads[0].is_alive()  # the kernel ends what a thread started when the thread ends
    ended.set()
    threads[0].join(60)
    assert not threads[0].is_alive()

    def fail() -> None:
        raise ConnectionError("no answer")

    with pytest.raises(ConnectionError, match="no answer"):
        call_interruptibly(fail, ended)


def test_handlers_that_a_call_sets_below_python_go_with_it() -> None:
    ended = threading.Event()
    call_interruptibly(lambda: ctypes.CDLL(None).signal(signal.SIGTERM, int(signal.SIG_IGN)) and None, ended)
    ended.set()
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGTERM)


RESETS = """
import ctypes, os, pathlib, re, signal, sys, threading, time
from swiftbatch.scheduler.process.signals import call_interruptibly, interrupt_on_signals

def has_handler():
    [caught] = re.findall(r"SigCgt:\\s+(\\w+)", pathlib.Path("/proc/self/status").read_text())
    return int(caught, 16) >> (signal.SIGTERM - 1) & 1

def call():
    ctypes.CDLL(None).signal(signal.SIGTERM, int(signal.SIG_DFL))
    while not has_handler():  # it is taken back soon
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGTERM)
    threading.Event().wait()

interrupt_on_signals()
threading.Thread(target=threading.Event().wait, args=(60,), daemon=True).start()  # takes what the others block
try:
    call_interruptibly(call, threading.Event())
except KeyboardInterrupt:
    os._exit(130)
"""


def test_handlers_that_a_call_sets_below_python_are_taken_back_while_it_runs() -> None:
    ended = subprocess.run([sys.executable, "-c", RESETS], capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stderr) == (130, "")


def test_an_interruption_that_python_has_wrapped_is_told_as_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def command() -> None:
        raise RuntimeError("Error calling __set_name__") from KeyboardInterrupt()

    monkeypatch.setattr("swiftbatch.scheduler.cli.main", command)
    monkeypatch.setattr(command_process, "_end_interrupted", lambda: None)
    command_process.main()
    assert capsys.readouterr().err == "interrupted\n"


STUCK = """
import signal, time
from swiftbatch.scheduler.process import signals
signals.SAME_SECONDS = -1.0
signals.interrupt_on_signals()
try:
    signal.raise_signal(signal.SIGTERM)
except KeyboardInterrupt:
    print("interrupted", flush=True)
signal.raise_signal(signal.SIGTERM)
print("still there")
"""


def test_a_process_that_takes_no_notice_is_ended_by_the_next_signal() -> None:
    done = subprocess.run([sys.executable, "-c", STUCK], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "interrupted\n", "")


WAITING = """
import sys, threading
from swiftbatch.scheduler.process.signals import call_interruptibly
call_interruptibly(lambda: print("begun", flush=True) or sys.stdin.readline() and None, threading.Event())
"""


def test_a_process_that_is_stopped_while_it_waits_for_a_call_waits_on() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", WAITING], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout.readline() == "begun\n"
        process.send_signal(signal.SIGSTOP)
        time.sleep(2 * signals.POLL_SECONDS)
        process.send_signal(signal.SIGCONT)
        process.communicate("\n", timeout=60)
        assert process.returncode == 0


DROPS = """
import signal, sys, time
from swiftbatch.scheduler.process.signals import interrupt_on_signals

class Dropping:
    def __del__(self):
        signal.raise_signal(signal.SIGINT)

interrupt_on_signals()
try:
    dropping = Dropping()
    del dropping
    time.sleep(300)
except KeyboardInterrupt:
    sys.exit(130)
"""


def test_a_signal_that_python_drops_is_told_again_without_a_traceback() -> None:
    # raised in a destructor here, as it may be in an import's callback
    ended = subprocess.run([sys.executable, "-c", DROPS], capture_output=True, text=True, timeout=120, check=False)
    assert (ended.returncode, ended.stderr) == (130, "")
