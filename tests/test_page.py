"""The status page in a real headless browser, against a real service."""

import contextlib
import json
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from needs import needs_program
from running_program import RunningProgram, free_port

webdriver = pytest.importorskip("selenium.webdriver", reason="needs the Python package selenium")
WAIT_SECONDS = 60.0
SIZES = {"desktop": (1600, 1000), "phone": (400, 800)}
Rgb = tuple[int, int, int]


@dataclass
class Page:
    """The page of a service in a browser."""

    driver: Any
    program: RunningProgram
    url: str

    def open(self) -> None:
        self.driver.get(self.url)

    def text(self, id: str) -> str:
        return str(self.driver.find_element("id", id).text)

    def run(self, script: str, *arguments: object) -> Any:
        return self.driver.execute_script(script, *arguments)

    def wait(self, is_so: Callable[[], bool]) -> None:
        deadline = time.monotonic() + WAIT_SECONDS
        while not is_so():
            assert time.monotonic() < deadline, self.driver.find_element("tag name", "main").text
            time.sleep(0.1)

    def show_as(self, size: str, scheme: str) -> None:
        """Width of the window, and light or dark."""
        width, height = SIZES[size]
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})

    def keys(self, *names: str) -> None:
        """Press keys, wherever the focus is."""
        keys = webdriver.Keys
        webdriver.ActionChains(self.driver).send_keys(*(getattr(keys, n) for n in names)).perform()

    def fill(self, id: str, text: str) -> None:
        """Write into a field in place of what stands there."""
        field = self.driver.find_element("id", id)
        field.clear()
        field.send_keys(text)

    def complaints(self) -> list[str]:
        """What stands on the browser's console."""
        return [entry["message"] for entry in self.driver.get_log("browser")]

    def status(self) -> Any:
        with urllib.request.urlopen(f"{self.url}status.json", timeout=10) as answer:
            return json.load(answer)


@pytest.fixture(scope="module")
def driver() -> Iterator[Any]:
    browser = needs_program("chromium", package="chromium")
    server = needs_program("chromedriver", package="chromium-driver")
    options = webdriver.ChromeOptions()
    options.binary_location = browser
    for flag in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    made = webdriver.Chrome(options=options, service=webdriver.ChromeService(server))
    yield made
    made.quit()


@contextlib.contextmanager
def served(driver: Any, *flags: str) -> Iterator[Page]:
    port = free_port()
    with RunningProgram("--port", str(port), "--metrics-port", "0", *flags) as program:
        program.wait_for("ready: ")
        driver.get("about:blank")
        driver.get_log("browser")
        yield Page(driver, program, f"http://127.0.0.1:{port}/")


@pytest.fixture(scope="module")
def page(driver: Any) -> Iterator[Page]:
    with served(driver, "--pool", "40%") as made:
        yield made


@pytest.fixture
def opened(page: Page) -> Page:
    open_ready(page)
    return page


def open_ready(page: Page) -> None:
    page.show_as("desktop", "light")
    page.open()
    page.wait(lambda: page.text("state") == "ready")
    # an answer that is drawn may end early by chance; without moving the focus
    page.run("document.getElementById('temperature').value = '0'")


def cell_colours(page: Page) -> list[list[Rgb]]:
    """The colour in the middle of each cell of the heat map, as it is painted."""
    found = page.run(
        """
        const canvas = document.getElementById("heat");
        const [rows, columns] = arguments;
        const context = canvas.getContext("2d");
        const wide = (canvas.width - 30) / columns;
        const tall = (canvas.height - 4 - 16) / rows;
        return Array.from({length: rows}, (_, row) => Array.from({length: columns}, (_, column) =>
            [...context.getImageData(30 + (column + 0.4) * wide, 4 + (row + 0.4) * tall, 1, 1).data]
        ));
        """,
        *(len(page.status()["experts"]["layers"]), page.status()["model"]["n_experts"]),
    )
    return [[(r, g, b) for r, g, b, _ in row] for row in found]


def test_a_prompt_is_answered_and_the_figures_follow(opened: Page) -> None:
    page = opened
    assert "tokens/s" in page.driver.find_element("class name", "figures").text
    page.fill("max-tokens", "30")
    page.driver.find_element("id", "send").click()
    page.wait(lambda: "30 tokens, " in page.text("answer-figures"))
    assert page.text("answer").startswith("In the beginning")
    assert len(page.text("answer")) > len("In the beginning") + 30
    for unit in ("tokens/s", "hit rate", "MiB/token"):
        assert unit in page.text("answer-figures")
    page.wait(lambda: float(page.text("speed")) > 0 and "–" not in page.text("time-legend"))
    assert 0 < float(page.text("hits")) < 100
    assert page.complaints() == []


def test_the_heat_map_shows_what_is_resident(opened: Page) -> None:
    page = opened
    page.driver.find_element("id", "send").click()
    page.wait(lambda: " tokens, " in page.text("answer-figures"))

    def is_settled() -> bool:  # a status may be of a moment before
        found = page.status()
        return not found["requests"]["list"] and "l" not in "".join(found["experts"]["states"])

    page.wait(is_settled)
    states = page.status()["experts"]["states"]
    n_resident = "".join(states).count("r")
    page.wait(lambda: f"{n_resident} of 128 resident, 0 loading" in page.text("experts-summary"))

    def blueness(letter: str) -> list[int]:
        return [
            colour[2] - colour[0]
            for row, text in zip(cell_colours(page), states, strict=True)
            for colour, found in zip(row, text, strict=True)
            if found == letter
        ]

    assert len(blueness("r")) == n_resident > 20
    # blue and grey, however few or many tokens used it
    page.wait(lambda: min(blueness("r")) > 30 >= max(blueness(".")))
    assert len({colour for row in cell_colours(page) for colour in row}) > 8  # uses show


def test_by_keyboard_alone(opened: Page) -> None:
    page = opened
    page.keys("TAB", "ENTER")  # the link to the prompt
    page.wait(lambda: page.run("return document.activeElement.id") == "prompt")
    page.driver.switch_to.active_element.send_keys("Once", webdriver.Keys.CONTROL + "\ue007")
    page.wait(lambda: " tokens, " in page.text("answer-figures"))
    page.run("document.getElementById('heat').focus()")
    page.keys("ARROW_RIGHT", "ARROW_DOWN", "ARROW_RIGHT", "ARROW_RIGHT")
    page.wait(lambda: page.text("heat-reading").startswith("Layer 1, expert 2: "))
    places = {"r": "resident", ".": "on the disk", "l": "loading"}

    def is_told() -> bool:  # a status may be of a moment before
        found = page.status()["experts"]
        place, uses = places[found["states"][1][2]], found["uses"][1][2]
        return page.text("heat-reading").endswith(f"{place}, used by {uses} tokens")

    page.wait(is_told)
    page.keys("ARROW_LEFT", "ARROW_LEFT", "ARROW_LEFT", "ARROW_UP")
    page.wait(lambda: page.text("heat-reading").startswith("Layer 0, expert 0: "))
    page.keys("ESCAPE")
    page.wait(lambda: "arrow keys" in page.text("heat-reading"))


def test_what_can_be_reached_has_a_name(opened: Page) -> None:
    page = opened
    nodes = page.driver.execute_cdp_cmd("Accessibility.getFullAXTree", {})["nodes"]
    reached = {}
    for node in nodes:
        properties = {
            item["name"]: item["value"].get("value") for item in node.get("properties", [])
        }
        if properties.get("focusable") and node["role"]["value"] != "RootWebArea":
            reached[node["nodeId"]] = (node["role"]["value"], node["name"]["value"])
    assert len(reached) > 8
    assert all(name for _, name in reached.values()), reached
    assert page.run("return document.documentElement.lang") == "en"


def test_stop_ends_an_answer(driver: Any) -> None:
    with served(driver, "--kernels", "numpy") as page:  # so slow that it does not end before
        open_ready(page)
        page.fill("max-tokens", "900")
        page.driver.find_element("id", "send").click()
        page.wait(lambda: len(page.text("answer")) > 40)
        page.wait(lambda: "answers: " in page.text("requests"))
        page.driver.find_element("id", "stop").click()
        page.wait(lambda: page.text("answer-figures") == "stopped")
        page.wait(lambda: page.status()["requests"]["running"] == 0)


def test_a_refusal_is_shown(opened: Page) -> None:
    page = opened
    page.run("document.getElementById('prompt').value = 'word '.repeat(3000)")
    page.driver.find_element("id", "send").click()
    page.wait(lambda: "the context" in page.text("answer"))
    assert page.driver.find_element("id", "send").is_enabled()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", SIZES)
def test_nothing_sticks_out(opened: Page, size: str, scheme: str) -> None:
    page = opened
    page.show_as(size, scheme)
    page.wait(lambda: page.run("return innerWidth") == SIZES[size][0])
    time.sleep(1.2)  # drawn again
    page.wait(lambda: sticking(page) == [])
    assert page.run("return document.documentElement.scrollWidth") <= SIZES[size][0]
    ground = page.run("return getComputedStyle(document.body).backgroundColor")
    assert (ground == "rgb(18, 22, 28)") == (scheme == "dark")
    page.wait(lambda: len({colour for row in cell_colours(page) for colour in row}) > 3)


def sticking(page: Page) -> list[str]:
    """Ids, or names, of elements that reach beyond the window."""
    found: list[str] = page.run(
        """
        return [...document.querySelectorAll("main *")].filter((element) => {
            const box = element.getBoundingClientRect();
            return box.width && box.right > innerWidth + 0.5;
        }).map((element) => element.id || element.tagName);
        """
    )
    return found


def test_a_key_is_asked_for(driver: Any) -> None:
    with served(driver, "--api-key", "right") as page:
        page.show_as("desktop", "light")
        page.open()
        page.wait(lambda: page.driver.find_element("id", "key-form").is_displayed())
        field = page.driver.find_element("id", "key")
        field.send_keys("wrong\n")
        page.wait(lambda: "does not know this key" in page.text("trouble"))
        field.send_keys("right\n")
        page.wait(lambda: page.text("state") == "ready")
        assert not page.driver.find_element("id", "key-form").is_displayed()
        page.driver.find_element("id", "send").click()
        page.wait(lambda: " tokens, " in page.text("answer-figures"))


def test_a_service_that_is_gone(driver: Any) -> None:
    with served(driver) as page:
        page.open()
        page.wait(lambda: page.text("state") == "ready")
        page.program.process.terminate()
        page.wait(lambda: page.text("state") == "no answer")
        assert "does not answer" in page.text("trouble")
