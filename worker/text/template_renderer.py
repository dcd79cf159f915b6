"""Has a process of its own render chat templates, see `template_process`: one for all templates of this process."""

from __future__ import annotations

import atexit
import contextlib
import json
import signal
import subprocess
import time
from collections.abc import Iterable
from itertools import count
from threading import Lock
from typing import Any

from swiftbatch.jobs.errors import UserError
from swiftbatch.jobs.python_processes import environment_of_code, module_command

MODULE = "swiftbatch.worker.text.template_process"
SAME_EVERYWHERE = {"TZ": "UTC", "LC_ALL": "C", "PYTHONHASHSEED": "0"}  # a set of texts is in the order of hashes
MOST_SECONDS = 2.0  # of computing for one text of up to a hundred messages; a template takes less than a thousandth
TIME_IS_UP = signal.SIGPROF
KILLED = {-signal.SIGKILL, -signal.SIGTERM, -signal.SIGINT, -signal.SIGHUP}  # by another's hand, such as the system's
NUM_STARTS = 5  # of the process for one answer
MOST_STOPPED = 2  # texts of one template that were not to be had, which takes seconds each


class TemplateLimitError(ValueError):
    """A template goes beyond what it may have; the text says what it does."""


class TemplateRenderer:
    """The texts of one template, in which `clock`, an ISO time, is now."""

    def __init__(self, source: str, clock: str) -> None:
        self._number, self._source, self._clock = next(_numbers), source, clock
        self._stopped: dict[str, str] = {}  # what was asked in vain, and why
        self._ready: dict[str, dict[str, str]] = {}  # answers by what was asked

    def prepare(self, many: Iterable[dict[str, Any]]) -> None:
        """Have the texts made at once that `render` is about to be asked for: each alone waits for the process.

        Where one of them comes to no end, nothing is prepared.
        """
        asked = [each for each in map(_written, many) if self._refusal(each) is None]
        answers = self._answers(asked) if len(asked) > 1 else []
        self._ready = dict(zip(asked, answers, strict=False)) if len(asked) == len(answers) else {}

    def _answers(self, asked: list[str]) -> list[dict[str, str]]:
        return _process.answers(self._number, asked, {"source": self._source, "clock": self._clock})

    def render(self, variables: dict[str, Any]) -> str:
        """The text with some variables. Raises TemplateLimitError, and ValueError with the template's own words."""
        asked = _written(variables)
        if (refusal := self._refusal(asked)) is not None:
            raise TemplateLimitError(refusal)
        answer = self._ready[asked] if asked in self._ready else self._answers([asked])[0]
        if "beyond" in answer:
            self._stopped[asked] = answer["beyond"]
            raise TemplateLimitError(answer["beyond"])
        if "error" in answer:
            raise ValueError(answer["error"])
        return answer["text"]

    def _refusal(self, asked: str) -> str | None:
        """Say why something need not be asked: it, or several that were no longer, came to no end before."""
        if asked in self._stopped or len(self._stopped) < MOST_STOPPED or len(asked) < min(map(len, self._stopped)):
            return self._stopped.get(asked)
        return f"did not come to an end {len(self._stopped)} times for what was no longer, so it is not asked again"


class _Process:
    """The process. It ends when it is idle, and another one takes its place."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._sent: set[int] = set()  # templates that it knows
        atexit.register(self.end)

    def answers(self, template: int, asked: list[str], source: dict[str, str]) -> list[dict[str, str]]:
        """The answers of the process, which gets a template's source once; a single one if the process ends at it.

        Raises UserError where others end the process again and again.
        """
        ended: list[int | None] = []
        with self._lock:
            while len(ended) < NUM_STARTS:  # it may just have ended, idle or by another's hand
                process = self._process or self._started()
                first = json.dumps({"template": template} | ({} if template in self._sent else source))
                line = _answered(process, f'{first[:-1]}, "many": [{", ".join(asked)}]}}\n'.encode())
                if line.endswith(b"\n"):
                    self._sent.add(template)
                    answers: list[dict[str, str]] = json.loads(line)
                    return answers
                ended.append(self.end())
                if ended[-1] == -TIME_IS_UP:
                    return [{"beyond": f"did not come to an end within {MOST_SECONDS:g} s of computing"}]
                if ended[-1] in KILLED:
                    time.sleep(0.1 * 2 ** len(ended))
        if ended[-1] in KILLED:
            raise UserError(
                f"the process that renders chat templates was killed {len(ended)} times (exit code {ended[-1]}); free "
                "memory, and give the command again"
            )
        return [{"beyond": f"ended the process that it ran in (exit code {ended[-1]})"}]

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
