"""Pages in Chromium: folding, search, links to the source and back, and switching passes."""

import pytest
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import WebDriverWait

import jaxprtool
from jaxprtool.cli.main import main
from tests.external import needs
from tests.render import browser

pytestmark = needs("chromium", "chromedriver")

SOURCE = """\
import jax, jax.numpy as jnp, jaxprtool

@jaxprtool.example({"w": "f32[3,4]", "<b onclick=alert(1)>": "f32[4]"}, "f32[8,3]")
def loss(params, x):
    with jax.named_scope("layer"):
        hidden = jnp.tanh(x @ params["w"])
        hidden = hidden + params["<b onclick=alert(1)>"]
    unused = jnp.sin(hidden)
    with jax.named_scope("head"):
        total = jax.lax.scan(lambda c, row: (c + row * 1.0, c), jnp.zeros(4), hidden)[0]
    return total.sum()  # </pre><script>alert(2)</script>
"""


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """The pages of `show`, `opt` and `report`."""
    folder = tmp_path_factory.mktemp("pages")
    (folder / "model.py").write_text(SOURCE)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert main(["show", "model.py:loss", "-o", "show.html", "--depth", "0"]) == 0
        assert main(["opt", "model.py:loss", "-p", "simplify, dce, dce", "-o", "opt.html"]) == 0
        assert main(["report", "model.py:loss", "-p", "grad, dce", "-o", "report.html"]) == 0
    return folder


@pytest.fixture(scope="module")
def chromium():
    with browser.chromium() as driver:
        yield driver


@pytest.fixture
def opened(chromium, pages):
    """Opens a page. At the end, the console must be empty."""

    def open_page(name, fragment=""):
        chromium.get("about:blank")
        chromium.get((pages / name).as_uri() + fragment)
        return Page(chromium)

    yield open_page
    assert chromium.get_log("browser") == []


class Page:
    """Reads and operates a page as a user does."""

    def __init__(self, driver):
        self.driver = driver

    def one(self, selector):
        return self.driver.find_element(By.CSS_SELECTOR, selector)

    def texts(self, selector):
        found = self.driver.find_elements(By.CSS_SELECTOR, selector)
        return [each.text.replace("\n", " ") for each in found if each.is_displayed()]

    def row(self, primitive):
        """Return the row of the only equation of a primitive."""
        (found,) = [
            each
            for each in self.driver.find_elements(By.CSS_SELECTOR, "main .equations code > b")
            if each.get_attribute("textContent") == primitive
        ]
        return found.find_element(By.XPATH, "../..")

    def shows(self, primitive):
        # Selenium considers the contents of closed <details> hidden, whatever the style.
        script = "return arguments[0].checkVisibility()"
        return self.driver.execute_script(script, self.row(primitive))

    def keys(self, *keys):
        self.driver.switch_to.active_element.send_keys(*keys)

    def point(self, node):
        ActionChains(self.driver).move_to_element(node).perform()

    def until(self, condition):
        return WebDriverWait(self.driver, 5).until(lambda _: condition())

    @property
    def found(self):
        return self.one("#found").text

    @property
    def selected(self):
        return self.texts("main .sel")


@pytest.mark.proof
def test_a_page_opens_with_bodies_folded_and_unfolds_them(opened):
    page = opened("show.html")
    assert page.one("h1").text == "loss" and page.one("h2").text == "model.py"
    assert not page.shows("mul")
    page.row("scan").click()
    assert page.shows("mul")
    page.one("#fold").click()
    assert not page.shows("scan") and page.texts("main .scope strong") == [
        "layer",
        "head",
    ]
    page.one("#nesting").click()
    assert page.shows("scan") and page.texts("main .scope strong") == []
    page.one("#unfold").click()
    assert page.shows("mul")


def test_names_and_files_run_no_script(opened):
    page = opened("show.html")
    assert "alert(1)" in page.one("main").get_attribute("textContent")
    assert "alert(2)" in page.one("aside").text
    assert page.driver.execute_script("return document.querySelectorAll('[onclick]').length") == 0


def test_search_counts_and_goes_from_match_to_match(opened):
    page = opened("show.html")
    page.one("body").send_keys("/")
    page.keys("f32[4]")
    count = int(page.found.split()[0])
    assert page.found == f"{count} equations" and count > 2
    page.keys(Keys.ENTER)
    assert page.found == f"1 of {count}" and page.one(".here").is_displayed()
    page.keys(Keys.SHIFT, Keys.ENTER)
    assert page.found == f"{count} of {count}"
    page.keys(Keys.ESCAPE)
    assert page.found == "" and page.one("#query").get_attribute("value") == ""
    page.one("#query").send_keys('"model.py:10" mul')
    assert page.found == "1 equation"
    page.one("#next").click()
    assert page.shows("mul")  # inside a folded body
    page.one("#query").clear()
    page.one("#query").send_keys("no such thing")
    assert page.found == "0 equations" and not page.one("#next").is_enabled()


def test_the_cost_of_rows_is_a_column_of_flops_or_bytes(opened):
    page = opened("show.html")
    heat = page.row("dot_general").find_element(By.CSS_SELECTOR, "data")
    shares = [float(heat.get_attribute(f"data-{of}").rstrip("%")) for of in "fb"]
    assert all(0 < share < 100 for share in shares) and shares[0] != shares[1]
    shown = "return getComputedStyle(arguments[0], '::after').content"
    assert page.driver.execute_script(shown, heat) == f'"{shares[0]}%"'
    page.one("#bytes").click()
    assert page.driver.execute_script(shown, heat) == f'"{shares[1]}%"'


def test_a_value_marks_its_definition_and_uses(opened):
    page = opened("show.html")
    page.point(page.row("tanh").find_element(By.CSS_SELECTOR, "code a"))
    assert page.one("#card").text.splitlines()[1:] == [
        "bound by dot_general",
        "model.py:6",
        "scope layer",
        "192 FLOPs, 272 bytes",
        "read once",
    ]
    assert len(page.texts("main .on")) == 2
    page.row("tanh").find_element(By.CSS_SELECTOR, "dfn").click()
    assert page.found.startswith("1 reader of ")
    page.one("#next").click()
    assert page.found == "1 of 1" and " = add " in page.selected[0]


def test_listing_and_source_link_to_each_other(opened):
    page = opened("show.html")
    page.row("tanh").find_element(By.CSS_SELECTOR, "cite").click()
    assert "jnp.tanh" in page.one("aside :target").text
    page.row("scan").find_element(By.CSS_SELECTOR, "b").click()
    assert "jax.lax.scan" in page.one("aside .sel").text
    line = page.one("#f0-10 a")
    count = line.find_element(By.CSS_SELECTOR, "small").text
    line.click()
    page.until(lambda: page.found == f"1 of {count}")
    assert all("model.py:10" in text for text in page.texts("main .hit cite a"))


def test_a_url_fragment_opens_a_row_or_a_search(opened):
    page = opened("show.html")
    place = page.row("mul").get_attribute("id")
    assert "mul" in opened("show.html", f"#{place}").selected[0]
    page = opened("show.html", "#q=tanh")
    page.until(lambda: page.found == "1 of 1")


def test_the_arrow_keys_move_fold_and_go_to_values(opened):
    place = opened("show.html").row("scan").get_attribute("id")
    page = opened("show.html", f"#{place}")
    assert "= scan[" in page.selected[0]
    page.keys(Keys.ARROW_RIGHT)
    page.keys(Keys.ARROW_DOWN)
    assert page.selected[0].startswith("lambda")
    page.keys(Keys.ARROW_LEFT)
    assert "= scan[" in page.selected[0]
    page.keys(Keys.ARROW_LEFT)
    assert not page.shows("mul")
    page.keys(Keys.ARROW_LEFT)
    page.keys(Keys.ARROW_DOWN)
    page.keys(Keys.ARROW_RIGHT)
    value = page.driver.switch_to.active_element
    assert value.tag_name == "dfn" and page.one("#card").is_displayed()
    page.keys(Keys.ENTER)
    assert page.found.endswith(f" of {value.text}")


def test_a_tab_shows_the_changes_of_its_pass(opened):
    page = opened("opt.html")
    assert page.texts("nav b") == ["traced", "simplify", "dce", "dce"]
    assert "sin" not in page.texts("main .equations b")
    page.one("nav label").click()
    page.until(lambda: "sin" in page.driver.page_source and page.one("main ins, main del"))
    assert page.texts("main .changes a") == ["\N{MINUS SIGN} 1 equation to be removed by simplify"]
    page.one("main .changes a").click()
    page.until(lambda: page.found == "1 of 1")
    assert "mul" in page.one("main .here").text
    page.driver.find_elements(By.CSS_SELECTOR, "nav label")[2].click()
    page.until(lambda: not page.driver.find_elements(By.CSS_SELECTOR, "main .equations .removed"))
    assert page.driver.current_url.endswith("#p2-")
    page.driver.refresh()
    page.until(lambda: page.one("nav input:checked").get_attribute("value") == "2")
    assert not page.driver.find_elements(By.CSS_SELECTOR, "main .equations .removed")


def test_a_url_fragment_opens_a_row_of_a_pass(opened):
    page = opened("opt.html", "#p0-q=sin")
    page.until(lambda: page.found == "1 of 1")
    assert page.one("nav input:checked").get_attribute("value") == "0"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_is_legible_in_both_color_schemes(opened, chromium, scheme):
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    chromium.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
    page = opened("opt.html")
    assert min(found := page.driver.execute_script(CONTRASTS)) >= 4.5 and len(found) > 16
    chromium.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})


#: The contrast of each kind of text with its background, as defined by WCAG.
CONTRASTS = """
const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
function luminance(colors) {
  for (const color of ["white", ...colors]) {
    canvas.fillStyle = color;
    canvas.fillRect(0, 0, 1, 1);
  }
  const [r, g, b] = [...canvas.getImageData(0, 0, 1, 1).data].map((value) => {
    const part = value / 255;
    return part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4;
  });
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
}
function contrast(node) {
  const behind = [];
  for (let each = node; each; each = each.parentElement)
    behind.unshift(getComputedStyle(each).backgroundColor);
  const both = [luminance(behind), luminance([...behind, getComputedStyle(node).color])];
  return (Math.max(...both) + 0.05) / (Math.min(...both) + 0.05);
}
const kinds = ["b", "i", "u", "dfn", "samp", "em", "code a", "code", "small", "cite", "strong"];
const others = [".primitives a", ".primitives small", ".facts", "h3", ".changes a", "del"];
const around = ["nav label:has(:enabled) small", "nav del", "aside small", "aside .k", "aside .c1"];
const selectors = [...[...kinds, ...others].map((kind) => "main " + kind), ...around];
const nodes = selectors.map((selector) => document.querySelector(selector));
return nodes.filter(Boolean).map(contrast);
"""


def test_a_page_fits_a_narrow_window(opened, chromium):
    chromium.set_window_size(500, 800)
    page = opened("opt.html")
    wide, narrow = page.driver.execute_script(
        "const d = document.documentElement; return [d.scrollWidth, d.clientWidth]"
    )
    assert wide <= narrow
    chromium.set_window_size(1400, 900)


def test_a_notebook_cell_folds_without_a_script(opened, pages, monkeypatch):
    monkeypatch.chdir(pages)
    program = jaxprtool.load("model.py:loss")
    (pages / "cell.html").write_text("<!doctype html><meta charset=utf-8>" + program._repr_html_())
    page = opened("cell.html")
    assert page.one("[data-scope=layer] strong").text == "layer"
    page.one("[data-scope=layer] > summary").click()
    assert not page.one("[data-scope=layer] p").is_displayed()


def test_a_report_shows_cost_memory_and_residuals_instead_of_the_listing(opened):
    page = opened("report.html")
    for name in ("cost", "memory", "residuals"):
        page.one(f"#view-{name}").click()
        shown = {each: page.one(f"#report-{each}").is_displayed() for each in VIEWS}
        assert shown == {each: each == name for each in VIEWS}
        assert not page.one("main").is_displayed() and page.one("aside").is_displayed()
    page.one("#view-equations").click()
    assert page.one("main").is_displayed() and not page.one("#report-cost").is_displayed()


def test_a_report_begins_with_its_summary(opened):
    page = opened("report.html")
    assert page.one("#report-summary").is_displayed() and not page.one("main").is_displayed()
    page.one("#report-summary td a").click()
    assert page.one("aside :target").is_displayed() and page.one("#report-summary").is_displayed()


def test_a_flame_graph_zooms_is_searched_and_leads_to_the_source_and_back(opened):
    page = opened("report.html")
    assert page.texts(".icicle [role=tab]") == ["FLOPs", "bytes", "live at the peak"]
    assert page.one(".flames > [aria-level='1']").text.startswith("loss 100.0%")
    line = page.one(".flames > [aria-label^='model.py:6,']")
    whole = page.one(".flames").rect["width"]
    assert line.rect["width"] < 0.9 * whole
    line.click()
    assert line.rect["width"] == pytest.approx(whole, abs=2)
    assert "model.py:6" in page.one(".icicle .said").text
    assert 'jnp.tanh(x @ params["w"])' in page.one("aside .sel").text
    page.keys(Keys.ARROW_UP)
    page.keys(Keys.ESCAPE)
    assert page.one(".icicle .said").text.endswith("table")
    page.one("body").send_keys("/")
    page.keys("tanh")
    frames, share = page.one(".icicle output").text.split(", ")
    assert frames == "2 frames" and share == page.one("#f0-6 small").get_attribute("data-share")
    page.keys(Keys.ESCAPE)
    page.one(".icicle [role=tab]:nth-child(2)").click()
    assert page.one("[aria-selected=true]").text == "bytes"
    page.one("#f0-6 a").click()
    assert {frame.split(" ")[0] for frame in page.texts(".flames > .match")} == {"model.py:6"}
    assert page.one("#report-summary").is_displayed()


def test_columns_of_a_report_can_be_sorted(opened):
    page = opened("report.html")
    page.one("#view-cost").click()
    table = "#report-cost table:last-of-type"
    head = page.one(f"{table} th:nth-child(3) button")
    sizes = (
        f"return [...document.querySelectorAll('{table} td:nth-child(3)')].map(c => +c.dataset.n)"
    )
    for order, falling in (("descending", True), ("ascending", False)):
        head.click()
        found = page.driver.execute_script(sizes)
        assert len(found) > 2 and found == sorted(found, reverse=falling)
        assert head.find_element(By.XPATH, "..").get_attribute("aria-sort") == order
    page.one(f"{table} th:last-child button").click()
    assert page.texts(f"{table} td:last-child") == sorted(
        page.texts(f"{table} td:last-child"), key=str.lower, reverse=True
    )


def test_a_line_of_a_report_links_to_the_source_and_a_pass_back_to_the_listing(opened):
    page = opened("report.html")
    page.one("#view-cost").click()
    page.one("#report-cost td a").click()
    assert page.one("aside :target").is_displayed() and page.one("#report-cost").is_displayed()
    page.one("nav label").click()
    assert page.one("main").is_displayed()


VIEWS = ("summary", "cost", "memory", "residuals")


def test_on_a_narrow_screen_no_pane_covers_another(opened, chromium):
    metrics = {"width": 420, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    chromium.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    try:
        page = opened("report.html")
        summary = page.one("#report-summary")
        assert summary.rect["width"] <= 420
        assert page.driver.execute_script(
            "return arguments[0].scrollWidth <= arguments[0].clientWidth", summary
        )
        page.one("#view-equations").click()
        listing, source = page.one("main").rect, page.one("aside").rect
        assert listing["y"] + listing["height"] <= source["y"] + 1  # rounded
        page.one("#view-cost").click()
        name = page.one("#report-cost td:last-child").rect
        assert name["width"] > 150 and page.one("#report-cost").rect["width"] <= 420
    finally:
        chromium.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
