from __future__ import annotations

from tests.readme.options_page import PAGE, page


def test_the_page_of_options_has_the_defaults_of_all_commands() -> None:
    assert PAGE.read_text(encoding="utf-8") == page()
