"""From what a page holds to its HTML: one file, whose scripts are the only ones that may run in it.

The policy lets a browser fetch nothing. A page of a running server (`show/live`) may ask its own
origin, which it says by `connect`.
"""

from __future__ import annotations

import base64
import hashlib
import re
import time
from functools import cache
from importlib.resources import files as resources
from typing import TYPE_CHECKING, Any

from corefed import __version__

if TYPE_CHECKING:
    from jinja2 import Template
    from markupsafe import Markup

SCRIPTS = ("charts.js", "tables.js", "views.js")
"""The page's own, in this order."""


def whole(
    template: str, *, specs: dict[str, Any], scripts: tuple[str, ...] = SCRIPTS,
    connect: str = "", **content: Any,
) -> str:  # fmt: skip
    """A page as text."""
    library, script = _library(), "\n".join(map(read_asset, scripts))
    return _template(template).render(
        policy=policy(library, script, connect=connect),
        version=__version__,
        date=time.strftime("%d %B %Y, %H:%M"),
        style=_safe(read_asset("style.css")),
        library=_safe(library),
        script=_safe(script),
        specs=_json(specs),
        **content,
    )


def policy(*scripts: str, connect: str = "") -> str:
    """What a browser may load and run."""
    digests = [base64.b64encode(hashlib.sha256(each.encode()).digest()) for each in scripts]
    hashes = " ".join(f"'sha256-{digest.decode()}'" for digest in digests)
    asked = f"connect-src {connect}; " if connect else ""
    return (
        f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data:; "
        f"{asked}base-uri 'none'; form-action 'none'"
    )


def read_asset(name: str) -> str:
    return (resources("corefed.show.page") / name).read_text(encoding="utf-8")


@cache
def _library() -> str:
    """Vega, Vega-Lite and Vega-Embed as one script, in a scope of its own."""
    from vl_convert import javascript_bundle  # of an extra

    bundle = javascript_bundle("window.vegaEmbed = vegaEmbed;")
    return inside_script(f"(()=>{{{bundle}}})();")


def inside_script(text: str) -> str:
    """Escape whatever could end the script element."""
    return re.sub(r"<(?=/script|!--|script)", r"\\x3C", text, flags=re.IGNORECASE)


def _template(name: str) -> Template:
    from jinja2 import Environment, FunctionLoader, StrictUndefined  # of an extra

    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, finalize=_bind_percent,
        loader=FunctionLoader(read_asset),
    )  # fmt: skip
    return environment.get_template(name)


def _bind_percent(value: object) -> object:
    """Keep a number and its percent sign on one line."""
    return value.replace(" %", "\u00a0%") if type(value) is str else value


def _json(value: object) -> Markup:
    from jinja2.utils import htmlsafe_json_dumps  # of an extra

    return htmlsafe_json_dumps(value, separators=(",", ":"))


def _safe(text: str) -> Markup:
    from markupsafe import Markup  # of an extra

    return Markup(text)
