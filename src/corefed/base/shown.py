"""Names of others in what people read: on a terminal, and in Markdown.

Names of clients, classes, columns and files come from data and folders of others. A terminal obeys
control characters, and Markdown contains HTML.
"""

from __future__ import annotations

import re
import unicodedata

_UNSEEN = {"Cc", "Cf", "Cs", "Zl", "Zp"}
"""Categories of Unicode: control, format (which turn the direction of writing), halves of
characters, and separators of lines."""
_KEPT = "\u200c\u200d"
"""Format characters that spelling needs, in Persian for one."""


def printable(text: object) -> str:
    r"""The text with control characters as visible escapes, as \x1b; newlines and tabs stay."""
    return "".join(c if c in "\n\t" else _visible(c) for c in str(text))


def one_line(text: object) -> str:
    """`printable` for a name: newlines and tabs are escaped too."""
    return "".join(map(_visible, str(text)))


def markdown(text: object) -> str:
    """A name as plain text in Markdown: no HTML, link, emphasis or end of a table's cell."""
    escaped = one_line(text).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    escaped = re.sub(r"([\\`*\[\]|~]|\b_(?!\w)|(?<!\w)_)", r"\\\1", escaped)
    return escaped.replace("://", ":&#47;&#47;")  # an address alone becomes a link too


def _visible(c: str) -> str:
    if c.isascii():
        return c if " " <= c <= "~" else _escape(c)
    return _escape(c) if unicodedata.category(c) in _UNSEEN and c not in _KEPT else c


def _escape(c: str) -> str:
    return c.encode("unicode_escape", "surrogatepass").decode("ascii")
