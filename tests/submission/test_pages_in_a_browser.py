"""Test the pages in Chromium: charts, mouse, no network access, and the width of a phone."""

import io
import shutil

import pytest
import synthetic_run
import synthetic_series
from PIL import Image
from synthetic_run import write_run

from common.html import page as html
from common.html.page import Curve
from common.measure import report as throughput_report
from common.measure.tables import Section
from submission import report

pytestmark = pytest.mark.slow
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
VIEWS = [(width, scheme) for width in (1280, 400) for scheme in ("light", "dark")]
# The pixels of a canvas, from a copy of it: Chromium warns of pages that read their own canvas.
PIXELS = """function pixels(canvas) {
  const offscreen = new OffscreenCanvas(canvas.width, canvas.height);
  const copy = offscreen.getContext("2d", {willReadFrequently: true});
  copy.drawImage(canvas, 0, 0);
  return copy.getImageData(0, 0, canvas.width, canvas.height).data;
}"""
# How many pixels of each chart's canvas are painted in the color of its last curve, and whether the
# canvas lies within the window.
PAINTED = (
    "() => {"
    + PIXELS
    + """ return [...document.querySelectorAll("figure.chart")].map(figure => {
  const canvas = figure.querySelector("canvas"), box = canvas.getBoundingClientRect();
  const color = JSON.parse(figure.querySelector("script").textContent).series.at(-1).color;
  const wanted = [1, 3, 5].map(at => parseInt(color.slice(at, at + 2), 16));
  const data = pixels(canvas);
  let count = 0;
  for (let at = 0; at < data.length; at += 4)
    count += wanted.every((part, index) => Math.abs(data[at + index] - part) < 8);
  return [count, box.left >= 0 && box.right <= innerWidth];
})}"""
)


@pytest.fixture(scope="module")
def browser():
    sync_api = pytest.importorskip(
        "playwright.sync_api", reason="no playwright: pip install -r requirements-test.txt"
    )
    program = next(filter(None, map(shutil.which, BROWSERS)), None)
    if program is None:
        pytest.skip("no Chromium: apt-get install chromium, as .ci/run does")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """Pages by name, and the number of charts on each."""
    root = tmp_path_factory.mktemp("pages")
    runs = [root / "one", root / "two"]
    for run in runs:
        run.mkdir()
        assert report.main([str(write_run(run, gpus=8))]) == 0
    assert report.main(list(map(str, runs))) == 0
    series = synthetic_series.write(
        root, synthetic_run.PRETRAINING, synthetic_series.plans([13] * 12)
    )
    assert report.main([str(series)]) == 0
    assert report.main([str(root)]) == 0
    return {
        "run": (runs[0] / "report.html", 9),
        "comparison": (runs[0] / "compared_with_two.html", 3),
        "series": (series / "report.html", 1),
        "runs": (root / "report.html", 0),
        "measurement": (_measurement(root / "measurement"), 2),
    }


def _measurement(folder):
    """The page of a measurement of `throughput`, with more columns than a phone shows.

    Its charts have logarithmic axes, and its bars a name as long as the path of a model.
    """
    heads = ("call", *(f"column {number}" for number in range(9)))
    rows = tuple((f"shape {row}", *("123.4" for _ in heads[1:])) for row in range(10))
    numbers = (False, *(True for _ in heads[1:]))
    blocks = []
    for log in ({"x": 2}, {"x": 10, "y": 10}):
        curve = Curve("all-reduce", [(4.0**power, 3.0**power) for power in range(6)], dots=True)
        blocks.append(html.chart("GB/s", "MiB", [curve], log=log))
    blocks.append(html.bars("tokens/s", [(f"/data/{'models/' * 20}qwen3", 23456.7, "bf16")]))
    table = Section("Matrix products", "measured here", heads, numbers, rows, charts=tuple(blocks))
    folder.mkdir()
    throughput_report.write(folder, "gemm · H200 · 2026-11-23", [table])
    return folder / "page.html"


@pytest.fixture
def opened(browser, request):
    """Open a page with a width and a color scheme. Fails on console messages and network access."""
    heard: list[str] = []
    contexts = []

    def open_page(path, width, scheme):
        context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: heard.append(f"{message.type}: {message.text}"))
        page.on("pageerror", lambda error: heard.append(str(error)))
        page.on(
            "request",
            lambda asked: (
                heard.append(asked.url)
                if asked.url != path.as_uri() and asked.url != "data:,"
                else None
            ),
        )
        page.goto(path.as_uri())
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert heard == []


@pytest.mark.parametrize(("width", "scheme"), VIEWS)
@pytest.mark.parametrize("name", ["run", "comparison", "series", "runs", "measurement"])
def test_charts_are_drawn_and_nothing_is_loaded(opened, pages, name, width, scheme):
    path, charts = pages[name]
    page = opened(path, width, scheme)
    painted = page.evaluate(PAINTED)
    assert len(painted) == charts and all(count > 50 and inside for count, inside in painted), (
        painted
    )
    assert page.evaluate("document.documentElement.scrollWidth") == width
    background = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert background == ("rgb(255, 255, 255)" if scheme == "light" else "rgb(20, 23, 26)")
    assert path.stat().st_size < 2_000_000


# How far each table goes beyond its visible part, in pixels.
HIDDEN = """() => [...document.querySelectorAll(".scroll")].map(
  box => box.scrollWidth - box.clientWidth)"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("name", ["run", "comparison", "series", "runs", "measurement"])
def test_a_table_that_goes_on_has_a_shadow_at_its_edge(opened, pages, name, scheme):
    page = opened(pages[name][0], 400, scheme)
    for index, hidden in enumerate(page.evaluate(HIDDEN)):
        table = page.locator(".scroll").nth(index)
        if not table.is_visible():
            continue
        table.scroll_into_view_if_needed()
        table.evaluate("box => box.scrollTop = box.scrollHeight")  # no shadow below
        assert (_edge(table, "right") != _edge(table, "middle")) == (hidden > 1)
        table.evaluate("box => box.scrollLeft = box.scrollWidth")
        assert _edge(table, "right") == _edge(table, "middle")
        assert (_edge(table, "left") != _edge(table, "middle")) == (hidden > 1)


def test_a_table_that_goes_on_below_has_a_shadow_until_its_end_is_shown(opened, tmp_path):
    rows = tuple((str(number), "x") for number in range(60))
    table = Section("Rows", "", ("number", "name"), (True, False), rows)
    throughput_report.write(tmp_path, "rows", [table])
    shown = opened(tmp_path / "page.html", 1280, "light").locator(".scroll").last
    assert shown.evaluate("box => box.scrollHeight > box.clientHeight")
    assert _bottom(shown) != (255, 255, 255)
    shown.evaluate("box => box.scrollTop = box.scrollHeight - box.clientHeight")
    assert _bottom(shown) == (255, 255, 255)


def _bottom(table) -> tuple[int, ...]:
    """Return the color of a pixel near the lower edge, above the line of a row."""
    with Image.open(io.BytesIO(table.screenshot())) as image:
        return image.convert("RGB").getpixel((image.width // 3, image.height - 4))


def _edge(table, place: str) -> tuple[int, ...]:
    """Return the color of a pixel between the last row's text and its line."""
    with Image.open(io.BytesIO(table.screenshot())) as image:
        x = {"left": 0, "middle": image.width // 2, "right": image.width - 1}[place]
        return image.convert("RGB").getpixel((x, image.height - 3))


def test_wide_windows_cut_off_no_table(opened, pages):
    for path, _ in pages.values():
        assert max(opened(path, 1280, "light").evaluate(HIDDEN)) <= 1, path


def test_long_heads_are_folded_before_a_table_is_cut_off(opened, tmp_path):
    heads = ("model", *(f"result {number} of this machine, tokens/s" for number in range(8)))
    table = Section("Results", "", heads, (False, *(True,) * 8), (("llama", *("1,234.5",) * 8),))
    throughput_report.write(tmp_path, "results", [table])
    assert max(opened(tmp_path / "page.html", 1280, "light").evaluate(HIDDEN)) <= 1


def test_both_runs_of_a_comparison_are_visible_on_a_phone(opened, pages):
    page = opened(pages["comparison"][0], 400, "light")
    box = page.locator("th", has_text="B").first.bounding_box()
    assert box["x"] + box["width"] <= 400


def test_the_legend_shows_the_last_values_follows_the_mouse_and_hides_a_curve(opened, pages):
    page = opened(pages["run"][0], 1280, "light")
    figure = page.locator("figure.chart", has_text="loss, nats per token")
    legend = figure.locator(".u-legend .u-value")
    curves = "figure => JSON.parse(figure.querySelector('script').textContent).series"
    last = [curve["data"][1][-1] for curve in figure.evaluate(curves)]
    assert [float(text) for text in legend.all_inner_texts()[1:]] == pytest.approx(last, rel=1e-4)
    before = legend.all_inner_texts()
    figure.locator(".u-over").hover(position={"x": 200, "y": 100})
    assert legend.all_inner_texts() != before
    page.mouse.move(0, 0)
    assert legend.all_inner_texts() == before
    before = page.evaluate(PAINTED)[0][0]
    figure.locator(".u-legend .u-series", has_text="evaluation").locator("th").click()
    page.mouse.move(0, 0)
    page.wait_for_function(f"() => ({PAINTED})()[0][0] < {before} / 2")


def test_the_legend_is_reached_and_used_by_the_keyboard(opened, pages):
    page = opened(pages["comparison"][0], 1280, "light")
    name = page.locator(".u-label[role=button]").first
    for key, pressed in (("Enter", "false"), (" ", "true")):
        name.focus()
        page.keyboard.press(key)
        page.wait_for_function(
            "wanted => document.activeElement.getAttribute('aria-pressed') === wanted", arg=pressed
        )
        shown = page.evaluate("document.querySelector('figure.chart').plot.series[1].show")
        assert shown == (pressed == "true")
    labels = page.locator("canvas").evaluate_all(
        "all => all.map(canvas => canvas.getAttribute('aria-label'))"
    )
    assert labels and all("last" in label for label in labels)


def test_on_paper_a_chart_is_a_still_picture_on_white(opened, pages):
    page = opened(pages["run"][0], 800, "dark")
    page.emulate_media(media="print")
    assert page.locator("svg.still").first.is_visible()
    assert not page.locator(".uplot").first.is_visible()
    color = "getComputedStyle(document.body).backgroundColor"
    assert page.evaluate(color) == "rgb(255, 255, 255)"
    assert max(page.evaluate(HIDDEN)) <= 1
    after_heads = "getComputedStyle(document.querySelector('tr')).breakAfter"
    assert page.evaluate(after_heads) == "avoid", "the head of a table and its first row"


# How many numbers of tables are broken into several lines.
BROKEN = """() => [...document.querySelectorAll("td.n")].filter(cell => {
  const range = document.createRange();
  range.selectNodeContents(cell);
  return range.getClientRects().length > 1;
}).length"""


@pytest.mark.parametrize("name", ["series", "runs"])
def test_on_paper_no_number_is_broken(opened, pages, name):
    page = opened(pages[name][0], 794, "light")  # as wide as A4
    page.emulate_media(media="print")
    assert page.evaluate(BROKEN) == 0 and max(page.evaluate(HIDDEN)) <= 1


def test_without_javascript_every_chart_is_a_still_picture(browser, pages):
    path, charts = pages["run"]
    context = browser.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto(path.as_uri())
    pictures = page.locator("svg.still")
    assert pictures.count() == charts
    assert all(pictures.nth(index).is_visible() for index in range(charts))
    assert not page.locator(".hint").is_visible()
    context.close()


def test_a_drag_zooms_and_a_double_click_shows_all_again(opened, pages):
    page = opened(pages["run"][0], 1280, "light")
    over = page.locator("figure.chart", has_text="step time, ms").locator(".u-over")
    over.scroll_into_view_if_needed()
    count = "() => document.querySelectorAll('figure.chart')[2].plot.scales.x.max"
    whole, box = page.evaluate(count), over.bounding_box()
    page.mouse.move(box["x"] + 100, box["y"] + 50)
    page.mouse.down()
    page.mouse.move(box["x"] + 220, box["y"] + 60, steps=5)
    page.mouse.up()
    assert page.evaluate(count) < whole / 2
    over.dblclick()
    assert page.evaluate(count) == whole


def test_separate_points_fill_their_chart(opened, tmp_path):
    points = [(2183.2, 135.8), (2295.2, 129.8), (2664.9, 135.8)]
    curves = [
        Curve("candidates", points[1:], scatter=True),
        Curve("best", points[:1], 1, True, True),
    ]
    chart = html.chart("peak memory, GiB", "ms per step", curves)
    path = tmp_path / "page.html"
    path.write_text(html.render("tune", [("Time against memory", [chart])]))
    page = opened(path, 1280, "light")
    x = page.evaluate(
        "(({min, max}) => [min, max])(document.querySelector('.chart').plot.scales.x)"
    )
    assert 2100 < x[0] < 2183.2 and 2664.9 < x[1] < 2750
    assert not any(map(str.isdigit, "".join(page.locator(".u-value").all_inner_texts())))


def test_charts_of_one_section_stand_beside_each_other_where_there_is_room(opened, pages):
    tops = (
        "() => ['power', 'temperature'].map(name => [...document.querySelectorAll('figure.chart')]"
        + (".find(figure => figure.innerText.startsWith(name)).getBoundingClientRect().top)")
    )
    wide, narrow = (opened(pages["run"][0], width, "light").evaluate(tops) for width in (1280, 400))
    assert wide[0] == wide[1] and narrow[0] < narrow[1]


def test_a_link_at_the_top_leads_to_its_section(opened, pages):
    page = opened(pages["run"][0], 400, "light")
    page.locator("nav a", has_text="Training").click()
    assert -1 <= page.locator("h2", has_text="Training").bounding_box()["y"] < 300


def test_the_page_follows_the_width_of_the_window_and_the_color_scheme(opened, pages):
    page = opened(pages["run"][0], 1280, "light")
    page.set_viewport_size({"width": 400, "height": 800})
    page.wait_for_function(
        "() => document.querySelector('canvas').getBoundingClientRect().right <= 400"
    )
    sum_of_pixels = (
        "() => {"
        + PIXELS
        + " return pixels(document.querySelector('canvas')).reduce((sum, part) => sum + part, 0); }"
    )
    before = page.evaluate(sum_of_pixels)
    page.emulate_media(color_scheme="dark")
    page.wait_for_function(f"before => ({sum_of_pixels})() !== before", arg=before)
