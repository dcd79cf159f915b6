"""Process that renders chat templates: `python -m swiftbatch.worker.text.template_process`.

A template is a program of the model's maker, so the system limits its time and memory. The environment is that of
transformers' `apply_chat_template`, without its import of several seconds.
"""

from __future__ import annotations

import json
import re
import resource
import select
import signal
import sys
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import CallBlock, Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

MOST_BYTES = 2**30
MOST_LETTERS = 2**26  # limits a text beyond its input
IDLE_SECONDS = 60.0  # the process ends when idle; starting another takes half a second

ADDRESS = re.compile(r" at 0x[0-9a-f]+", re.IGNORECASE)
NUM_AT_ONCE = 100  # templates that look back from each message take quadratic time


class _Refused(jinja2.TemplateError):
    """Template asks for something that differs between runs."""


class _Generation(Extension):
    """Block `{% generation %}`, which marks the model's own text and changes nothing."""

    tags = frozenset(["generation"])  # type: ignore[assignment]  # a set of Jinja's own, which could be changed

    def parse(self, parser: Parser) -> Node:
        number = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return CallBlock(self.call_method("_written"), [], [], body).set_lineno(number)

    def _written(self, caller: Callable[[], str]) -> str:
        return caller()


class _Dict:
    """Template's `dict`, without the class's other attributes."""

    def __call__(self, *pairs: Any, **named: Any) -> dict[Any, Any]:
        return dict(*pairs, **named)

    def fromkeys(self, *arguments: Any) -> dict[Any, Any]:
        return dict.fromkeys(*arguments)

    def __repr__(self) -> str:
        return "dict"


class _Namespace(Namespace):
    """Template's `namespace`, without names that reach Python's own."""

    def __init__(*pairs: Any, **named: Any) -> None:
        self, *others = pairs
        values = dict(*others, **named)
        for name in values:
            _refuse_underscore(name)
        Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_underscore(name)
        super().__setitem__(name, value)


def _refuse_underscore(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace takes no name that begins with an underscore, found {name!r}")


def environment(clock: str) -> ImmutableSandboxedEnvironment:
    """Return the environment of templates for which `clock`, an ISO time, is now."""
    made = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
    now = datetime.fromisoformat(clock).replace(tzinfo=None)  # naive, as in transformers
    made.filters |= {"tojson": _to_json, "random": _refusal("the filter `random`")}
    made.globals |= {
        "raise_exception": _raise,
        "strftime_now": now.strftime,
        "dict": _Dict(),
        "namespace": _Namespace,
        "lipsum": _refusal("`lipsum`"),
    }
    return made


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    form: Any = {"ensure_ascii": ensure_ascii, "indent": indent, "separators": separators, "sort_keys": sort_keys}
    return json.dumps(value, **form)


def _raise(message: object) -> NoReturn:
    raise jinja2.TemplateError(message)  # type: ignore[arg-type]  # as theirs


def _refusal(name: str) -> Callable[..., NoReturn]:
    def refuse(*_arguments: object, **_named: object) -> NoReturn:
        raise _Refused(f"it asks for {name}, which gives another text each time")

    return refuse


class _Templates:
    """Templates by the parent's numbers."""

    def __init__(self, most_seconds: float) -> None:
        self._most_seconds = most_seconds
        self._sent: dict[int, dict[str, str]] = {}  # has source and clock
        self._known: dict[int, jinja2.Template] = {}

    def answers(self, line: bytes) -> list[dict[str, str]]:
        """Return each requested text of a line, or an error's message."""
        asked = json.loads(line)
        number, most_letters = asked["template"], len(line) + MOST_LETTERS
        self._sent.setdefault(number, asked)
        return [self._answer(number, variables, most_letters) for variables in asked["many"]]

    def _answer(self, number: int, variables: Any, most_letters: int) -> dict[str, str]:
        sent, num_messages = self._sent[number], len(variables.get("messages", ()))
        signal.setitimer(signal.ITIMER_PROF, self._most_seconds * max(1.0, (num_messages / NUM_AT_ONCE) ** 2))
        try:
            if number not in self._known:
                self._known[number] = environment(sent["clock"]).from_string(sent["source"])
            text = self._known[number].render(variables)
            if len(text) > most_letters:
                return {"beyond": f"makes a text of {len(text):,} characters"}
            if (address := _strange_address(text, f"{sent['source']} {json.dumps(variables)}")) is not None:
                return {"error": f"it prints an object{address}, an address that is another one each time"}
        except MemoryError:
            return {"beyond": f"needs more than {MOST_BYTES / 2**30:g} GiB of memory"}
        except Exception as error:  # a template is a program and may raise anything
            return {"error": str(error) or type(error).__name__}
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
        return {"text": text}


def _strange_address(text: str, given: str) -> str | None:
    """Return an object's address in a text that is in neither messages nor template."""
    lowered = given.lower() if (found := ADDRESS.findall(text)) else ""
    return next((each for each in found if each.lower() not in lowered), None)


def _limit_memory() -> None:
    statm = Path("/proc/self/statm")  # only Linux has this limit
    if statm.exists():
        most = int(statm.read_text().split()[0]) * resource.getpagesize() + MOST_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (most, most))


def main(most_seconds: float) -> None:
    """Answer lines until there are none, or none has come for `IDLE_SECONDS`."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _limit_memory()
    templates, asked, answered = _Templates(most_seconds), sys.stdin.buffer, sys.stdout.buffer
    while select.select([asked], [], [], IDLE_SECONDS)[0] and (line := asked.readline()):
        answered.write(json.dumps(templates.answers(line)).encode() + b"\n")
        answered.flush()


if __name__ == "__main__":
    main(float(sys.argv[1]))
