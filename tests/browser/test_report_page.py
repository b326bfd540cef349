"""The report in a browser; after each test it must have no script error and no network request."""

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from megadapo.observe.metrics.records import MetricsLog
from megadapo.observe.report.page import write_report
from megadapo.observe.rollouts.files import (
    HELD_OUT_FOLDER,
    rollouts_path,
    step_file,
    write_rollouts,
)
from megadapo.observe.rollouts.saved_group import SavedGroup
from megadapo.observe.tables import TextTable
from tests.support.processes.chromium import Page
from tests.support.rollout.saved_groups import (
    CONTROL,
    CONTROL_MARK,
    awkward_group,
    saved_episode,
    saved_group,
)
from tests.support.runs.demo_run import HOSTILE, demo_run
from tests.support.runs.recorded_runs import forget

pytestmark = pytest.mark.browser

ITEMS = "#responses .group-item"
BODIES = "#responses .response-text"


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = demo_run(tmp_path_factory.mktemp("runs") / "demo")
    return write_report([folder], folder / "report.html")


@pytest.fixture
def show(browser: Page, tmp_path: Path) -> Iterator[Callable[..., Page]]:
    def opened(*runs: Path, **how: Any) -> Page:
        browser.open(write_report(runs, tmp_path / "report.html", **how))
        return browser

    yield opened
    assert_quiet(browser)


@pytest.fixture
def page(browser: Page, report: Path) -> Iterator[Page]:
    browser.open(report)
    browser.wait(f"document.querySelectorAll('{BODIES}').length > 0")
    yield browser
    assert_quiet(browser)


def assert_quiet(page: Page) -> None:
    errors, requests = page.errors[:], page.requests[:]
    page.errors.clear()
    page.requests.clear()
    assert not errors
    assert {url.split("#")[0].rsplit(".", 1)[-1] for url in requests} == {"html"}, requests
    assert all(url.startswith("file://") for url in requests), requests


def wait_for_list(page: Page, *orders: int) -> None:
    wanted = ",".join(f"#{order}" for order in orders)
    found = f"[...document.querySelectorAll('{ITEMS} .item-head .muted')]"
    page.wait(f"{found}.map((node) => node.innerText).join() === '{wanted}'")


def wait_for_bodies(page: Page, *texts: str) -> None:
    page.wait(
        f"[...document.querySelectorAll('{BODIES}')].map((n) => n.textContent).join('|') === "
        f"{'|'.join(texts)!r}"
    )


def colours(page: Page, response: int) -> list[str]:
    tokens = f"document.querySelectorAll('{BODIES}')[{response}].querySelectorAll('.token')"
    return page.js(f"[...{tokens}].map((token) => token.style.backgroundColor)")


def test_every_curve_is_drawn_and_shows_its_values(page):
    assert page.js("document.querySelectorAll('#curves .panel canvas').length") >= 19
    assert page.js("document.querySelectorAll('#distributions canvas').length") == 2
    page.move("#curves .u-over")
    page.wait("document.querySelector('#curves .chart-tip').innerText.includes('training')")
    assert "step 3" in page.text("#curves .chart-tip")
    page.move("#time .u-over", x=0.99)
    page.wait("document.querySelector('#time .chart-tip').innerText.includes('rollout')")
    assert "0.5 s" in page.text("#time .chart-tip")


@pytest.mark.parametrize("panel", [1, 4])
@pytest.mark.parametrize("x", [0.01, 0.33, 0.66, 0.99])
def test_tooltip_stays_in_the_window(page, panel, x):
    chart = f"#curves .panel:nth-child({panel})"
    page.move(f"{chart} .u-over", x=x)
    tip = f"document.querySelector('{chart} .chart-tip')"
    page.wait(f"!{tip}.hidden")
    left, right = page.js(f"(({{ left, right }}) => [left, right])({tip}.getBoundingClientRect())")
    assert left >= 0 and right <= 1280


def test_drag_zooms_every_chart(page):
    page.drag("#curves .u-over", 0.4, 0.9)
    for index in (0, 5):
        plot = f"document.querySelectorAll('#curves .plot')[{index}].plot"
        page.wait(f"{plot}.scales.x.min > 1 && {plot}.scales.x.max < 6")


def bands(page: Page) -> dict[str, int]:
    return page.js(
        "Object.fromEntries([...document.querySelectorAll('#curves .panel')].map((panel) => "
        "[panel.querySelector('h4').innerText, panel.querySelector('.plot').plot.bands.length])"
        ".filter(([, count]) => count))"
    )


def test_the_tail_is_a_band_for_each_run_that_measured_it(show, tmp_path):
    runs = [demo_run(tmp_path / "one"), demo_run(tmp_path / "two"), demo_run(tmp_path / "old")]
    forget(runs[2], "response_length/p50", "response_length/max", "time/group_", "rollout/")
    page = show(*runs)
    assert bands(page) == {
        "Accuracy": 3,
        "Response length": 2,
        "Tokens": 3,
        "Time of a group": 2,
    }
    assert "not trained on" in page.text("#curves")
    show(runs[2])
    assert bands(page) == {"Accuracy": 1, "Tokens": 1}
    assert "Long tail" not in page.text("#curves")


def test_panels_appear_where_a_run_has_values(show, tmp_path):
    with_critic, without = demo_run(tmp_path / "one"), demo_run(tmp_path / "two")
    forget(without, "critic/", "bapo/")
    page = show(without)
    titles = page.texts("#curves h4")
    assert "Pretraining loss" in titles
    assert not {"Explained variance", "BAPO's bounds"} & set(titles)
    page = show(without, with_critic)
    assert {"Explained variance", "BAPO's bounds"} <= set(page.texts("#curves h4"))
    hint = "[...document.querySelectorAll('#curves h4')].find((n) => n.innerText === 'Ratio')"
    assert page.js(f"{hint}.parentNode.title").startswith("policy/ratio_mean: Mean ratio")


def test_tables_come_first_as_plain_text_and_only_where_there_are_any(show, tmp_path):
    run = demo_run(tmp_path / "one")
    table = TextTable(
        title="Rows", note="a note", head=["row", "x"], rows=[["first", "1"], [HOSTILE, "2"]]
    )
    page = show(run, tables=[table])
    assert page.texts("#tables tbody th")[0] == "first"
    shown = page.js("document.querySelectorAll('#tables tbody th')[1].textContent")
    assert shown == HOSTILE
    assert page.js("document.querySelector('main > section').id") == "tables"
    assert show(run).js("document.getElementById('tables')") is None


def test_length_against_accuracy_has_a_point_for_each_step(show, tmp_path):
    page = show(demo_run(tmp_path / "one"), demo_run(tmp_path / "two", num_steps=4))
    title = "node.innerText === 'Length'"
    panel = f"[...document.querySelectorAll('#curves h4')].find((node) => {title})"
    counts = page.js(
        f"{panel}.closest('.panel').querySelector('.plot').plot.data"
        ".map((column) => column.filter((value) => value !== null).length)"
    )
    assert counts == [10, 6, 4]


def test_filters_by_what_responses_are(page):
    wait_for_list(page, 1, 2, 3, 4, 5, 6)
    page.choose("[name=correct]", "no")
    wait_for_list(page, 1, 3, 4, 5, 6)
    page.click("[name=truncated]")
    wait_for_list(page, 4)
    wait_for_bodies(page, "never ends")
    page.click("[name=others]")
    wait_for_bodies(page, "7", "never ends")
    page.click("[name=others]")
    page.click("[name=truncated]")
    page.click("[name=disagreed]")
    wait_for_list(page, 5)
    wait_for_bodies(page, "no")
    page.click("#responses .filters > button")
    wait_for_list(page, 1, 2, 3, 4, 5, 6)


def test_filters_by_step_disposition_prompt_and_text(page):
    page.choose("[name=step]", "2")
    wait_for_list(page, 3, 4, 5)
    page.click("[title='next step']")
    wait_for_list(page, 6)
    page.choose("[name=step]", "")
    page.choose("[name=disposition]", "all_correct")
    wait_for_list(page, 2)
    page.choose("[name=disposition]", "")
    page.type("[name=prompt]", "id-4")
    wait_for_list(page, 4)
    page.click("#responses .filters > button")
    page.type("[name=text]", "NEEDLE")
    wait_for_list(page, 3)
    page.click("[data-mode=text]")
    page.wait("document.querySelector('#responses mark')?.innerText === 'needle'")
    page.type("[name=text]", " is not there")
    page.wait("document.querySelector('#responses .group').innerText.includes('No response')")


def test_a_click_on_a_distribution_opens_its_step(page):
    page.drag("#distributions .u-over", 0.05, 0.95)
    wait_for_list(page, 1, 2, 3, 4, 5, 6)
    page.click("#distributions .panel:nth-child(2) .u-over")
    wait_for_list(page, 6)
    assert page.js("document.querySelector('[name=step]').value") == "3"


def test_groups_are_opened_by_click_and_by_the_arrows(page):
    page.click(f"{ITEMS}:nth-child(3)")
    wait_for_bodies(page, "needle in hay", "hay")
    page.click("[title='next group']")
    wait_for_bodies(page, "7", "never ends")
    assert page.js(f"document.querySelector('{ITEMS}[aria-selected=true]').dataset.group") == "3"


def test_colours_say_ratio_clip_and_version(page):
    page.click("[data-mode=ratio]")
    page.wait(f"document.querySelectorAll('{BODIES} .token').length === 14")
    ratio = colours(page, 0)
    assert "--ratio-high" in ratio[0] and "--ratio-low" in ratio[1] and ratio[3:] == [""] * 4
    assert "--ratio-high" in ratio[2] and ratio[2] != ratio[0]
    page.click("[data-mode=clip]")
    page.wait("document.querySelector('[data-mode=clip]').ariaPressed === 'true'")
    right, wrong = colours(page, 0), colours(page, 1)
    # the objective clips high only where the advantage is positive, low only where negative
    assert ["clip-high" in right[0], right[1:]] == [True, [""] * 6]
    assert [wrong[0], "clip-low" in wrong[1], wrong[2:]] == ["", True, [""] * 5]
    page.click(f"{ITEMS}:nth-child(6)")
    wait_for_bodies(page, "late", "fresh")
    page.click("[data-mode=version]")
    page.wait("document.querySelector('.mode-bar').innerText.includes('version 2')")
    assert set(colours(page, 0)) != set(colours(page, 1))


@pytest.mark.parametrize("changed", [{"ratio": "sequence"}, {"gate": "none"}])
def test_an_objective_without_a_clip_of_tokens_has_no_colours_for_it(show, tmp_path, changed):
    """GSPO's bounds of a sequence's ratio would mark nearly all tokens as clipped."""
    folder = demo_run(tmp_path / "run")
    objective = {"ratio": "token", "gate": "clip", **changed}
    (folder / "config.json").write_text(json.dumps({"algorithm": {"objective": objective}}))
    page = show(folder)
    page.wait(f"document.querySelectorAll('{BODIES} .token').length === 14")
    assert len(page.texts("[data-mode]")) == 4
    page.move(f"{BODIES} .token")
    page.wait("!document.getElementById('token-card').hidden")
    lines = page.text("#token-card").split("\n")
    assert "ratio" in lines and "clip" not in lines


def test_a_token_explains_itself(page):
    page.click("[data-mode=ratio]")
    page.wait(f"document.querySelectorAll('{BODIES} .token').length === 14")
    page.move(f"{BODIES} .token")
    page.wait("!document.getElementById('token-card').hidden")
    lines = page.text("#token-card").split("\n")
    assert lines[:2] == ['"u"', "token 1 of 7, id 117"]
    assert lines[lines.index("ratio") + 1] == "1.5"
    assert lines[lines.index("log-prob, engine") + 1] == "-0.5"
    assert lines[lines.index("clip") + 1] == "high"
    assert lines[lines.index("advantage") + 1] == "1"


def test_a_long_response_is_shown_in_pieces(show, tmp_path):
    page = show(demo_run(tmp_path / "long", long_tokens=1500))
    page.choose("[name=step]", "3")
    wait_for_list(page, 6)
    tokens = f"document.querySelector('{BODIES}').querySelectorAll('.token').length"
    page.wait(f"{tokens} === 1200")
    assert page.text(f"{BODIES} .more") == "Show 300 more tokens"
    page.click(f"{BODIES} .more")
    page.wait(f"{tokens} === 1500")


def test_what_a_model_wrote_runs_nothing(page):
    page.choose("[name=step]", "2")
    wait_for_list(page, 3, 4, 5)
    page.click(f"{ITEMS}:nth-child(3)")
    # what arrives late moves the buttons from under the mouse
    page.wait(f"document.querySelector('{BODIES}').textContent === {json.dumps(HOSTILE)}")
    for mode in ("text", "ratio", "probability"):
        page.click(f"[data-mode={mode}]")
        page.wait(f"document.querySelector('[data-mode={mode}]').ariaPressed === 'true'")
        assert page.js(f"document.querySelector('{BODIES}').textContent") == HOSTILE
    assert page.text(".message-text").replace("\n", "\u2028") == HOSTILE
    assert page.js("document.images.length + document.querySelectorAll('script').length") == 4


PARTS = f"{BODIES} .turn"


def with_episodes(folder: Path, *groups: SavedGroup) -> Path:
    with MetricsLog(folder) as log:
        log.record({"step": 1, "policy_version": 1, "environment/Game/return": 1.5})
    write_rollouts(rollouts_path(folder, 1), groups)
    return folder


def heads(page: Page) -> list[str]:
    found = f"[...document.querySelectorAll('{PARTS} .turn-head')]"
    return page.js(
        f"{found}.map((node) => [...node.children].map((n) => n.textContent).join(': '))"
    )


def test_an_episode_is_a_conversation(show, tmp_path):
    """Catches parts with other tokens, rewards or seconds than their own, in every colouring."""
    game = saved_episode(
        (f"is it 3?{CONTROL_MARK}", f"user lower{CONTROL_MARK}", 0.0),
        (f"2{CONTROL_MARK}", "", 1.5),
    )
    tool = saved_episode(("1+1=", "[2]", 0.0), last="two", environment=None)
    group = saved_group(game, tool, control_tokens={CONTROL: "<|im_end|>"})
    page = show(with_episodes(tmp_path / "run", group))
    for mode in ("text", "ratio", "clip", "probability", "version"):
        page.wait(f"document.querySelectorAll('{PARTS}').length === 7")
        page.click(f"[data-mode={mode}]")
        page.wait(f"document.querySelector('[data-mode={mode}]').ariaPressed === 'true'")
        assert heads(page) == [
            "turn 1: 9 tokens",
            "Game: 11 tokens, reward 0, 0.25 s",
            "turn 2: 2 tokens",
            "Game: 0 tokens, reward +1.5, 0.25 s",
            "turn 1: 4 tokens",
            "tool: 3 tokens",
            "turn 2: 3 tokens",
        ]
        texts = page.js(
            f"[...document.querySelectorAll('{PARTS} .turn-text')].map((n) => n.textContent)"
        )
        assert texts == ["is it 3?", "user lower", "2", "", "1+1=", "[2]", "two"]
        controls = page.js(
            f"[...document.querySelectorAll('{BODIES} .control')]"
            ".map((n) => getComputedStyle(n, '::before').content)"
        )
        assert controls == ['"<|im_end|>"'] * 3
    assert page.js(f"document.querySelectorAll('{BODIES} .answer').length") == 3
    assert "model 11, Game 11" in page.text("#responses")
    assert "not sampled" in page.text(".mode-bar")
    page.click("[data-mode=text]")
    page.type("[name=text]", "LOWER")
    page.wait("document.querySelector('#responses .answer mark')?.innerText === 'lower'")


def test_a_token_of_an_episode_explains_itself(show, tmp_path):
    """Catches numbers of tokens that count from the beginning of a turn."""
    game = saved_episode((f"a{CONTROL_MARK}", "user b", 1.0), last="c")
    page = show(with_episodes(tmp_path / "run", saved_group(game, control_tokens={CONTROL: "<e>"})))
    page.wait(f"document.querySelectorAll('{PARTS} .token').length === 9")
    page.move(f"{BODIES} .control")
    page.wait("!document.getElementById('token-card').hidden")
    lines = page.text("#token-card").split("\n")
    assert lines[:2] == ["<e>", "token 2 of 9, id 1000"]
    page.move(f"{PARTS}:last-child .token")
    page.wait("document.getElementById('token-card').innerText.includes('token 9 of 9')")


def test_a_long_episode_is_shown_in_pieces(show, tmp_path):
    """Catches turns of the rest that are lost, and parts without any of the first tokens."""
    episode = saved_episode(("a" * 700, "b" * 700, 0.0), ("c" * 50, "d" * 50, 1.0))
    page = show(with_episodes(tmp_path / "run", saved_group(episode)))
    tokens = f"document.querySelectorAll('{PARTS} .token').length"
    page.wait(f"{tokens} === 1200")
    assert len(heads(page)) == 2
    page.click(f"{BODIES} .more")
    page.wait(f"{tokens} === 1500")
    assert [one.split(":")[0] for one in heads(page)] == ["turn 1", "Game", "turn 2", "Game"]


def test_what_an_environment_wrote_runs_nothing(show, tmp_path):
    """Its text, its name and the names of control tokens are hostile."""
    episode = saved_episode((HOSTILE + CONTROL_MARK, HOSTILE, 0.0), environment=HOSTILE)
    group = saved_group(episode, control_tokens={CONTROL: HOSTILE})
    page = show(with_episodes(tmp_path / "run", group))
    for mode in ("text", "ratio", "version"):
        page.wait(f"document.querySelectorAll('{PARTS}').length === 2")
        page.click(f"[data-mode={mode}]")
        page.wait(f"document.querySelector('[data-mode={mode}]').ariaPressed === 'true'")
        texts = page.js(
            f"[...document.querySelectorAll('{PARTS} .turn-text')].map((n) => n.textContent)"
        )
        assert texts == [HOSTILE, HOSTILE]
        assert heads(page)[1].startswith(HOSTILE)
    assert page.js("document.images.length + document.querySelectorAll('script').length") == 4


def test_policy_stops_an_injected_script(browser, report):
    """The text escapes and the policy are two walls: here the first one is taken down."""
    browser.open(report)
    browser.js("document.body.insertAdjacentHTML('beforeend', '<img src=x onerror=broken()>')")
    browser.js(
        "document.body.append(Object.assign(document.createElement('script'), {text: 'x=1'}))"
    )
    browser.wait("typeof x === 'undefined'")
    blocked = [error for error in browser.errors if "Content Security Policy" in error]
    assert blocked and len(blocked) == len(browser.errors)
    browser.errors.clear()
    browser.requests.clear()


def test_theme_follows_the_system_until_it_is_chosen(page):
    background = "getComputedStyle(document.body).backgroundColor"
    page.prefer("dark")
    dark = page.js(background)
    page.prefer("light")
    light = page.js(background)
    assert light != dark
    page.click("#theme")
    page.prefer("dark")
    assert (page.text("#theme"), page.js(background)) == ("Theme: light", light)
    page.click("#theme")
    page.prefer("light")
    assert (page.text("#theme"), page.js(background)) == ("Theme: dark", dark)


def test_several_runs_share_axes_and_can_be_hidden(show, tmp_path):
    runs = [demo_run(tmp_path / "one"), demo_run(tmp_path / "two", num_steps=9)]
    (tmp_path / "two" / "rollouts" / "step-1.jsonl.zst").unlink()
    page = show(*runs)
    first = "document.querySelector('#curves .plot').plot"
    assert page.js(f"{first}.series.length") == 9
    assert page.js(f"{first}.scales.x.max") == 9
    wait_for_list(page, 1, 2, 3, 4, 5, 6, 3, 4, 5, 6)
    assert page.texts(".comparison tr:nth-child(2) td")[0] == "16.0 \u2192 16.0"
    assert ["run.num_steps", "6", "9"] in [row.split("\t") for row in page.texts(".config tr")]
    page.click(".run-toggle:nth-child(1)")
    page.wait(f"{first}.series.length === 5")
    wait_for_list(page, 3, 4, 5, 6)


def test_warnings_are_shown_at_the_head_of_their_run(show, tmp_path):
    healthy, collapsed = demo_run(tmp_path / "one"), demo_run(tmp_path / "two")
    for folder in (healthy, collapsed):
        forget(folder, "groups/")
    with MetricsLog(collapsed) as log:
        counts = {"groups/sampled": 1000, "groups/one_text_wrong": 999}
        log.record({"step": 99, **counts, f"reward/{HOSTILE}/failed": 1.0})
    for runs in ([collapsed], [healthy, collapsed]):
        page = show(*runs)
        first, second = page.texts(".warning")
        assert "have one text" in first and second.startswith("reward/</script><img")
    assert page.texts(".run-list > *")[1].startswith("two")


def test_run_without_responses_says_so(show, tmp_path):
    folder = demo_run(tmp_path / "bare")
    for path in (folder / "rollouts").iterdir():
        path.unlink()
    page = show(folder)
    assert "saved no responses" in page.text("#responses")
    assert "saved no responses" in page.text("#distributions")


def test_odd_groups_and_a_single_step_are_shown(show, tmp_path):
    """No token at all, lost log-probs, half a character, metrics that are not numbers."""
    with MetricsLog(tmp_path / "odd") as log:
        log.record({"step": 1, "policy_version": 1, "policy/loss": math.nan, "accuracy/mean": 0.5})
    folder = tmp_path / "odd"
    write_rollouts(rollouts_path(folder, 4), [awkward_group()])
    held_out = saved_group(step=5, disposition="held_out")
    write_rollouts(step_file(folder / HELD_OUT_FOLDER, 5), [held_out])
    page = show(folder)
    assert page.text("#responses .note").startswith("All 1 saved group.")
    for mode in ("text", "ratio", "clip", "probability", "version"):
        page.wait(f"document.querySelectorAll('{BODIES}').length === 3")
        page.click(f"[data-mode={mode}]")
    assert "1 value not finite" in page.text("#curves")
    parts = [fact for fact in page.texts(".response-facts dt") if "judge" in fact.lower()]
    assert [part.lower() for part in parts] == ["judge", "judge/<b>"]
    page.click("[data-mode=ratio]")
    page.move(f"{BODIES} .token")
    page.wait("!document.getElementById('token-card').hidden")
    lines = page.text("#token-card").split("\n")
    assert lines[lines.index("score of step 1 of 2") + 1] == "0.1"


def test_panels_of_zeros_are_named_and_noisy_lines_are_pale_below_their_mean(show, tmp_path):
    """Catches a hidden NaN, and a mean that leans, replaces values or rounds a steady line."""
    with MetricsLog(tmp_path / "run") as log:
        for step in range(1, 41):
            values = {"rollout/preemptions": int(step == 40), "policy/loss": math.nan}
            values |= {"policy/grad_norm": step + 3 * (-1) ** step, "policy/lr": min(step, 9) / 9}
            log.record(values | {"step": step, "accuracy/mean": 0.0})
    page = show(tmp_path / "run")
    assert page.texts("#curves h4") == ["Loss", "Gradient norm", "Learning rate", "Preemptions"]
    assert page.text("#curves > :last-child").startswith("Hidden, as every value is 0: Accuracy.")
    charts = "[...document.querySelectorAll('#curves .plot')].map(({ plot }) => plot.data)"
    _, (_, norm, mean), (_, *rate), _ = page.js(charts)
    assert len(rate) == 1 and norm[:2] == [-2, 5] and [mean[0], mean[-1]] == [-2, 43]
    assert all(abs(mean[step - 1] - step) < 0.7 for step in range(3, 38))


@pytest.mark.parametrize(
    ("width", "scheme"), [(1280, "light"), (2000, "light"), (390, "light"), (390, "dark")]
)
def test_nothing_is_cut_off_or_wider_than_the_window(browser, tmp_path, width, scheme):
    """A phone cut off the oracles, below all facts; long names and cells must not widen a page."""
    run = demo_run(tmp_path / ("long" * 40))
    (run / "config.json").write_text(json.dumps({"model": {"path": "p" * 300, "k" * 90: "v" * 90}}))
    table = TextTable(title="t" * 90, note="n" * 90, head=["row", "x"], rows=[["r" * 90, "1" * 90]])
    browser.resize(width, 844)
    browser.prefer(scheme)
    browser.open(write_report([run], tmp_path / "report.html", tables=[table]))
    browser.wait(f"document.querySelectorAll('{BODIES}').length > 0")
    browser.click("#overview summary")
    assert browser.js("document.scrollingElement.scrollWidth <= innerWidth")
    assert browser.texts("#overview h3")[0] == "Oracles"
    parts = "[...document.querySelectorAll('.oracles :is(td, th, .chip)')]"
    right = f"Math.max(...{parts}.map((node) => node.getBoundingClientRect().right))"
    box = "document.querySelector('.oracles').parentNode.getBoundingClientRect()"
    assert browser.js(f"{right} <= {box}.right")
    inside = "(node) => node.closest('.scroll, .card').clientWidth < innerWidth"
    assert browser.js(f"[...document.querySelectorAll('table')].every({inside})")
    browser.resize(1280, 900)
    browser.prefer("light")
    assert_quiet(browser)
