"""`corefed watch --web`: what the page is told, who may ask, and the stop button."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from browser import OVERFLOW, Browser
from commands import SMALL, corefed
from growing_runs import NOW, begin, line, write

pytest.importorskip("altair", reason="the report's extra is not installed")
pytest.importorskip("vl_convert", reason="the report's extra is not installed")
pytest.importorskip("starlette", reason="the extra of live pages is not installed")
pytest.importorskip("uvicorn", reason="the extra of live pages is not installed")
pytest.importorskip("httpx", reason="these tests ask by it; it comes with the extra flower")

import httpx
import uvicorn

from corefed.base import digests
from corefed.base.locks import exclusively
from corefed.commands.watch import _news
from corefed.federation import events
from corefed.show.live import News, server, state
from corefed.show.watch import Reader
from corefed.training import interrupt, record

TOKEN, PORT = "a-token-of-the-test", 8471
HERE = f"http://127.0.0.1:{PORT}"
NASTY = "<img src=x onerror=alert(1)>"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return begin(tmp_path / "run")


class Client:
    """Asks the application without a socket."""

    def __init__(self, run: Path, **more: Any) -> None:
        self.app = server.application(run, TOKEN, PORT, clock=lambda: NOW, **more)

    def request(
        self, method: str, path: str, headers: dict[str, str] | None = None
    ) -> httpx.Response:
        async def ask() -> httpx.Response:
            transport = httpx.ASGITransport(app=self.app)
            async with httpx.AsyncClient(transport=transport, base_url=HERE) as asker:
                return await asker.request(method, path, headers=headers)

        return asyncio.run(ask())

    def get(self, path: str, headers: dict[str, str] | None = None) -> httpx.Response:
        return self.request("GET", path, headers)

    def post(self, path: str, headers: dict[str, str] | None = None) -> httpx.Response:
        return self.request("POST", path, headers)


# --- who may ask ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "headers", "code"),
    [
        ("/{token}/state", {}, 200),
        ("/{token}/state", {"host": f"localhost:{PORT}"}, 200),
        ("/{token}/state", {"host": "evil.example"}, 421),
        ("/{token}/state", {"host": f"evil.example:{PORT}"}, 421),
        ("/{token}/state", {"host": "127.0.0.1"}, 421),
        ("/{token}/state", {"host": "127.0.0.1:1"}, 421),
        ("/", {}, 404),
        ("/state", {}, 404),
        ("/wrong/state", {}, 404),
        ("/{token}x/state", {}, 404),
        ("/{token}/../state", {}, 404),
        ("/{token}/nothing", {}, 404),
        ("/{token}/stop", {}, 405),
    ],
)
def test_token_and_host(run: Path, path: str, headers: dict[str, str], code: int) -> None:
    answer = Client(run).get(path.format(token=TOKEN), headers=headers)
    assert answer.status_code == code
    assert TOKEN not in answer.text or code == 200
    assert answer.headers["cache-control"] == "no-store"
    assert answer.headers["referrer-policy"] == "no-referrer"
    assert "frame-ancestors 'none'" in answer.headers["content-security-policy"]


@pytest.mark.parametrize(
    ("headers", "code"),
    [
        ({}, 202),
        ({"origin": HERE, "sec-fetch-site": "same-origin"}, 202),
        ({"origin": "http://evil.example"}, 403),
        ({"origin": "null"}, 403),
        ({"sec-fetch-site": "cross-site"}, 403),
        ({"host": "evil.example"}, 421),
    ],
)
def test_stop_is_for_this_page_only(run: Path, headers: dict[str, str], code: int) -> None:
    write(run, line(1))
    with exclusively(run):
        answer = Client(run).post(f"/{TOKEN}/stop", headers=headers)
    assert answer.status_code == code
    assert interrupt.is_asked(run) == (code == 202)


@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE", "PATCH"])
def test_stop_takes_a_post(run: Path, method: str) -> None:
    with exclusively(run):
        assert Client(run).request(method, f"/{TOKEN}/stop").status_code == 405
    assert not interrupt.is_asked(run)


def test_a_run_that_is_not_going_on_cannot_be_stopped(run: Path) -> None:
    write(run, line(1))
    answer = Client(run).post(f"/{TOKEN}/stop")
    assert answer.status_code == 409 and "no process is at work" in answer.json()["error"]
    (run / record.SUMMARY).write_text("{}")
    assert "it has finished" in Client(run).post(f"/{TOKEN}/stop").json()["error"]
    assert not interrupt.is_asked(run)


# --- what is told ---------------------------------------------------------------------------------


def told(run: Path, **more: Any) -> dict[str, Any]:
    answer = Client(run, **more).get(f"/{TOKEN}/state")
    assert answer.status_code == 200
    found: dict[str, Any] = answer.json()
    return found


def test_state_of_a_simulation(run: Path) -> None:
    assert told(run)["state"].startswith("began 20 s ago")
    write(run, line(1, 0.2, clients=[[0.1, None, 0.3]] * 2),
          line(2, 0.4, clients=[[0.4, None, 0.2], [0.6, None, 0.2]]))  # fmt: skip
    found = told(run)
    assert (found["round"], found["rounds"], found["left"]) == (2, 4, "20 s left")
    assert not found["finished"] and not found["old"] and found["late"] == []
    assert ["Personal accuracy", "45.0 %", "after round 2"] in found["tiles"]
    assert found["sites"]["rows"] == [
        ["client 0", "50.0 %", "+40.0"], ["client 1", "-", "-"], ["client 2", "20.0 %", "-10.0"],
    ]  # fmt: skip
    assert {each["name"] for each in found["charts"]["curve"]["usermeta"]["legend"]} == {
        "personal", "global",
    }  # fmt: skip
    assert found["stop"] == {
        "possible": False, "asked": False,
        "note": f"Go on later with: corefed run --resume {run}",
    }  # fmt: skip
    with exclusively(run):
        found = told(run)
        assert found["stop"]["possible"] and found["state"] == "round 2 was written 3 s ago"
    found = told(run)
    assert found["old"] and found["state"] == (
        f"stopped after round 2; go on with: corefed run --resume {run}"
    )


def test_one_evaluated_round_is_no_curve(run: Path) -> None:
    write(run, line(1))
    assert told(run)["charts"] == {"curve": None, "coreset": None}


def test_state_of_a_federation_and_who_is_late(tmp_path: Path) -> None:
    folder = begin(tmp_path / "first")
    log = events.Log(folder / record.EVENTS)
    log("started", 0, reason="2 clients connected")
    log("missing", 1, "carol", "not connected")
    answered = {
        "accepted": ["alice", "bob"], "lost": {"carol": "not connected"},
        "train_seconds": {"alice": 1.25, "bob": 2.0},
    }  # fmt: skip
    write(folder, line(1, federation=answered))
    found = told(folder, news=_news)
    assert found["sites"]["rows"] == [
        ["alice", "answered in 1.2 s", "1 of 1"],
        ["bob", "answered in 2.0 s", "1 of 1"],
        ["carol", "left out: not connected", "0 of 1"],
    ]
    assert found["events"][-1] == "round 1: carol missing: not connected"
    (folder / "asked.json").write_text(json.dumps({"silent": ["bob"], "since": NOW - 45}))
    found = told(folder, news=_news)
    assert found["late"] == ["bob: no answer for 45 s"]
    assert found["sites"]["rows"][1][1].startswith("asked, no answer yet")
    (folder / "asked.json").write_text(json.dumps({"silent": ["bob"], "since": NOW - 5}))
    assert told(folder, news=_news)["late"] == []


def test_many_sites_and_events_stay_small(run: Path) -> None:
    write(run, line(1, clients=[[0.5] * 2000] * 2))
    look = Reader(run).look()
    found = state.of_run(look, NOW, News(events=[str(i) for i in range(100)]))
    assert len(found["sites"]["rows"]) == state.SITES and found["events"][-1] == "99"
    assert len(found["events"]) == state.EVENTS


def test_a_folder_that_goes_away_is_said(run: Path) -> None:
    asked = Client(run)
    (run / record.EXPERIMENT).unlink()
    answer = asked.get(f"/{TOKEN}/state")
    assert answer.status_code == 409 and "holds no run" in answer.json()["error"]


def test_page_asks_its_own_origin_only(run: Path) -> None:
    text = Client(run).get(f"/{TOKEN}/").text
    assert "default-src &#39;none&#39;; script-src" in text
    assert "connect-src &#39;self&#39;; base-uri" in text
    assert TOKEN not in text and len(text) < 5_000_000


# --- the command ----------------------------------------------------------------------------------


def test_mistakes_are_one_sentence(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    taken = socket.socket()
    taken.bind(("127.0.0.1", 0))
    taken.listen()
    cases = [
        ((run, "--web", "--once"), "exclude each other"),
        ((run, "--port", "80"), "it needs --web"),
        ((run / "none", "--web"), "holds no run of corefed"),
        ((run, "--web", "--port", taken.getsockname()[1]), "choose another --port"),
    ]
    for arguments, said in cases:
        result = corefed("watch", *arguments)
        assert result.code == 2 and said in result.err and result.err.count("\n") == 1
    taken.close()
    monkeypatch.setattr(server, "find_spec", lambda name: None)
    result = corefed("watch", run, "--web")
    assert result.code == 2 and "in a checkout of corefed, pip install -e '.[web]'" in result.err


def test_served_on_this_machine_alone(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The address that is printed answers; the socket is of 127.0.0.1."""
    places = []

    def ended(self: Any, sockets: list[socket.socket]) -> None:
        places.append(sockets[0].getsockname())
        raise KeyboardInterrupt

    monkeypatch.setattr(uvicorn.Server, "run", ended)
    one, two = (corefed("watch", run, "--web") for _ in range(2))
    assert one.code == two.code == 130
    assert [host for host, _ in places] == ["127.0.0.1"] * 2
    addresses = [each.out.split("http://")[1].split()[0] for each in (one, two)]
    tokens = [address.split("/")[1] for address in addresses]
    assert len(set(tokens)) == 2 and all(len(token) == 32 for token in tokens)


# --- stopping a run -------------------------------------------------------------------------------


def test_button_stops_a_simulation_after_its_round(tmp_path: Path) -> None:
    """And resuming goes on from there, without stopping again."""
    folder = tmp_path / "run"
    codes = []

    def press() -> None:
        limit = time.monotonic() + 60
        while not (folder / record.ROUNDS).exists() and time.monotonic() < limit:
            time.sleep(0.005)
        codes.append(Client(folder).post(f"/{TOKEN}/stop").status_code)

    thread = threading.Thread(target=press)
    thread.start()
    small = [flag for flag in SMALL if not flag.startswith("--rounds")]
    result = corefed("run", *small, "--rounds=400", "--quiet", "--out", folder)
    thread.join()
    done = len(record.read_lines(folder / record.ROUNDS)[0])
    assert codes == [202] and result.code == 130 and 1 <= done < 400
    assert f"stopped after round {done}; go on with: corefed run --resume" in result.err
    assert not interrupt.is_asked(folder) and not (folder / record.SUMMARY).exists()
    interrupt.ask(folder)  # of a time when nobody was there to notice
    again = corefed("run", "--resume", folder, "--rounds", done + 1, "--quiet")
    assert again.code == 0 and (folder / record.SUMMARY).exists()


# --- in a browser ---------------------------------------------------------------------------------


@contextmanager
def serving(run: Path, **more: Any) -> Iterator[str]:
    """The address of a server in a thread of this process."""
    door = socket.socket()
    door.bind(("127.0.0.1", 0))
    port = door.getsockname()[1]
    app = server.application(run, TOKEN, port, clock=lambda: NOW, **more)
    running = uvicorn.Server(
        uvicorn.Config(app, log_level="warning", lifespan="off", ws="none", http="h11",
                       loop="asyncio", timeout_graceful_shutdown=1)
    )  # fmt: skip
    thread = threading.Thread(target=running.run, kwargs={"sockets": [door]})
    thread.start()
    try:
        yield f"http://127.0.0.1:{port}/{TOKEN}/"
    finally:
        running.should_exit = True
        thread.join()
        door.close()


def test_page_refreshes_itself_and_stops_the_run(run: Path, browser: Browser) -> None:
    write(run, line(1, 0.2, clients=[[0.1, 0.2, 0.3]] * 2))
    about = {"schema": 1, "clients": [[{"name": n} for n in ("north", NASTY, "south")]] * 2}
    (run / "data.json").write_bytes(digests.to_json(about))
    browser.media("light")
    browser.width(1200)
    with exclusively(run), serving(run) as address:
        browser.open(address)
        browser.until("document.getElementById('left').textContent.includes('round 1 of 4')")
        assert browser.evaluate("document.getElementById('curve').hidden")
        write(run, line(2, 0.4, clients=[[0.4, 0.2, 0.2]] * 2))
        browser.until("document.querySelector('[data-chart=curve] svg') !== null")
        chart = "document.querySelector('[data-chart=curve]')"
        assert browser.evaluate(f"{chart}.getAttribute('role')") == "img"
        label = browser.evaluate(f"{chart}.getAttribute('aria-label')")
        assert "personal 45.0 (round 2)" in label
        rows = "document.getElementById('site-table').tBodies[0].textContent"
        assert NASTY in browser.evaluate(rows)
        assert browser.evaluate("document.querySelectorAll('#site-table img').length") == 0
        assert browser.evaluate("document.getElementById('bar').value") == 2
        browser.evaluate("document.getElementById('stop').click()")
        browser.until(
            "document.getElementById('stop-note').textContent.includes('Stopping after this round')"
        )
        assert interrupt.is_asked(run)
        assert browser.evaluate("document.getElementById('stop').hidden")
        browser.width(390)
        assert browser.evaluate(OVERFLOW) == 0
        browser.width(1200)
        assert {r for r in browser.requests if not r.startswith("data:")} == {
            address, f"{address}state", f"{address}stop",
        }  # fmt: skip
        assert browser.errors == []
    browser.until("!document.getElementById('trouble').hidden")
    assert "does not answer" in browser.evaluate("document.getElementById('trouble').textContent")


def test_the_report_is_served_too(tmp_path: Path, browser: Browser) -> None:
    folder = tmp_path / "run"
    assert corefed("run", *SMALL, "--quiet", "--out", folder).code == 0
    with serving(folder) as address:
        browser.open(f"{address}report")
        assert browser.evaluate("document.querySelectorAll('img').length") == 0
        assert browser.evaluate("document.querySelector('h1').textContent") == "pfedbayes on digits"
        assert browser.errors == []
        favicon = "/favicon.ico"
        assert [r for r in browser.requests if not r.startswith("data:")
                and not r.endswith(favicon)] == [f"{address}report"]  # fmt: skip
