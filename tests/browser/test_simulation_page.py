"""The page of a sweep as a person uses it: by keyboard, by mouse, on a phone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from typer.testing import CliRunner

from headway.cli import app
from tests.browser.conftest import Browser

pytestmark = pytest.mark.slow

PICTURES = ("throughput", "lag", "max-lag", "lanes", "lags", "lengths", "steps")
SWEEP = (
    *("--lanes", "8", "--batch-size", "8", "--steps", "20", "--train-time", "0.5", "--run-ahead", "1"),
    *("--sweep", "run_ahead=0..3", "--sweep", "order=finished,started", "--sweep", "seed=1,2,3,4,5"),
)


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "sweep.html"
    result = CliRunner().invoke(app, ["simulate", *SWEEP, "--page", str(path)])
    assert result.exit_code == 0, result.output
    return path


@pytest.fixture
def opened(browser: Browser, page: Path) -> Browser:
    browser.driver.get("about:blank")
    browser.complaints()
    browser.requests()
    browser.open(page)
    browser.settle()
    return browser


def drawn(browser: Browser, picture: str) -> list[list[Any]]:
    """The numbers of a picture as Plotly has them."""
    of_trace = "trace => [trace.name, trace.x, trace.y, trace.base, trace.marker && trace.marker.color]"
    return browser.run(f"document.getElementById(arguments[0]).data.map({of_trace})", picture)


def says(browser: Browser) -> str:
    return browser.driver.find_element(By.ID, "says").text


def slider(browser: Browser):
    return browser.driver.find_element(By.CSS_SELECTOR, "input[type=range]")


def test_the_page_opens_without_a_complaint_and_asks_nothing_of_the_network(opened, page):
    assert [bool(drawn(opened, picture)) for picture in PICTURES] == [True] * len(PICTURES)
    assert opened.requests() == [page.absolute().as_uri()]
    assert opened.complaints() == []


def test_it_opens_on_the_run_that_the_settings_ask_for(opened):
    assert says(opened).startswith("At run_ahead 1, order finished, seed 1 the lanes are busy ")
    assert slider(opened).get_attribute("aria-valuetext") == "1"


def test_an_arrow_key_on_the_slider_changes_every_picture(opened):
    before = {picture: drawn(opened, picture) for picture in PICTURES}
    slider(opened).send_keys(Keys.ARROW_LEFT)
    opened.settle()
    assert "which all else is compared with; trained rollouts lag 0.0 versions on average" in says(opened)
    assert [picture for picture in PICTURES if drawn(opened, picture) == before[picture]] == []
    assert slider(opened).get_attribute("aria-valuetext") == "0"
    shares = next(y for name, _, y, _, _ in drawn(opened, "lags") if name == "up to run_ahead")
    assert shares[0] == 1.0
    assert opened.complaints() == []


def test_what_is_shown_is_what_the_table_says_of_the_marked_row(opened):
    slider(opened).send_keys(Keys.END)
    opened.settle()
    row = opened.driver.find_elements(By.CSS_SELECTOR, "tr[aria-current=true] td")
    tiles = [tile.text for tile in opened.driver.find_elements(By.CSS_SELECTOR, ".tile b")]
    assert [cell.text for cell in row] == ["3", "finished", "1", *tiles]


def test_a_radio_button_and_a_list_choose_by_keyboard_too(opened):
    slider(opened).send_keys(Keys.TAB)
    focused = opened.driver.switch_to.active_element
    assert focused.get_attribute("type") == "radio"
    focused.send_keys(Keys.ARROW_RIGHT)
    opened.settle()
    assert says(opened).startswith("At run_ahead 1, order started, seed 1 ")
    assert "never more than 1 (order started" in says(opened)


def test_the_fifth_value_is_reached_with_the_last_key(opened):
    seeds = opened.driver.find_elements(By.CSS_SELECTOR, "input[type=range]")[-1]
    seeds.send_keys(Keys.END)
    opened.settle()
    assert "seed 5 the lanes" in says(opened)


def test_a_choice_is_in_the_address_and_comes_back_with_it(opened, page):
    slider(opened).send_keys(Keys.ARROW_RIGHT)
    opened.settle()
    address = opened.driver.current_url
    assert address.endswith("#run_ahead=2&order=finished&seed=1")
    opened.driver.get("about:blank")
    opened.driver.get(address)
    opened.settle()
    assert says(opened).startswith("At run_ahead 2, order finished, seed 1 ")


def test_lanes_that_were_dragged_stay_there_under_another_choice(opened):
    lanes = opened.driver.find_element(By.ID, "lanes")
    opened.driver.execute_script("arguments[0].scrollIntoView({block: 'center'})", lanes)
    ActionChains(opened.driver).drag_and_drop_by_offset(lanes, -200, 0).perform()
    opened.settle()
    view = "document.getElementById('lanes').layout.xaxis.range"
    dragged = opened.run(view)
    assert dragged[0] > 0
    slider(opened).send_keys(Keys.ARROW_RIGHT)
    opened.settle()
    assert opened.run(view) == dragged


@pytest.mark.parametrize("width", [360, 800, 1400])
def test_nothing_is_wider_than_the_screen(opened, width):
    metrics = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": width < 500}
    opened.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    try:
        opened.driver.refresh()
        opened.settle()
        assert opened.run("document.documentElement.scrollWidth") <= width
        widths = opened.run("[...document.querySelectorAll('.plot')].map(plot => plot._fullLayout.width)")
        assert all(250 < each <= width for each in widths)
    finally:
        opened.driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_every_control_has_a_name_that_a_screen_reader_says(opened):
    names = opened.run(
        "[...document.querySelectorAll('[data-control]')].map(input => [...input.labels].map(l => l.innerText).join())"
    )
    assert names == ["run_ahead", "finished", "started", "seed"]
    assert opened.driver.find_element(By.TAG_NAME, "legend").text == "order"
    assert opened.driver.find_element(By.ID, "says").get_attribute("aria-live") == "polite"
