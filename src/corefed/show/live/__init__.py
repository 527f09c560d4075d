"""`corefed watch DIR --web`: a run as a page that refreshes itself, served on this machine alone.

state.py     what the page shows, from the files of the run, as JSON
server.py    who may ask: the right token, host and origin; the page, its state, the stop button
"""

from corefed.show.live.server import serve
from corefed.show.live.state import News

__all__ = ["News", "serve"]
