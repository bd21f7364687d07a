"""Make HTML from untrusted text: a prompt, a response or an error may contain anything."""

from __future__ import annotations

import html
import json
import re
from typing import Any

_MAX_BITS = 1000
"""An integer with more bits may be no float."""
_UNPRINTABLE = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ud800-\udfff]")


def escaped(text: object) -> str:
    """Escape ``text`` for an element or a quoted attribute. Control characters and lone surrogates become �.

    A list or dict where a text belongs becomes …: to write it could take too long, or end in a RecursionError.

    >>> escaped("<script>'a' & b\\ud800")
    '&lt;script&gt;&#x27;a&#x27; &amp; b�'
    """
    return html.escape(_UNPRINTABLE.sub("\ufffd", "…" if isinstance(text, list | dict) else str(text)))


def json_for_script(data: Any) -> str:
    """Return ``data`` as JSON for the inside of a script element. Nothing in the data can end the element.

    >>> json_for_script(["</script>"])
    '["\\\\u003c/script>"]'
    """
    return json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def element(tag: str, content: str, /, **attributes: object) -> str:
    """Return an HTML element. In attribute names, ``_`` becomes ``-``, and a trailing ``_`` is removed.

    >>> element("p", "hi", class_="note", data_step=3)
    '<p class="note" data-step="3">hi</p>'
    """
    words = "".join(f' {name.rstrip("_").replace("_", "-")}="{escaped(value)}"' for name, value in attributes.items())
    return f"<{tag}{words}>{content}</{tag}>"


def number(value: float | None) -> str:
    """Format a number for people.

    >>> number(1234567.0), number(0.123456), number(3.0), number(None)
    ('1,234,567', '0.1235', '3', '–')
    """
    if value is None or (isinstance(value, int) and value.bit_length() > _MAX_BITS):
        return "–"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def seconds(value: float) -> str:
    """Format a duration for people.

    >>> seconds(12.3), seconds(3725), seconds(200000)
    ('12 s', '1 h 02 min', '2 d 7 h')
    """
    minutes, hours, days = int(value // 60), int(value // 3600), int(value // 86400)
    if minutes < 1:
        return f"{value:.0f} s"
    if hours < 1:
        return f"{minutes} min {int(value % 60):02d} s"
    return f"{hours} h {minutes % 60:02d} min" if days < 1 else f"{days} d {hours % 24} h"
