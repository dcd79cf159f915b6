"""Has a process of its own render chat templates, see `template_process`: one for all templates of this process."""

from __future__ import annotations

import atexit
import contextlib
import json
import signal
import subprocess
from collections.abc import Iterable
from itertools import count
from threading import Lock
from typing import Any

from swiftbatch.jobs.child_processes import environment_of_code, module_command

MODULE = "swiftbatch.worker.model.template_process"
SAME_EVERYWHERE = {"TZ": "UTC", "LC_ALL": "C", "PYTHONHASHSEED": "0"}  # a set of texts is in the order of hashes
MOST_SECONDS = 2.0  # of computing for one text; a template takes less than a thousandth of one
TIME_IS_UP = signal.SIGPROF
MOST_STOPPED = 2  # texts of one template that were not to be had, which takes seconds each


class TemplateLimitError(ValueError):
    """A template goes beyond what it may have; the text says what it does."""


class TemplateRenderer:
    """The texts of one template, in which `clock`, an ISO time, is now."""

    def __init__(self, source: str, clock: str) -> None:
        self._number, self._source, self._clock = next(_numbers), source, clock
        self._num_stopped = 0
        self._ready: dict[str, dict[str, str]] = {}  # answers by what was asked

    def prepare(self, many: Iterable[dict[str, Any]]) -> None:
        """Have the texts made at once that `render` is about to be asked for: each alone waits for the process.

        Where one of them comes to no end, nothing is prepared.
        """
        asked = [] if self._num_stopped else [_written(variables) for variables in many]
        answers = self._answers(asked) if len(asked) > 1 else []
        self._ready = dict(zip(asked, answers, strict=False)) if len(asked) == len(answers) else {}

    def _answers(self, asked: list[str]) -> list[dict[str, str]]:
        return _process.answers(self._number, asked, {"source": self._source, "clock": self._clock})

    def render(self, variables: dict[str, Any]) -> str:
        """The text with some variables. Raises TemplateLimitError, and ValueError with the template's own words."""
        if self._num_stopped >= MOST_STOPPED:
            raise TemplateLimitError(f"did not come to an end {MOST_STOPPED} times, so it is not asked again")
        asked = _written(variables)
        answer = self._ready[asked] if asked in self._ready else self._answers([asked])[0]
        if "beyond" in answer:
            self._num_stopped += 1
            raise TemplateLimitError(answer["beyond"])
        if "error" in answer:
            raise ValueError(answer["error"])
        return answer["text"]


class _Process:
    """The process. It ends when it is idle, and another one takes its place."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._sent: set[int] = set()  # templates that it knows
        atexit.register(self.end)

    def answers(self, template: int, asked: list[str], source: dict[str, str]) -> list[dict[str, str]]:
        """What the process answers, which hears a template's source once; one answer alone where it ends at it."""
        with self._lock:
            for _ in range(2):  # it may just have ended, idle or by another's hand
                process = self._process or self._started()
                first = json.dumps({"template": template} | ({} if template in self._sent else source))
                if line := _answered(process, f'{first[:-1]}, "many": [{", ".join(asked)}]}}\n'.encode()):
                    self._sent.add(template)
                    answers: list[dict[str, str]] = json.loads(line)
                    return answers
                if self.end() == -TIME_IS_UP:
                    return [{"beyond": f"did not come to an end within {MOST_SECONDS:g} s of computing"}]
            return [{"beyond": f"ended the process that it ran in (exit code {process.returncode})"}]

    def _started(self) -> subprocess.Popen[bytes]:
        self._sent.clear()
        self._process = subprocess.Popen(
            module_command(MODULE, str(MOST_SECONDS)),
            env=environment_of_code() | SAME_EVERYWHERE,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # a Ctrl-C is meant for this one
        )
        return self._process

    def end(self) -> int | None:
        """Let the process end, if there is one, and return its exit code."""
        process, self._process = self._process, None
        if process is None:
            return None
        with contextlib.suppress(BrokenPipeError), process:
            pass
        return process.wait()


def _written(variables: dict[str, Any]) -> str:
    return json.dumps(variables, default=str)


def _answered(process: subprocess.Popen[bytes], line: bytes) -> bytes:
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write(line)
        process.stdin.flush()
    except BrokenPipeError:
        return b""
    return process.stdout.readline()


_numbers = count()
_process = _Process()
