from __future__ import annotations

import re

from bench.suite import BEGIN, with_figures
from tests.readme.command_lines import ROOT, page, section, table

SPEED = page("docs/speed.md")
PLACE = re.compile(re.escape(BEGIN).replace(r"\{\}", "(.*)"))


def test_the_tables_are_those_of_the_figures() -> None:
    (place,) = PLACE.findall(SPEED)
    again = f"write them again: python -m bench all --output docs/{place} --page docs/speed.md"
    assert with_figures(SPEED, ROOT / "docs" / place, place) == SPEED, again


def test_what_the_readme_quotes_is_on_the_page() -> None:
    quoted = table(section(page("README.md"), "How fast"), "two cores of an EPYC with AVX2 only")
    assert len(quoted) == 4
    measured = {row[0]: row[1:] for row in table(page("docs/speed_real_models.md"), "program, model")}
    for program, *figures in quoted:
        found = [measured[f"{program}, {model}"] for model in ("SmolLM2-135M", "Qwen2.5-Coder 0.5B")]
        assert figures == [row[place] for row in found for place in (0, 1, 3)]


def test_the_page_is_short() -> None:
    assert len(SPEED.splitlines()) <= 150
