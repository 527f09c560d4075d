"""`corefed report`: runs as one self-contained HTML file.

gather.py, points.py    a run read from its folder; its data, loaded and split again
sections/               from a run to sections: text, tables, charts, images (`content.py`)
charts.py, paired.py    Vega-Lite specifications; paired tests
making.py               sections to views: summary, sites, coresets
html.py                 views to HTML: page.html, parts.html, style.css, the scripts, and Vega's own
from_python.py          the same for `Federation` objects
"""

from corefed.show.page.making import write

__all__ = ["write"]
