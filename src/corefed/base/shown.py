"""What people read: lines and tables on a terminal, and names in Markdown.

Names of clients, classes, columns and files come from data and folders of others. A terminal obeys
control characters in them, rich obeys its markup, and Markdown contains HTML. So everything is
printed by `say`, `say_note` or a console of `console`, and names in Markdown go through `markdown`.
"""

from __future__ import annotations

import re
import sys
import unicodedata
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from rich.console import Console

_UNSEEN = {"Cc", "Cf", "Cs", "Zl", "Zp"}
"""Categories of Unicode: control, format (which turn the direction of writing), halves of
characters, and separators of lines."""
_KEPT = "\u200c\u200d"
"""Format characters that spelling needs, in Persian for one."""


def say(text: object = "", *, file: TextIO | None = None) -> None:
    """Print a text on stdout, or on `file`, with control characters visible."""
    print(printable(text), file=file, flush=True)


def say_note(sentence: object) -> None:
    """Print a note on stderr, in one line."""
    print(f"note: {one_line(sentence)}", file=sys.stderr, flush=True)


def console(**options: Any) -> Console:
    """A console of rich that prints texts as they are: no markup, control characters visible."""
    from rich.console import Console  # it takes a tenth of a second
    from rich.text import Text

    class Plain(Console):
        def render_str(self, text: str, **more: Any) -> Text:
            return super().render_str(printable(text), **more)

    return Plain(markup=False, emoji=False, **options)


def printable(text: object) -> str:
    r"""The text with control characters as visible escapes, as \x1b; newlines and tabs stay."""
    return "".join(c if c in "\n\t" else _visible(c) for c in str(text))


def one_line(text: object) -> str:
    """`printable` for a name: newlines and tabs are escaped too."""
    return "".join(map(_visible, str(text)))


def markdown(text: object) -> str:
    """A name as plain text in Markdown: no HTML, link, emphasis or end of a table's cell."""
    escaped = one_line(text).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    escaped = re.sub(r"([\\`*\[\]|~]|(?<![^\W_])_|_(?![^\W_]))", r"\\\1", escaped)
    return escaped.replace("://", ":&#47;&#47;")  # an address alone becomes a link too


def code(text: object) -> str:
    """A value as code within a line of Markdown, or within a cell of a table."""
    return f"`{one_line(text).replace('`', chr(39)).replace('|', '¦')}`"


def _visible(c: str) -> str:
    if c.isascii():
        return c if " " <= c <= "~" else _escape(c)
    return _escape(c) if unicodedata.category(c) in _UNSEEN and c not in _KEPT else c


def _escape(c: str) -> str:
    return c.encode("unicode_escape", "surrogatepass").decode("ascii")
