"""`corefed report`: runs as one page of HTML that needs nothing but itself.

gather.py, points.py    what is known of a run; its data, dealt again
sections/               from a run to sections: text, tables, charts, pictures (`content.py`)
charts.py, paired.py    Vega-Lite specifications; paired tests
making.py               sections to HTML: page.html, style.css, script.js, and Vega's own script
"""

from corefed.show.page.making import write

__all__ = ["write"]
