"""The page map in a real browser: it moves, marks what is shared, is quick, and can be used without a mouse."""

from __future__ import annotations

import contextlib
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from serve_support import Served, serving

from pagedkv.monitor.record import Record
from pagedkv.serve.app import ServeOptions
from pagedkv.serve.replaying import build_replay

ARTEFACTS = Path(__file__).resolve().parents[2] / "build" / "page-map"
SLOWEST_FRAME = 50.0  # milliseconds of script


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    path = shutil.which("chromium") or shutil.which("google-chrome")
    if path is None:
        pytest.skip("no chromium is installed")
    playwright = pytest.importorskip("playwright.sync_api")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


def until(page: Any, condition: str, seconds: float = 20.0) -> None:
    """Wait for a condition in JavaScript; the page's own policy forbids the driver's way of doing this."""
    end = time.monotonic() + seconds
    while not page.evaluate(condition):
        assert time.monotonic() < end, f"waited {seconds:g} s for {condition}"
        page.wait_for_timeout(50)


@contextlib.contextmanager
def page_of(browser: Any, url: str, **options: Any) -> Iterator[Any]:
    """A page on which nothing may go wrong."""
    context = browser.new_context(**{"viewport": {"width": 1300, "height": 900}} | options)
    page, wrong = context.new_page(), []
    page.on("console", lambda message: wrong.append(message.text) if message.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.goto(url)
    until(page, "pagedkv.state.count > 0")
    yield page
    assert wrong == []
    context.close()


@contextlib.contextmanager
def load(served: Served, clients: int = 6, tokens: int = 60) -> Iterator[None]:
    """Clients whose prompts begin alike, one after the other until the block ends, for so many tokens or more."""
    stop = threading.Event()

    def ask(number: int) -> None:
        turn = 0
        while not stop.is_set():
            turn += 1
            body = {"prompt": "a common beginning of all prompts " * 2 + f"{number} {turn}", "ignore_eos": True}
            httpx.post(f"{served.url}/v1/completions", json=body | {"max_tokens": tokens + 10 * number}, timeout=60)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(clients)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join()


@pytest.fixture(scope="module")
def busy(browser: Any) -> Iterator[Served]:
    with serving(step_seconds=0.03, pages=256, max_seq_len=512) as served, load(served, tokens=380):
        yield served


def picture(page: Any) -> str:
    return str(page.evaluate("document.getElementById('map').toDataURL()"))


def frame_times(page: Any) -> list[float]:
    return [float(time) for time in page.evaluate("[...pagedkv.times]")]


def pick_one_that_runs(page: Any) -> None:
    """The newest, which has twelve seconds to go."""
    until(page, "document.querySelector('#requests tr:last-child td:nth-child(2)')?.textContent.startsWith('decode')")
    page.locator("#requests button").last.click()
    until(page, "document.querySelectorAll('.block').length > 3")


def test_the_map_moves_and_the_charts_too(busy: Served, browser: Any) -> None:
    with page_of(browser, busy.url) as page:
        before = picture(page)
        page.wait_for_timeout(1500)
        assert picture(page) != before
        until(page, "document.querySelectorAll('#charts .scatterlayer path.js-line').length >= 5")
        line = "document.querySelector('#charts .scatterlayer path.js-line').getAttribute('d')"
        page.locator("#colour").select_option("age")  # which is drawn all the time
        drawn = page.evaluate(line)
        page.wait_for_timeout(2500)
        assert page.evaluate(line) != drawn
        assert "running" in page.locator("#summary").inner_text()
        assert page.locator("#connection").inner_text() == "live"


def test_a_request_lights_up_and_shows_its_block_table(busy: Served, browser: Any) -> None:
    with page_of(browser, busy.url) as page:
        pick_one_that_runs(page)
        marked = set(page.evaluate("[...pagedkv.grid.marked]"))
        shown = {int(text.removeprefix("page ")) for text in page.locator(".block b").all_inner_texts()}
        assert marked
        assert shown & marked
        assert page.locator(".block.shared").count() >= 1
        page.locator(".block.shared").first.click()
        until(page, "document.querySelector('#page pre')")
        facts = page.locator("#page dl").inner_text()
        assert "shared" in facts
        assert "a common" in page.locator("#page pre").inner_text()
        ARTEFACTS.mkdir(parents=True, exist_ok=True)
        page.screenshot(path=str(ARTEFACTS / "light.png"), full_page=True)


def test_the_map_shows_what_the_snapshot_says(browser: Any) -> None:
    with serving(pages=96) as served:
        httpx.post(f"{served.url}/v1/completions", json={"prompt": "x" * 90, "max_tokens": 3}, timeout=60)
        with page_of(browser, served.url) as page:
            snapshot = httpx.get(f"{served.url}/v1/pool/snapshot").json()
            assert page.evaluate("[...pagedkv.state.state]") == snapshot["page_state"]
            assert page.evaluate("[...pagedkv.state.parent]") == snapshot["page_parent"]
            assert 1 in snapshot["page_state"]


def test_it_can_be_used_by_keyboard(busy: Served, browser: Any) -> None:
    with page_of(browser, busy.url) as page:
        page.locator("#map").focus()
        page.keyboard.press("Home")
        page.keyboard.press("ArrowRight")
        until(page, "document.querySelector('#page dd')?.textContent === '2'")
        page.keyboard.press("ArrowDown")
        assert page.evaluate("pagedkv.grid.cursor") == 2 + page.evaluate("pagedkv.grid.columns")
        size = page.evaluate("pagedkv.grid.size")
        page.keyboard.press("+")
        assert page.evaluate("pagedkv.grid.zoom") == 1
        assert page.evaluate("pagedkv.grid.size") >= size
        page.locator("#requests button").last.focus()
        page.keyboard.press("Enter")
        until(page, "document.querySelector('tr[aria-selected=true]')")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_a_phone(busy: Served, browser: Any, scheme: str) -> None:
    options = {"viewport": {"width": 375, "height": 720}, "has_touch": True, "color_scheme": scheme}
    with page_of(browser, busy.url, **options) as page:
        page.wait_for_timeout(500)
        assert page.evaluate("document.documentElement.scrollWidth") <= 375
        page.locator("#map").tap(position={"x": 8, "y": 8})
        until(page, "document.querySelector('#page dd')?.textContent === '1'")
        paper = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (paper == "rgb(20, 23, 27)") == (scheme == "dark")
        ARTEFACTS.mkdir(parents=True, exist_ok=True)
        page.screenshot(path=str(ARTEFACTS / f"phone-{scheme}.png"), full_page=True)


def test_states_are_told_apart_without_colour(busy: Served, browser: Any) -> None:
    """Each state's sample in the legend has a shape of its own, once all colour is gone."""
    grey = """(canvas) => {
      const data = canvas.getContext('2d').getImageData(0, 0, 32, 32).data;
      const light = [];
      for (let i = 0; i < data.length; i += 4) light.push(0.3 * data[i] + 0.59 * data[i + 1] + 0.11 * data[i + 2]);
      return light.map((each) => Math.abs(each - light[light.length - 1]) > 25 ? 1 : 0).join('');
    }"""
    with page_of(browser, busy.url) as page:
        shapes = [page.locator("#legend canvas").nth(number).evaluate(grey) for number in range(5)]
        free, cached, used, shared, pinned = shapes
        assert len({cached, used, shared, pinned}) == 4
        assert free == used  # plain both: the one is nearly the paper's colour, the other far from it


def test_a_hundred_thousand_pages_are_drawn_in_time(browser: Any) -> None:
    settings = {"step_seconds": 0.03, "pages": 100_000, "max_batch_size": 64}
    with serving(**settings) as served, load(served, 8), page_of(browser, served.url) as page:
        page.wait_for_timeout(1500)
        page.evaluate("pagedkv.times.length = 0")
        for mode in ("state", "owner", "age"):
            page.locator("#colour").select_option(mode)
            page.wait_for_timeout(1500)
        for _ in range(6):
            page.locator("#zoom-in").click()
            page.wait_for_timeout(200)
        times = sorted(frame_times(page))
        assert page.evaluate("pagedkv.state.count") == 100_000
        assert times[int(0.99 * len(times))] < SLOWEST_FRAME
        page.screenshot(path=str(ARTEFACTS / "many.png"))


def test_an_admin_key_is_asked_for(browser: Any) -> None:
    with serving(ServeOptions(admin_key="root")) as served:
        assert httpx.get(f"{served.url}/v1/pool/stream").status_code == 403
        assert httpx.get(f"{served.url}/v1/pool/pages/1").status_code == 403
        assert httpx.get(f"{served.url}/metrics").status_code == 403
        context = browser.new_context()
        page = context.new_page()
        page.goto(served.url)
        page.locator("#admin-key").fill("root")
        page.keyboard.press("Enter")
        until(page, "pagedkv.state.count > 0")
        context.close()


def test_a_replay_is_steered_from_the_page(browser: Any, tmp_path: Path) -> None:
    path = tmp_path / "a.pkv"
    with serving(ServeOptions(record=path), step_seconds=0.01, pages=96) as served:
        for number in range(3):
            httpx.post(f"{served.url}/v1/completions", json={"prompt": f"{number}" * 60, "max_tokens": 30}, timeout=60)
    record = Record(path)
    with replaying(record) as url, page_of(browser, url) as page:
        page.locator("#time").fill(str(len(record) // 2))
        until(page, f"document.getElementById('moment').textContent.endsWith('frame {len(record) // 2 + 1}')")
        before = page.evaluate("[...pagedkv.state.state]")
        page.locator("#step").click()
        until(page, f"document.getElementById('moment').textContent.endsWith('frame {len(record) // 2 + 2}')")
        page.locator("#speed").select_option("16")
        page.locator("#play").click()
        until(page, at_frame(len(record)))
        assert page.locator("#play").inner_text() == "Play"
        assert page.evaluate("[...pagedkv.state.state]") != before
        page.locator("#map").click(position={"x": 10, "y": 10})
        until(page, "document.getElementById('page').textContent.includes('are not in a record')")


def at_frame(number: int) -> str:
    return f"document.getElementById('moment').textContent.endsWith('frame {number}')"


@contextlib.contextmanager
def replaying(record: Record) -> Iterator[str]:
    server = uvicorn.Server(
        uvicorn.Config(build_replay(record), port=0, log_level="warning", timeout_graceful_shutdown=1)
    )
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.02)
    yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    server.should_exit = True
    thread.join(10)
