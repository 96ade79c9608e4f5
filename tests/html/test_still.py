"""Colors of curves, and the still pictures of charts on paper and without JavaScript."""

import re
from itertools import combinations

import pytest
from color_vision import VISION, ciede2000, contrast, distance

from common.html import page
from common.html.page import COLORS, DASHES, Curve
from common.html.still import POINTS, picture, ticks

pytestmark = pytest.mark.quick
CSS = (page.TEMPLATES / "page.css").read_text()
PAGES = re.findall(r"--page: (#\w+);", CSS.replace("#fff;", "#ffffff;"))[:2]


def test_the_distance_is_that_of_the_published_pairs():
    """Sharma, Wu and Dalal 2005, table 1: pairs 1, 7, 16 and 25."""
    for one, other, expected in (
        ((50.0, 2.6772, -79.7751), (50.0, 0.0, -82.7485), 2.0425),
        ((50.0, 0.0, 0.0), (50.0, -1.0, 2.0), 2.3669),
        ((50.0, 2.5, 0.0), (50.0, 0.0, -2.5), 4.3065),
        ((60.2574, -34.0099, 36.2677), (60.4626, -34.1751, 39.4387), 1.2644),
    ):
        assert ciede2000(one, other) == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("vision", VISION)
def test_eight_curves_are_told_apart_by_all_eyes(vision):
    """Curves with the same dashes by their colors alone; any two have at least other dashes."""
    for first in (0, 4):
        for one, other in combinations(COLORS[first : first + 4], 2):
            assert distance(one, other, vision) > 18, (one, other)
    for one, other in combinations(COLORS, 2):
        assert distance(one, other, vision) > 8.9, (one, other)


@pytest.mark.parametrize("background", PAGES)
def test_curves_have_the_contrast_that_figures_need(background):
    assert len(PAGES) == 2
    assert all(contrast(color, background) >= 3 for color in COLORS)


def test_each_four_curves_have_their_own_dashes():
    curves = [Curve(f"run {color}", [(0.0, 1.0), (1.0, 2.0)], color) for color in range(16)]
    series = page.chart("loss", "steps", curves)["chart"]["series"]
    assert len({(curve["color"], tuple(curve["dash"])) for curve in series}) == 16
    assert [curve["dash"] for curve in series[::4]] == [*DASHES]


def test_ticks_are_round_and_within_the_axis():
    assert ticks(0.0, 10.0) == [0, 2, 4, 6, 8, 10]
    assert ticks(3.1, 4.7) == pytest.approx([3.5, 4.0, 4.5])
    assert ticks(0.5, 2000.0, is_log=True) == [1, 10, 100, 1000]
    assert ticks(5.0, 5.0) == [5.0]


@pytest.mark.parametrize("log", [{}, {"x": 2}, {"x": 10, "y": 10}])
def test_a_picture_holds_every_curve_in_its_frame(log):
    steep = [(float(x), 1000.0 / x) for x in range(1, 5000)]
    curves = [
        Curve("a", steep),
        Curve("b", [(10.0, 3.0)], 1),
        Curve("c", steep[::900], scatter=True),
    ]
    made = picture(
        page.chart("loss", "steps", curves, log=log, target=2.0, band=(5, 9000))["chart"]
    )
    places = []
    for curve in made["curves"]:
        pairs = [pair.split(",") for pair in curve["line"].split()]
        assert len(pairs) <= POINTS
        places += [(float(x), float(y)) for x, y in pairs] + curve["dots"]
    assert all(64 <= x <= 692 and 10 <= y <= 238 for x, y in places)
    assert made["curves"][1]["dots"] and not made["curves"][2]["line"]
    left, width = made["band"]
    assert left >= 64 and left + width <= 692


def test_the_words_of_a_chart_name_each_curve_and_its_last_value():
    made = page.chart("loss", "steps", [Curve("A & B", [(0.0, 5.0), (9.0, 3.25)])])
    text = page.render("title", [("Loss", [made])])
    assert 'aria-label="loss, over steps. A &amp; B: 3.25 to 5, last 3.25."' in text
    assert text.count('<svg class="still"') == 1 and "<main>" in text


def test_an_outlier_stays_in_a_thinned_curve():
    spots = [(float(x), 1.0) for x in range(400)]
    spots[333] = (333.0, 50.0)
    drawn = picture(page.chart("ms", "steps", [Curve("a", spots)])["chart"])["curves"][0]["line"]
    heights = [float(pair.split(",")[1]) for pair in drawn.split()]
    assert min(heights) < 40 < max(heights)
