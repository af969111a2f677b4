"""A real browser, without a window: Debian's `chromium` and `chromium-driver`, or Chrome with its own driver."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.ui import WebDriverWait

from tests.support.system.patience import PATIENCE_S

_BROWSERS = ("chromium", "google-chrome")
_DRIVER = "chromedriver"
# The browser's sandbox needs what containers do not give, and /dev/shm is small there.
_FLAGS = ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu")


class Browser:
    """A browser with one tab, 1200 by 900 until it is resized."""

    def __init__(self, driver: webdriver.Chrome) -> None:
        self.driver = driver

    def open(self, url: str) -> None:
        """Load a page, without what earlier ones have logged."""
        self.resize(1200)
        self.driver.get(url)
        self.driver.get_log("browser")

    def resize(self, width: int, height: int = 900) -> None:
        """Set the size of what is seen, in CSS pixels; a window cannot be as narrow as a telephone's."""
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)

    def prefer(self, color_scheme: str) -> None:
        """Prefer `light` or `dark`."""
        features = [{"name": "prefers-color-scheme", "value": color_scheme}]
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})

    def find(self, selector: str) -> WebElement:
        """The first element of a CSS selector; raises `NoSuchElementException`."""
        return self.driver.find_element(By.CSS_SELECTOR, selector)

    def texts(self, selector: str) -> list[str]:
        """The texts of all elements of a CSS selector, hidden ones too."""
        script = "return [...document.querySelectorAll(arguments[0])].map((element) => element.textContent)"
        texts: list[str] = self.driver.execute_script(script, selector)
        return texts

    def press(self, *keys: str) -> None:
        """Press keys, one after the other, wherever the focus is."""
        actions = ActionChains(self.driver)
        for key in keys:
            actions.send_keys(key)
        actions.perform()

    def evaluate(self, expression: str) -> object:
        """The value of an expression of JavaScript."""
        value: object = self.driver.execute_script(f"return {expression}")
        return value

    def wait_until(self, condition: Callable[[], object], what: str) -> None:
        """Wait until something is so; fails after five minutes."""
        WebDriverWait(self.driver, PATIENCE_S, poll_frequency=0.05).until(lambda _: condition(), what)

    def complaints(self) -> list[str]:
        """What the page and the browser have complained about since the last call: errors, refusals by its policy."""
        entries = self.driver.get_log("browser")
        return [entry["message"] for entry in entries if entry["level"] in ("WARNING", "SEVERE")]


@contextmanager
def run_browser() -> Iterator[Browser]:
    """Run a browser; skips the test where the machine has none."""
    binary = next((path for name in _BROWSERS if (path := shutil.which(name))), None)
    driver_path = shutil.which(_DRIVER)
    if binary is None or driver_path is None:
        pytest.skip(f"no browser: needs {' or '.join(_BROWSERS)}, and {_DRIVER}, which .ci/run installs")
    options = webdriver.ChromeOptions()
    options.binary_location = binary
    for flag in _FLAGS:
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    # With both paths given, Selenium looks for neither and downloads nothing.
    with webdriver.Chrome(options=options, service=Service(driver_path)) as driver:
        yield Browser(driver)
