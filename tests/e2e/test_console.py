"""The console in a real Chromium, over the real reward app and a real Valkey, on the folder of a made-up run.

Nobody trains here: `test_console_live.py` does that once. Every test ends with no error in the browser and with no
request to anybody else.
"""

from __future__ import annotations

import contextlib
import json
import re
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import httpx
import pytest
from playwright.sync_api import Browser, Page, Route, expect
from pydantic import SecretStr

import sao.board
import sao.streams
from sao.archive import Archive
from sao.atomic import append_line
from sao.config import RunConfig
from sao.preference import Preference, PreferenceDocument
from sao.rows import UpdateRow, read_rows
from services.reward.preferences.routes import ensure_preference
from tests.support.browser import DESK, PHONE, Visit, answering, visit
from tests.support.console_run import TASK, TOKENIZER, XSS, apart, console_of, fill_folder, fill_stores
from tests.support.processes import free_port

UPDATES = 60


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """That of a run of 60 updates, switched after two thirds of them."""
    made = tmp_path_factory.mktemp("made-up") / "run"
    fill_folder(made, UPDATES, switched_at=40, archived=30)
    return made


@pytest.fixture
def config(run_config: RunConfig, folder: Path) -> RunConfig:
    """The run in a folder and a store of its own."""
    reward = run_config.reward.model_copy(update={"port": free_port()})
    task = run_config.task.model_copy(update={"name": "writing"})
    made = run_config.model_copy(update={"reward": reward, "task": task})
    shutil.copytree(folder, made.run.dir)

    async def fill() -> None:
        board, streams = sao.board.connect(made), sao.streams.connect(made)
        await ensure_preference(board, None, TASK)
        await board.put_preference(TASK.preferences["classical"])
        await fill_stores(made, board, streams, UPDATES)
        await board.close()
        await streams.close()

    apart(fill())
    return made


@contextlib.contextmanager
def opened(
    browser: Browser, url: str, artefacts: Path, size: tuple[int, int] = DESK, *, absent: Sequence[str] = ()
) -> Iterator[Visit]:
    """The console with everything shown; at the end nothing was wrong and nobody else was asked."""
    with visit(browser, f"{url}/console", artefacts, size, absent=absent) as found:
        expect(found.page.locator("#connection")).to_have_text("live")
        expect(found.page.locator("#trajectories button.row")).to_have_count(13)
        expect(found.page.locator("#history li").first).to_be_visible()
        yield found
        assert found.errors == []
        assert found.elsewhere == []


def current(config: RunConfig) -> Preference:
    """What the board has."""

    async def ask() -> Preference:
        board = sao.board.connect(config)
        try:
            found = await board.preference()
            assert found is not None
            return found
        finally:
            await board.close()

    return apart(ask())


def weight(page: Page, component: str, value: float) -> None:
    """Move a slider."""
    slider = page.get_by_role("slider", name=component, exact=True)
    slider.fill(f"{value:g}")
    expect(slider).to_have_value(f"{value:g}")


def look_again(page: Page) -> None:
    """Let the page ask now, as the button of a lost connection does."""
    page.evaluate("document.getElementById('retry').click()")


def put(url: str, document: PreferenceDocument) -> None:
    answer = httpx.put(f"{url}/v1/preferences", content=document.model_dump_json(), timeout=10)
    assert answer.status_code == httpx.codes.OK


def test_a_slider_is_tried_then_applied_then_undone(config: RunConfig, browser: Browser, artefacts: Path) -> None:
    with console_of(config) as url, opened(browser, url, artefacts) as seen:
        page = seen.page
        expect(page.locator("#preference-now")).to_have_text("Now: classical (version 2)")
        seen.shoot("desk-start")
        slider = page.get_by_role("slider", name="style_cute", exact=True)
        slider.press("End")
        for _ in range(10):
            slider.press("ArrowLeft")
        expect(slider).to_have_value("0.5")
        expect(page.get_by_role("spinbutton", name="style_cute, exact weight")).to_have_value("0.5")
        weight(page, "style_classical", -0.25)
        page.get_by_label("Name", exact=True).fill("gently cute")
        page.get_by_label("Your name").fill("Ana")
        page.get_by_label("Reason").fill("people asked for it")
        page.get_by_role("button", name="Try it").press("Enter")
        result = page.get_by_role("region", name="Result of the dry run")
        expect(result).to_be_focused()
        expect(result).to_contain_text("On the last 120 trajectories")
        expect(result.locator(".lead")).to_contain_text(re.compile(r"flip: \d+ to above the mean, \d+ to below"))
        expect(result.get_by_role("row", name=re.compile("mean"))).to_be_visible()
        seen.shoot("desk-dry-run")
        assert current(config).version == 2, "a dry run changes nothing"

        page.get_by_role("button", name="Apply as version 3").press("Enter")
        expect(page.locator("#preference-message")).to_contain_text("Version 3, “gently cute”, is in force")
        stored = current(config)
        assert (stored.version, stored.document.name) == (3, "gently cute")
        assert stored.document.weights["style_cute"] == pytest.approx(0.5)
        assert stored.document.weights["style_classical"] == pytest.approx(-0.25)
        assert stored.document.gates == ["quality"], "what no slider moves stays"
        assert "quality" not in stored.document.weights, "a weight that was never given is not made up"

        page.get_by_role("button", name="Undo: back to v2 classical").press("Enter")
        expect(page.locator("#history-message")).to_contain_text("Version 4 repeats version 2")
        assert current(config).version == 4
        assert current(config).document == TASK.preferences["classical"]
        expect(page.get_by_role("slider", name="style_cute", exact=True)).to_have_value("-0.5")
        expect(page.locator("#history > li")).to_have_count(4)
        page.get_by_role("button", name="Bring back version 1").press("Enter")
        expect(page.locator("#preference-now")).to_have_text("Now: cute (version 5)")
        seen.shoot("desk-undone")


def test_an_edit_after_the_dry_run_asks_for_another(config: RunConfig, browser: Browser, artefacts: Path) -> None:
    with console_of(config) as url, opened(browser, url, artefacts) as seen:
        page = seen.page
        weight(page, "style_cute", 0.5)
        page.get_by_role("button", name="Try it").click()
        expect(page.locator("#apply")).to_be_visible()
        weight(page, "style_cute", 0.4)
        expect(page.locator("#apply")).to_be_hidden()
        page.get_by_role("spinbutton", name="style_cute, exact weight").fill("")
        page.get_by_role("button", name="Try it").click()
        expect(page.locator("#preference-message")).to_have_text("The weight of style_cute is no number.")
        page.get_by_role("spinbutton", name="style_cute, exact weight").fill("2.5")
        expect(page.get_by_role("slider", name="style_cute", exact=True)).to_have_value("2.5")
        page.get_by_role("button", name="Reset").click()
        expect(page.get_by_role("slider", name="style_cute", exact=True)).to_have_value("-0.5")
        assert current(config).version == 2


def test_whoever_comes_second_is_told_and_loses_nothing(config: RunConfig, browser: Browser, artefacts: Path) -> None:
    with console_of(config) as url, opened(browser, url, artefacts) as seen:
        page = seen.page
        weight(page, "style_cute", 0.3)
        page.get_by_role("button", name="Try it").click()
        expect(page.locator("#apply")).to_be_visible()
        put(url, TASK.preferences["chuunibyou"])
        page.locator("#apply").click()
        message = page.locator("#preference-message")
        expect(message).to_contain_text("Not applied: Version 3, “chuunibyou”")
        expect(page.locator("#preference-now")).to_have_text("Now: chuunibyou (version 3)")
        expect(page.get_by_role("slider", name="style_chuunibyou")).to_have_value("0.5")
        seen.shoot("desk-conflict")
        assert current(config).document == TASK.preferences["chuunibyou"]

        page.get_by_role("button", name="Put my sliders back").click()
        expect(page.get_by_role("slider", name="style_cute", exact=True)).to_have_value("0.3")
        page.get_by_role("button", name="Try it").click()
        page.get_by_role("button", name="Apply as version 4").click()
        expect(message).to_contain_text("Version 4")
        assert current(config).document.weights["style_cute"] == pytest.approx(0.3)


def test_a_scheduled_switch_waits_is_refused_in_advance_and_cancelled(
    config: RunConfig, browser: Browser, artefacts: Path
) -> None:
    with console_of(config) as url, opened(browser, url, artefacts) as seen:
        page = seen.page
        later = {"document": TASK.preferences["cute"].model_dump(), "at_update": 500}
        query = "author=Bo&reason=the+evening+edition"
        asked = f"{url}/v1/preferences/schedule?{query}"
        assert httpx.post(asked, json=later, headers={"If-Match": '"2"'}, timeout=10).status_code == httpx.codes.CREATED
        look_again(page)
        waiting = page.get_by_role("list", name="Switches that wait")
        expect(waiting).to_contain_text("cute at update 500")
        expect(waiting).to_contain_text("by Bo · only if v2 is still current")
        expect(waiting).to_contain_text("the evening edition")
        expect(waiting).not_to_contain_text("Will be refused")
        put(url, TASK.preferences["chuunibyou"])
        look_again(page)
        expect(waiting).to_contain_text("Will be refused: v3 is current by now.")
        seen.shoot("desk-scheduled")
        page.get_by_role("button", name="Cancel the switch to cute at update 500").click()
        expect(page.locator("#history-message")).to_have_text("The switch to “cute” at update 500 is cancelled.")
        expect(waiting).to_be_hidden()


def test_the_history_says_how_the_run_followed_and_an_alarm_is_shown(
    config: RunConfig, browser: Browser, artefacts: Path
) -> None:
    moves = {
        "rise": 0.9,
        "collapse": 1.4,
        "rising_from": 0.2,
        "rising_to": 0.9,
        "collapsing_from": 14,
        "collapsing_to": 3,
    }
    alarm = {"rising": "style_cute", "collapsing": "(length)", "preference": 2, **moves}
    with console_of(config) as url, opened(browser, url, artefacts) as seen:
        page = seen.page
        second, first = page.locator("#history > li").all()
        expect(second).to_contain_text(re.compile(r"scored after \d+\.\d s, trained after \d+\.\d s, serving not yet"))
        expect(first.locator(".adaptation")).to_be_hidden()
        expect(page.locator("#alarms")).to_be_hidden()

        def raised(route: Route) -> None:
            answer = route.fetch()
            route.fulfill(response=answer, json={**answer.json(), "alarms": [alarm]})

        page.route("**/v1/run", raised)
        look_again(page)
        expect(page.locator("#alarms")).to_contain_text(
            "Reward hacking suspected: style_cute (0.20 → 0.90) rises while the length (14.00 → 3.00) collapses"
        )
        seen.shoot("desk-alarm")
        page.unroute("**/v1/run")
        look_again(page)
        expect(page.locator("#alarms")).to_be_hidden()


def test_a_change_by_somebody_else_is_followed_unless_one_is_being_made(
    config: RunConfig, browser: Browser, artefacts: Path
) -> None:
    with console_of(config) as url, opened(browser, url, artefacts) as seen:
        page = seen.page
        put(url, TASK.preferences["chuunibyou"])
        look_again(page)
        expect(page.locator("#preference-now")).to_have_text("Now: chuunibyou (version 3)")
        weight(page, "style_cute", 0.2)
        put(url, TASK.preferences["cute"])
        look_again(page)
        expect(page.locator("#preference-message")).to_contain_text("was stored meanwhile")
        expect(page.get_by_role("slider", name="style_cute", exact=True)).to_have_value("0.2")
        page.get_by_role("button", name="Reset").click()
        expect(page.locator("#preference-now")).to_have_text("Now: cute (version 4)")


def tab_to(page: Page, selector: str, most: int = 80) -> None:
    """Press Tab until something of this selector has the focus."""
    for _ in range(most):
        page.keyboard.press("Tab")
        if page.evaluate("selector => document.activeElement.matches(selector)", selector):
            return
    pytest.fail(f"{selector} is not reached by Tab")


def test_a_trajectory_is_inspected_by_keyboard_alone(config: RunConfig, browser: Browser, artefacts: Path) -> None:
    trained = Archive(config.run.dir / "archive").read(UPDATES).trajectories[-1]
    with console_of(config) as url, opened(browser, url, artefacts) as seen:
        page = seen.page
        page.keyboard.press("Tab")
        expect(page.get_by_role("link", name="Skip to the content")).to_be_focused()
        page.keyboard.press("Enter")
        tab_to(page, "#trajectories button.row")
        page.keyboard.press("Tab")  # the first one waits; the second is the newest that was trained on
        expect(page.locator("#trajectories button.row").nth(1)).to_be_focused()
        page.keyboard.press("Enter")
        expect(page.locator("#inspect-title")).to_be_focused()
        expect(page.locator("#inspect")).to_contain_text("scored under")
        facts = page.locator("#token-facts")

        tab_to(page, "#inspect .tokens.action .token")
        numbers = dict.fromkeys(["advantage", "ratio", "log-prob", "weight f(r)"], "")
        for at in range(2):
            expect(facts).to_contain_text(f"{trained.advantages[at]:.4f}".replace("-", "−"))
            expect(facts).to_contain_text(f"{trained.ratios[at]:.4f}")
            expect(facts).to_contain_text(f"{trained.trajectory.segments[0].logprobs[at]:.4f}".replace("-", "−"))
            for name in numbers:
                expect(facts.get_by_text(name, exact=True)).to_be_visible()
            if at == 0:
                expect(facts).to_contain_text("stale: too old for its update")
                page.keyboard.press("ArrowRight")
        expect(facts).to_contain_text(f"v{UPDATES - 1:08d}")
        seen.shoot("desk-inspected")
        page.keyboard.press("Escape")
        expect(page.locator("#inspect")).to_be_hidden()
        expect(page.locator("#trajectories button.row").nth(1)).to_be_focused()


def test_colour_and_marks_of_tokens_say_what_the_update_did(
    config: RunConfig, browser: Browser, artefacts: Path
) -> None:
    trained = Archive(config.run.dir / "archive").read(UPDATES).trajectories[-1]
    with console_of(config) as url, opened(browser, url, artefacts) as seen:
        page = seen.page
        page.locator("#trajectories-older").click()
        expect(page.locator("#trajectories button.row")).to_have_count(25)
        page.locator("#trajectories-newest").click()
        expect(page.locator("#trajectories button.row")).to_have_count(13)
        page.locator("#trajectories button.row").nth(1).click()
        action = page.locator("#inspect .tokens.action .token")
        expect(action).to_have_count(len(trained.advantages))
        classes = [set((one.get_attribute("class") or "").split()) for one in action.all()]
        assert ["up" in found for found in classes] == [value >= 0 for value in trained.advantages]
        assert [at for at, found in enumerate(classes) if "masked" in found] == [0, 4]
        assert [at for at, found in enumerate(classes) if "stale" in found] == [0]
        expect(page.get_by_role("list", name="Legend")).to_contain_text("advantage")
        action.nth(2).hover()
        expect(page.locator("#token-facts")).to_contain_text(f"{trained.ratios[2]:.4f}")
        page.get_by_role("button", name="Close").click()
        expect(page.locator("#inspect")).to_be_hidden()


def test_it_fits_a_phone_in_every_state(config: RunConfig, browser: Browser, artefacts: Path) -> None:
    with console_of(config) as url, opened(browser, url, artefacts, PHONE) as seen:
        page = seen.page
        assert seen.overflow() <= 0
        seen.shoot("phone-start")
        weight(page, "style_cute", 0.5)
        page.get_by_role("button", name="Try it").tap()
        expect(page.locator("#apply")).to_be_visible()
        assert seen.overflow() <= 0
        seen.shoot("phone-dry-run")
        page.locator("#apply").tap()
        expect(page.locator("#preference-message")).to_contain_text("Version 3")
        page.get_by_role("button", name=re.compile("^Undo")).tap()
        expect(page.locator("#history-message")).to_contain_text("Version 4 repeats version 2")
        page.locator("#trajectories button.row").nth(2).tap()
        token = page.locator("#inspect .tokens.action .token").nth(3)
        token.tap()
        expect(page.locator("#token-facts")).to_contain_text("log-prob")
        assert seen.overflow() <= 0
        seen.shoot("phone-inspected")
        page.emulate_media(color_scheme="dark")
        seen.shoot("phone-dark")
        small = [one.bounding_box() for one in page.locator("main button:visible:not(.token)").all()]
        assert all(box is not None and box["height"] >= 39 for box in small), "too small for a finger"


class Hostile:
    """A tokenizer whose every token is markup."""

    vocab_size = TOKENIZER.vocab_size

    def encode(self, text: str) -> list[int]:
        return TOKENIZER.encode(text)

    def decode(self, token_ids: object) -> str:
        return XSS

    def token_id(self, token: str) -> int:
        return TOKENIZER.token_id(token)


def test_markup_in_a_trajectory_stays_text(config: RunConfig, browser: Browser, artefacts: Path) -> None:
    with console_of(config, tokenizer=Hostile()) as url:
        name = XSS[:64]
        put(url, TASK.preferences["cute"].model_copy(update={"name": name}))
        with opened(browser, url, artefacts) as seen:
            page = seen.page
            expect(page.locator("#preference-now")).to_contain_text(name)
            expect(page.locator("#history")).to_contain_text(name)
            expect(page.locator("#engines")).to_contain_text(XSS)
            expect(page.locator("#letters")).to_contain_text(XSS)
            page.locator("#letters button.row").click()
            expect(page.locator("#inspect-message")).to_contain_text(XSS)
            expect(page.locator("#inspect .token").nth(5)).to_have_text(XSS)
            page.locator("#inspect .token").nth(5).hover()
            expect(page.locator("#token-facts")).to_contain_text(json.dumps(XSS))
            page.get_by_text("What the task knows of it").click()
            expect(page.locator("#inspect pre")).to_contain_text("<img src=x")
            assert page.locator("img, main script").count() == 0
            assert page.evaluate("document.body.dataset.hacked") is None


def test_the_curve_goes_on_with_the_run_and_asks_only_for_what_is_new(
    config: RunConfig, browser: Browser, artefacts: Path
) -> None:
    with console_of(config) as url, opened(browser, url, artefacts) as seen:
        page = seen.page
        path = page.locator("#chart path.reward")
        before = path.get_attribute("d") or ""
        assert before.count("L") == 4 * UPDATES - 1
        expect(page.locator("#chart .switch")).to_have_count(1)
        expect(page.locator("#chart .switch-label")).to_have_text("v2 classical")
        asked: list[str] = []
        page.on("request", lambda request: asked.append(request.url) if "/v1/curves" in request.url else None)
        file = config.run.dir / "updates.jsonl"
        *_, (last, _) = read_rows(file)
        append_line(file, later(last, preference=3).model_dump_json().encode())
        look_again(page)
        expect(page.locator("#chart .switch")).to_have_count(2)
        assert (path.get_attribute("d") or "").count("L") == 4 * UPDATES + 3
        assert all(parse_qs(urlsplit(one).query)["after"] != ["0"] for one in asked)

        page.locator("#chart svg").focus()
        page.keyboard.press("Home")
        expect(page.locator("#chart-readout")).to_contain_text("trajectory 1, update 1: reward")
        page.keyboard.press("ArrowRight")
        expect(page.locator("#chart-readout")).to_contain_text("trajectory 2,")
        page.locator("#legend").get_by_role("button", name=re.compile("quality")).click()
        expect(page.locator("#chart path.component")).to_have_count(3)


def later(row: UpdateRow, *, preference: int) -> UpdateRow:
    """The next update, of new trajectories scored under another preference."""
    ones = [
        one.model_copy(update={"id": f"{one.id[:-1]}x", "scored_under": preference, "consumed_s": one.consumed_s + 2})
        for one in row.trajectories
    ]
    return row.model_copy(update={"update": row.update + 1, "trajectories": ones, "finished_s": row.finished_s + 2})


def test_the_token_is_asked_for_once_and_kept_in_the_tab(config: RunConfig, browser: Browser, artefacts: Path) -> None:
    auth = config.auth.model_copy(update={"token": SecretStr("s3cret")})
    guarded = config.model_copy(update={"auth": auth})
    with console_of(guarded) as url, visit(browser, f"{url}/console", artefacts) as seen:
        page = seen.page
        dialog = page.get_by_role("dialog")
        expect(dialog).to_be_visible()
        page.get_by_role("button", name="Not now").click()
        expect(page.locator("#connection")).to_contain_text("This run asks for its token")
        page.get_by_role("button", name="Enter the token").click()
        page.get_by_label("Token", exact=True).fill("wrong")
        page.keyboard.press("Enter")
        expect(dialog).to_contain_text("That token was refused")
        page.get_by_label("Token", exact=True).fill("s3cret")
        page.keyboard.press("Enter")
        expect(page.locator("#connection")).to_have_text("live")
        expect(dialog).to_be_hidden()
        page.reload()
        expect(page.locator("#connection")).to_have_text("live")
        expect(dialog).to_be_hidden()
        assert "s3cret" not in page.url
        assert (seen.errors, seen.elsewhere) == ([], [])


def test_a_lost_connection_says_since_when_and_comes_back(config: RunConfig, browser: Browser, artefacts: Path) -> None:
    with contextlib.ExitStack() as stack:
        with console_of(config) as url:
            seen = stack.enter_context(visit(browser, f"{url}/console", artefacts))
            expect(seen.page.locator("#connection")).to_have_text("live")
        connection = seen.page.locator("#connection")
        expect(connection).to_contain_text(re.compile(r"No answer since \d\d:\d\d:\d\d \(\d tr"))
        expect(seen.page.locator("#preference-now")).to_contain_text("classical")
        seen.shoot("desk-lost")
        with console_of(config):
            seen.page.get_by_role("button", name="Try now").click()
            expect(connection).to_have_text("live")


def test_without_history_dry_run_and_hold_it_says_so_and_still_switches(
    config: RunConfig, browser: Browser, artefacts: Path
) -> None:
    absent = ["/v1/preferences/history?*", "/v1/preferences:dry-run?*", "/v1/preferences/hold", "/v1/components"]
    with console_of(config) as url, opened(browser, url, artefacts, absent=absent) as seen:
        page = seen.page
        expect(page.locator("#hold")).to_be_hidden()
        expect(page.locator("#history-message")).to_contain_text("lists no history")
        expect(page.locator("#history li")).to_have_count(2)
        expect(page.locator("#components-note")).to_contain_text("names")
        weight(page, "style_cute", 0.5)
        page.get_by_role("button", name="Try it").click()
        expect(page.locator("#dry-run")).to_contain_text("cannot try a preference")
        page.locator("#apply").click()
        expect(page.locator("#preference-message")).to_contain_text("Version 3")


def test_a_hold_and_every_refusal_are_told_in_words(config: RunConfig, browser: Browser, artefacts: Path) -> None:
    with console_of(config) as url, opened(browser, url, artefacts) as seen:
        page = seen.page
        page.get_by_label("Your name").fill("Ana")
        page.get_by_label("Reason").fill("an experiment is going on")
        page.get_by_role("button", name="Hold changes").click()
        expect(page.locator("#hold-words")).to_contain_text("Changes are held by Ana")
        expect(page.locator("#hold-words")).to_contain_text("an experiment is going on")
        page.get_by_role("button", name="Let changes through").click()
        expect(page.locator("#hold-words")).to_have_text("Changes are open.")
        refusals = {
            423: ({}, "changes are held by Bo", "“Let changes through” is in the history."),
            429: ({"Retry-After": "7"}, "at most 3 switches a minute", "Try again in 7 s."),
            503: ({"Retry-After": "1"}, "the store does not answer", "Try again in 1 s."),
        }
        for status, (headers, detail, advice) in refusals.items():
            body = json.dumps({"title": "No", "status": status, "detail": detail})
            page.route("**/v1/preferences?*", answering(status, headers, body))
            page.get_by_label("Reason").fill("because")
            weight(page, "style_cute", 0.5 if status == 423 else 0.45 if status == 429 else 0.4)
            page.get_by_role("button", name="Try it").click()
            page.locator("#apply").click()
            expect(page.locator("#preference-message")).to_have_text(f"{detail}. {advice}")
            page.unroute("**/v1/preferences?*")
        assert current(config).version == 2
