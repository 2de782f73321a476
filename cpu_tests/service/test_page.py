"""The page, by keyboard and mouse, in a real browser without a network."""

import json
import math
import re
import shutil

import pytest
from playwright.sync_api import expect, sync_playwright

from cpu_tests.service.conftest import LONG_ANSWER

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(
    CHROMIUM is None, reason="no Chromium here: apt-get install chromium"
)
DONE = re.compile(r"^\d+ tokens?, (limit reached|ended by itself), [\d.]+ s$")


@pytest.fixture(scope="module")
def browser():
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def page(browser, server):
    """The page, freshly loaded; whatever it wants from elsewhere or complains of fails the test."""
    wrong = []
    page = browser.new_page()
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("console", lambda message: wrong.append(message.text))
    page.on(
        "request",
        lambda request: (
            None
            if request.url.startswith((server.url, "data:"))
            else wrong.append(f"asked for {request.url}")
        ),
    )
    page.goto(server.url)
    expect(page.locator("#model")).to_contain_text("served")
    yield page
    page.close()
    # A browser notes each refusal; what the page makes of it is tested.
    assert [each for each in wrong if "Failed to load resource" not in each] == []


def generated(page):
    return "".join(page.locator(".token").all_text_contents())


def test_text_is_generated_by_keyboard_alone(page, alone):
    expect(page.locator("#prompt")).to_be_focused()
    page.keyboard.type("Line 3")
    settings = {"max_tokens": "12", "temperature": "0.7", "top_p": "0.9", "top_k": "0"}
    for name, value in settings.items():
        page.keyboard.press("Tab")
        expect(page.locator(f"#{name}")).to_be_focused()
        page.keyboard.press("Control+A")
        page.keyboard.type(value)
    for _ in range(2):
        page.keyboard.press("Tab")
    expect(page.get_by_label("Seed")).to_be_focused()
    page.keyboard.type("7")
    page.keyboard.press("Control+Enter")
    expect(page.locator("#status")).to_have_text(DONE)
    expected = alone("Line 3", max_new_tokens=12, seed=7, temperature=0.7, top_p=0.9)
    assert generated(page) == expected.text
    assert page.locator("#output").text_content() == "Line 3" + expected.text


def test_hovering_and_walking_show_the_probabilities(page, alone):
    page.get_by_label("Prompt").fill("Line")
    page.get_by_label("New tokens").fill("6")
    page.get_by_label("Temperature").fill("0")
    page.get_by_role("button", name="Generate").click()
    expect(page.locator("#status")).to_have_text(DONE)
    expected = alone("Line", max_new_tokens=6, temperature=0.0)
    details = page.get_by_role("tooltip")
    expect(details).to_be_hidden()
    page.locator(".token").nth(2).hover()
    expect(details).to_be_visible()
    assert details.locator("tr").count() == 5
    probability = 100 * math.exp(expected.token_logprobs[2])
    expect(details.locator("tr.chosen td.number")).to_have_text(f"{probability:.1f} %")
    page.mouse.move(0, 0)
    expect(details).to_be_hidden()
    page.get_by_role("button", name="Generate").focus()
    page.keyboard.press("Tab")
    expect(page.locator(".token").first).to_be_focused()
    expect(details).to_be_visible()
    page.keyboard.press("ArrowRight")
    expect(page.locator(".token").nth(1)).to_be_focused()
    page.keyboard.press("End")
    expect(page.locator(".token").last).to_be_focused()
    page.keyboard.press("Escape")
    expect(details).to_be_hidden()


def test_escape_and_the_button_stop_and_the_server_hears_of_it(page, server):
    page.get_by_label("New tokens").fill(str(LONG_ANSWER))
    stops = (lambda: page.keyboard.press("Escape"), page.get_by_role("button", name="Stop").click)
    for stop in stops:
        page.get_by_label("Prompt").focus()
        page.keyboard.press("Control+Enter")
        expect(page.locator(".token").nth(3)).to_be_attached()
        stop()
        expect(page.locator("#status")).to_have_text(re.compile(r"^stopped after \d+ tokens$"))
        assert page.locator(".token").count() < LONG_ANSWER
        expect(page.get_by_role("button", name="Generate")).to_be_enabled()
        server.wait_until_idle()


def test_an_error_is_shown_beside_its_field(page):
    page.get_by_label("New tokens").fill("99999")
    page.get_by_role("button", name="Generate").click()
    expect(page.get_by_role("alert")).to_contain_text("max_tokens: is 99999")
    expect(page.get_by_label("New tokens")).to_be_focused()
    expect(page.get_by_label("New tokens")).to_have_attribute("aria-invalid", "true")
    page.get_by_label("New tokens").fill("")
    page.get_by_role("button", name="Generate").click()
    expect(page.get_by_role("alert")).to_have_text("New tokens: give a number")
    page.get_by_label("New tokens").fill("3")
    page.get_by_role("button", name="Generate").click()
    expect(page.locator("#status")).to_have_text(DONE)
    expect(page.get_by_role("alert")).to_be_hidden()


def test_a_server_that_has_gone_is_told(page):
    page.context.set_offline(True)
    page.get_by_role("button", name="Generate").click()
    expect(page.get_by_role("alert")).to_have_text("the server cannot be reached")
    page.context.set_offline(False)


def test_what_a_model_says_is_text_and_never_markup(page, server):
    def answer(route):
        event = {
            "choices": [
                {
                    "index": 0,
                    "text": "<img src=x onerror=alert(1)>",
                    "finish_reason": "stop",
                    "logprobs": {
                        "tokens": ["<b>"],
                        "token_logprobs": [-1],
                        "top_logprobs": [{"<i>": -2}],
                        "text_offset": [0],
                    },
                }
            ]
        }
        body = f"data: {json.dumps(event)}\n\ndata: [DONE]\n\n"
        route.fulfill(content_type="text/event-stream", body=body)

    page.route("**/v1/completions", answer)
    page.get_by_role("button", name="Generate").click()
    expect(page.locator("#status")).to_have_text(DONE)
    page.locator(".token").hover()
    expect(page.get_by_role("tooltip")).to_contain_text("<i>")
    assert page.locator("#output img, #details b, #details i").count() == 0


def test_a_key_is_asked_for_and_used(browser, serving):
    with serving("--api-key", "sesam") as server:
        page = browser.new_page()
        page.goto(server.url)
        key = page.get_by_label("API key")
        expect(key).to_be_visible()
        page.get_by_label("New tokens").fill("3")
        page.get_by_role("button", name="Generate").click()
        expect(page.get_by_role("alert")).to_contain_text("this server needs its API key")
        expect(key).to_be_focused()
        page.keyboard.type("sesam")
        page.keyboard.press("Enter")
        expect(page.locator("#status")).to_have_text(DONE)
        page.close()


def test_nothing_can_be_loaded_from_elsewhere(server):
    for path in ("/", "/page/page.css", "/page/page.js"):
        answer = server.get(path)
        assert "default-src 'none'" in answer.headers["content-security-policy"]
        assert not re.search(r"https?://", answer.text)
    assert server.http.head("/").status_code == 200
