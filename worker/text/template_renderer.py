"""Rendering of chat templates in one `template_process`, which all templates of this process share."""

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
SAME_EVERYWHERE = {"TZ": "UTC", "LC_ALL": "C", "PYTHONHASHSEED": "0"}  # the order of a set of texts depends on hashes
MOST_SECONDS = 2.0  # CPU time of a text of up to a hundred messages; usual templates take less than a thousandth
TIME_IS_UP = signal.SIGPROF
# someone else, for example the system, ended it
KILLED = {-signal.SIGKILL, -signal.SIGTERM, -signal.SIGINT, -signal.SIGHUP}
NUM_STARTS = 5  # tries per answer
MOST_STOPPED = 2  # a template is no longer tried after so many failed texts, which take seconds each


class TemplateLimitError(ValueError):
    """Template exceeds a limit, named in the text."""


class TemplateRenderer:
    """Texts of one template, for which `clock`, an ISO time, is now."""

    def __init__(self, source: str, clock: str) -> None:
        self._number, self._source, self._clock = next(_numbers), source, clock
        self._stopped: dict[str, str] = {}  # request -> why it failed
        self._ready: dict[str, dict[str, str]] = {}  # request -> answer

    def prepare(self, many: Iterable[dict[str, Any]]) -> None:
        """Render in one batch. If one text exceeds the limits, prepare nothing."""
        asked = [each for each in map(_written, many) if self._refusal(each) is None]
        answers = self._answers(asked) if len(asked) > 1 else []
        self._ready = dict(zip(asked, answers, strict=False)) if len(asked) == len(answers) else {}

    def _answers(self, asked: list[str]) -> list[dict[str, str]]:
        return _process.answers(self._number, asked, {"source": self._source, "clock": self._clock})

    def render(self, variables: dict[str, Any]) -> str:
        """Return the rendered text. Raises TemplateLimitError, or ValueError with the template's message."""
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
        """Return why a request is not tried: it failed before, or several shorter ones did."""
        if asked in self._stopped or len(self._stopped) < MOST_STOPPED or len(asked) < min(map(len, self._stopped)):
            return self._stopped.get(asked)
        return f"did not come to an end {len(self._stopped)} times for what was no longer, so it is not asked again"


class _Process:
    """Process that ends when idle and is started again on demand."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._sent: set[int] = set()  # the process knows these templates
        atexit.register(self.end)

    def answers(self, template: int, asked: list[str], source: dict[str, str]) -> list[dict[str, str]]:
        """Return the process's answers, or only the one that ended the process.

        Raises UserError if the process ends again and again.
        """
        ended: list[int | None] = []
        with self._lock:
            while len(ended) < NUM_STARTS:  # the process may just have ended, when idle or from outside
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
            start_new_session=True,  # Ctrl-C must not reach it
        )
        return self._process

    def end(self) -> int | None:
        """End the process, if there is one, and return its exit code."""
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
