"""Chat templates render as in transformers, within limits."""

from __future__ import annotations

import os
import signal
import subprocess
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from transformers.utils import chat_template_utils

from swiftbatch.jobs.errors import UserError
from swiftbatch.worker.text import template_renderer
from swiftbatch.worker.text.template_process import environment
from swiftbatch.worker.text.template_renderer import TemplateLimitError, TemplateRenderer, _Process

CLOCK = "2026-11-28T23:30:00+14:00"
HI = {"messages": [{"role": "user", "content": "hi"}], "tools": None, "add_generation_prompt": True}
ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
DOUBLING = "{% set n = namespace(x='a') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}{{ n.x }}"
DATED = "{{ strftime_now('%d %B %Y %A %c %s') }} {{ (messages[0].keys() | list) }}"
OURS = """
{%- macro shown(m) %}<{{ m['role'] | upper }}>{{ m.content | trim }}{% endmacro %}
{%- set state = namespace(n=0, seen=dict(a=1)) %}
{% for m in messages %}
    {%- if loop.index0 == 3 %}{% break %}{% endif %}
    {%- set state.n = state.n + 1 %}
    {%- generation %}{{ shown(m) }}{% endgeneration %}
    {{- {'é': [1, 2.5, none], 'b': m.content} | tojson }}{{ m | tojson(indent=2, sort_keys=true) }}
{% endfor %}
{{ state.n }}{{ state.seen }}{{ tools is none }}{{ missing is defined }}{{ bos_token }}{{ missing }}
{{ "%s-%05d" | format("x", 7) }}{{ "{:>6}".format("x") }}{{ messages | map(attribute="role") | join(", ") }}
"""


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch) -> _Process:
    """A process with half a second of CPU time per text."""
    monkeypatch.setattr(template_renderer, "MOST_SECONDS", 0.5)
    monkeypatch.setattr(template_renderer, "_process", made := _Process())
    return made


def test_templates_have_what_transformers_gives_them_and_make_the_same_texts() -> None:
    theirs, ours = chat_template_utils._compile_jinja_template(OURS), environment(CLOCK)
    for name in ("globals", "filters", "tests"):
        assert getattr(ours, name).keys() == getattr(theirs.environment, name).keys()
    messages = [{"role": "user", "content": f" näive {i} </s>\n"} for i in range(5)]
    variables = {"messages": messages, "tools": None, "bos_token": "<s>"}
    assert TemplateRenderer(OURS, CLOCK).render(variables) == theirs.render(variables)


def test_a_template_makes_the_same_text_in_every_zone_and_locale_on_every_day(
    monkeypatch: pytest.MonkeyPatch, process: _Process
) -> None:
    found = set()
    for zone, locale in (("Etc/GMT+12", "C"), ("Etc/GMT-14", "de_DE.UTF-8")):
        for name, value in {"TZ": zone, "LC_ALL": locale, "LC_TIME": locale, "PYTHONHASHSEED": "random"}.items():
            monkeypatch.setenv(name, value)
        template = "{{ ({'a': 1, 'b': 2, 'c': 3}.keys() - ['x']) | join }}" + DATED
        found.add(TemplateRenderer(template, CLOCK).render(HI))
        process.end()
    [text] = found
    assert "28 November 2026 Saturday Sat Nov 28 23:30:00 2026 1795908600 ['role', 'content']" in text


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{{ ['a', 'b'] | random }}", "it asks for the filter `random`, which gives another text each time"),
        ("{{ lipsum() }}", "it asks for `lipsum`, which"),
        ("{{ 'a' ~ 'a'.upper }}", "it prints an object at 0x[0-9a-f]+, an address"),
        ("{{ messages | map('upper') }}", "it prints an object at 0x"),
        ("{{ messages | map('upper') | string | upper }}", "it prints an object AT 0X"),
        ("{{ raise_exception('no system role') }}", "^no system role$"),
    ],
)
def test_what_would_make_another_text_each_time_is_refused(template: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        TemplateRenderer(template, CLOCK).render(HI)
    unused = "{% if false %}" + template + "{% endif %}" + "{{ messages[0].content }}"
    assert TemplateRenderer(unused, CLOCK).render(HI) == "hi"


def test_a_message_may_show_an_address_itself() -> None:
    said = "\"root\" is <Element 'root' at 0x7f00>\nand a \\ at 0x7F01"
    variables = {"messages": [{"role": "user", "content": said}]}
    template = TemplateRenderer(
        "{{ messages[0].content }}{% if messages[1] %}{{ messages | map('upper') }}{% endif %}", CLOCK
    )
    assert template.render(variables) == said
    with pytest.raises(ValueError, match="it prints an object at 0x"):
        template.render({"messages": [*variables["messages"], {"role": "user", "content": "more"}]})


@pytest.mark.parametrize(
    ("template", "words"),
    [
        (ENDLESS, "did not come to an end within 0.5 s of computing"),
        ("{{ (9 ** 99999) ** 99999 }}", "did not come to an end within 0.5 s of computing"),
        ("{{ 'a' * 10 ** 10 }}", "needs more than 1 GiB of memory"),
        ("{{ 'a' | center(10 ** 10) }}", "needs more than 1 GiB of memory"),
        (DOUBLING, "needs more than 1 GiB of memory|did not come to an end"),
        ("{{ 'a' * (3 * 2 ** 25) }}", "makes a text of 100,663,296 characters|did not come to an end"),
    ],
)
def test_a_template_that_does_not_end_or_makes_gigabytes_is_refused_and_others_go_on(
    process: _Process, template: str, words: str
) -> None:
    with pytest.raises(TemplateLimitError, match=words):
        TemplateRenderer(template, CLOCK).render(HI)
    assert TemplateRenderer("{{ messages[0].content }}", CLOCK).render(HI) == "hi"


def test_a_template_that_never_ends_is_seldom_asked_whatever_the_number_of_lines(
    process: _Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(template_renderer, "MOST_SECONDS", 0.1)
    template, words = TemplateRenderer(ENDLESS, CLOCK), []
    for number in range(1000):
        with pytest.raises(TemplateLimitError) as error:
            template.render({"messages": [], "n": number + 1000})
        words.append(str(error.value))
    assert ["within 0.1 s" in each for each in words] == [True] * 2 + [False] * 998
    assert "2 times for what was no longer, so it is not asked again" in words[-1]


def test_lines_beside_a_long_one_that_came_to_no_end_are_rendered(
    process: _Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(template_renderer, "MOST_SECONDS", 0.1)
    template = TemplateRenderer(
        "{% if messages | length > 9 %}" + ENDLESS + "{% endif %}{{ messages[0].content }}", CLOCK
    )
    for length in (10, 11, 12):
        with pytest.raises(TemplateLimitError):
            template.render({"messages": HI["messages"] * length})
        assert template.render(HI) == "hi"


@pytest.mark.parametrize(("sign", "error"), [(signal.SIGKILL, UserError), (signal.SIGSEGV, TemplateLimitError)])
def test_a_process_that_is_killed_again_and_again_is_no_fault_of_a_line(
    process: _Process, monkeypatch: pytest.MonkeyPatch, sign: signal.Signals, error: type[Exception]
) -> None:
    monkeypatch.setattr(template_renderer.time, "sleep", lambda _: None)
    start = process._started

    def killed() -> subprocess.Popen[bytes]:
        os.kill(start().pid, sign)
        return process._process

    monkeypatch.setattr(process, "_started", killed)
    template = TemplateRenderer("{{ messages[0].content }}", CLOCK)
    with pytest.raises(error, match=f"exit code -{sign.value}"):
        template.render(HI)
    monkeypatch.setattr(process, "_started", start)
    assert TemplateRenderer("{{ messages[0].content }}", CLOCK).render(HI) == "hi"


def test_half_an_answer_is_asked_for_again(process: _Process, monkeypatch: pytest.MonkeyPatch) -> None:
    template, answered = TemplateRenderer("{{ messages[0].content }}", CLOCK), template_renderer._answered
    halves = iter([b'[{"text": "h'])
    monkeypatch.setattr(template_renderer, "_answered", lambda *asked: next(halves, None) or answered(*asked))
    assert template.render(HI) == "hi"


def test_a_template_that_is_none_is_refused_in_the_words_of_jinja_every_time(process: _Process) -> None:
    template = TemplateRenderer("{% do messages %}", CLOCK)
    for _ in range(2):
        with pytest.raises(ValueError, match="Encountered unknown tag 'do'"):
            template.render(HI)


def test_a_process_that_was_ended_is_started_again(process: _Process) -> None:
    template = TemplateRenderer("{{ messages[0].content }}", CLOCK)
    assert template.render(HI) == "hi"
    running: Any = process._process
    os.kill(running.pid, signal.SIGKILL)
    assert template.render(HI) == "hi"
    assert process._process is not running
    assert process.end() == 0


def test_threads_get_their_own_texts_from_one_process(process: _Process) -> None:
    def rendered(number: int) -> str:
        template = TemplateRenderer(f"{number % 4}" + "{{ n }}", CLOCK)
        return "".join(template.render({"n": number}) for _ in range(20))

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(rendered, range(40)))
    assert found == [f"{number % 4}{number}" * 20 for number in range(40)]


def test_many_texts_at_once_are_those_of_each_alone_whatever_one_of_them_does(process: _Process) -> None:
    picky = TemplateRenderer("{% if n == 2 %}" + ENDLESS + "{% endif %}{{ 5 // n }}", CLOCK)
    for numbers in ((0, 1, 3), (1, 2, 5)):
        picky.prepare({"n": number} for number in numbers)
        found = []
        for number in numbers:
            try:
                found.append(picky.render({"n": number}))
            except ValueError as error:
                found.append(str(error))
        zero, endless = "integer division or modulo by zero", "did not come to an end within 0.5 s of computing"
        assert found == [{0: zero, 2: endless}.get(number, str(5 // max(number, 1))) for number in numbers]
