"""The site builds without warnings, its links resolve, and its search needs no server.

Sphinx is in the extra `docs`. Without it these tests are skipped.
"""

import os
import runpy
import subprocess
import sys
from html.parser import HTMLParser
from importlib.util import find_spec
from urllib.parse import unquote, urldefrag

import pytest
from selenium.common.exceptions import StaleElementReferenceException
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import WebDriverWait

from tests.documentation.blocks import ROOT
from tests.external import needs
from tests.render import browser

pytestmark = [
    pytest.mark.proof,
    pytest.mark.skipif(find_spec("furo") is None, reason="needs the extra `docs`"),
]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The folder of the built site."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", ROOT / "docs", folder]
    # As for a reader who has only this folder: without links to the repository.
    environment = {k: v for k, v in os.environ.items() if k != "GITHUB_REPOSITORY"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert (done.returncode, done.stderr) == (0, "")
    return folder


def test_links_out_of_the_folder_point_to_the_repository(monkeypatch):
    page = "[a](../plugins/lora) [b](../samples/train.py) [c](record.md) [d](../docs/cost.md)"
    conf = runpy.run_path(str(ROOT / "docs" / "conf.py"))
    assert conf["outside"]("index", page) == "a b [c](record.md) [d](../docs/cost.md)"
    monkeypatch.setenv("GITHUB_REPOSITORY", "owner/name")
    conf = runpy.run_path(str(ROOT / "docs" / "conf.py"))
    start = "https://github.com/owner/name"
    assert conf["outside"]("index", page).startswith(
        f"[a]({start}/tree/main/plugins/lora) [b]({start}/blob/main/samples/train.py) [c]"
    )


class Page(HTMLParser):
    """The links of a page, and its anchors."""

    def __init__(self, path):
        super().__init__()
        self.links, self.anchors = [], {""}
        self.feed(path.read_text())

    def handle_starttag(self, tag, attributes):
        given = dict(attributes)
        self.anchors.add(given.get("id"))
        self.links += [given[key] for key in ("href", "src") if given.get(key)]


def test_every_link_inside_the_site_resolves_to_an_anchor(site):
    pages = {path: Page(path) for path in site.rglob("*.html")}
    dead, checked = [], 0
    for path, page in pages.items():
        for link in page.links:
            if ":" in link:  # an external site
                continue
            place, anchor = urldefrag(unquote(link))
            place = place.partition("?")[0]  # the version of a style sheet
            there = (path.parent / place).resolve() if place else path
            checked += 1
            if not there.exists() or (there in pages and anchor not in pages[there].anchors):
                dead.append(f"{path.relative_to(site)} links to {link}")
    assert checked > 5000 and dead == []


@needs("chromium", "chromedriver")
def test_the_search_works_without_a_server(site):
    with browser.chromium() as driver:
        driver.get((site / "search.html").as_uri() + "?q=residuals")
        links = (By.CSS_SELECTOR, "#search-results li a")
        # Results are added one by one, and drawn again.
        wait = WebDriverWait(driver, 60, ignored_exceptions=[StaleElementReferenceException])
        wait.until(lambda _: "Residuals" in [each.text for each in driver.find_elements(*links)])


@needs("chromium", "chromedriver")
@pytest.mark.parametrize("page", ["index", "cost", "api/jaxprtool", "tutorials/out_of_memory"])
def test_a_page_fits_a_phone_screen(site, page):
    with browser.chromium() as driver:
        phone = {"width": 390, "height": 844, "deviceScaleFactor": 1, "mobile": True}
        driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", phone)
        driver.get((site / f"{page}.html").as_uri())
        assert driver.execute_script("return document.documentElement.scrollWidth") == 390
