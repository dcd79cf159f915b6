"""Texts as a page can hold them."""

from __future__ import annotations

import re

from markupsafe import Markup

NOT_HTML = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")


def in_html(value: object) -> object:
    """A text as a page can hold it: control characters and halves of characters become escapes as in Python."""
    if not isinstance(value, str) or isinstance(value, Markup):
        return value
    return NOT_HTML.sub(lambda found: found[0].encode("unicode_escape").decode(), value)
