"""The chat page in a real browser: it streams, stops, begins anew and shows errors. Needs Chromium."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect, sync_playwright

from tests.system.server import Server, serving

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here")


@pytest.fixture(scope="module")
def server(smollm2_folder: Path) -> Iterator[Server]:
    with serving(smollm2_folder, "--max-model-len", "600") as running:
        yield running


@pytest.fixture
def page(server: Server) -> Iterator[Page]:
    """Fails a test whose page has logged an error."""
    faults: list[str] = []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        opened = browser.new_page()
        opened.on("pageerror", lambda error: faults.append(str(error)))
        opened.on("requestfailed", lambda request: faults.append(request.url) if "/v1/" not in request.url else None)
        opened.goto(f"{server.url}/chat")
        yield opened
        browser.close()
    assert not faults


def say(page: Page, text: str) -> None:
    page.fill("#input", text)
    page.keyboard.press("Enter")


def test_an_answer_is_streamed_with_its_tokens_and_times(page: Page) -> None:
    page.click("#settings summary")
    page.fill("#temperature", "0")
    page.click("#settings summary")
    say(page, "What is the capital of France?")
    expect(page.locator(".assistant .body")).to_have_text("The capital of France is Paris.", timeout=20_000)
    expect(page.locator(".assistant .facts")).to_contain_text("8 tokens · first after")
    expect(page.locator(".assistant .facts")).to_contain_text("tokens/s · prompt")
    say(page, "And of Italy?")
    expect(page.locator(".assistant .facts").nth(1)).to_contain_text("cached", timeout=20_000)


def test_stop_keeps_what_there_is(page: Page) -> None:
    say(page, "Tell me a very long story about a river and all of its bridges.")
    expect(page.locator(".assistant .facts")).to_contain_text("tokens ·", timeout=20_000)
    page.click("#stop")
    expect(page.locator(".assistant .facts")).to_contain_text("stopped")
    expect(page.locator("#send")).to_be_visible()
    assert page.locator(".assistant .body").inner_text()


def test_what_the_server_refuses_is_shown(page: Page) -> None:
    page.click("#settings summary")
    page.fill("#max-tokens", "100000")
    page.click("#settings summary")
    say(page, "Hello")
    expect(page.locator(".assistant .error")).to_contain_text("max_tokens")


def test_a_new_chat_forgets(page: Page) -> None:
    say(page, "Hello")
    expect(page.locator(".assistant .facts")).to_contain_text("prompt", timeout=20_000)
    page.click("#new")
    expect(page.locator(".message")).to_have_count(0)
    expect(page.locator("#input")).to_be_focused()
