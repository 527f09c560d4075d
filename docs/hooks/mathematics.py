"""Formulas become MathML when the site is built: browsers draw it, without script or font.

`pymdownx.arithmatex` finds $...$ and $$...$$ and leaves them in elements of class arithmatex. A
formula that cannot be read ends the build.
"""

from __future__ import annotations

import html
import re

from math_core import LatexError, LatexToMathML
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import Files
from mkdocs.structure.pages import Page

FORMULA = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', re.DOTALL)


def on_page_content(content: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    converter = LatexToMathML(annotation=True, fancy_error=False)

    def drawn(found: re.Match[str]) -> str:
        element, latex = found[1], html.unescape(found[2]).strip()
        display = element == "div"
        if r"\tag{" in latex:  # which TeX knows in numbered environments only
            latex = rf"\begin{{equation}}{latex}\end{{equation}}"
        try:
            mathml = converter.convert_with_local_state(latex, displaystyle=display)
        except LatexError as error:
            raise PluginError(f"{page.file.src_uri}: {latex!r}: {error}") from error
        return f'<div class="formula">{mathml}</div>' if display else mathml

    return FORMULA.sub(drawn, content)
