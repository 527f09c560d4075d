"""Runs, pages and a browser that the tests of pages share: each is made once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
from browser import PROGRAM, Browser, chromium

if TYPE_CHECKING:
    from report_pages import Made


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    from report_pages import make

    return make(tmp_path_factory.mktemp("page"))


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    if PROGRAM is None:
        pytest.skip("no Chromium is installed")
    with chromium() as running:
        yield running
