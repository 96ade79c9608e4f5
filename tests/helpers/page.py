"""An HTML page as a parser sees it."""

import json
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote


class Page(HTMLParser):
    """Parser that collects tags, links, chart data and scripts, and fails on unclosed tags."""

    VOID = ("meta", "br", "wbr", "link")

    def __init__(self, text: str):
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.links: list[str] = []  # to other files
        self.inside: list[str] = []  # to ids of this page
        self.ids: list[str] = []
        self.charts: list[dict] = []
        self.scripts: list[str] = []
        self.feed(text)
        self.close()
        assert not self.open, f"not closed: {self.open}"

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        links = [
            value
            for name, value in attributes
            if name in ("href", "src", "xlink:href") and tag != "link"
        ]
        self.links += [link for link in links if tag != "a" or not link.startswith("#")]
        self.inside += [unquote(link[1:]) for link in links if tag == "a" and link.startswith("#")]
        self.ids += [value for name, value in attributes if name == "id"]
        if tag not in self.VOID:
            self.open.append(tag)
        self.is_data = ("type", "application/json") in attributes

    def handle_data(self, data):
        if self.open[-1:] == ["script"] and self.is_data:
            self.charts.append(json.loads(data))
        elif self.open[-1:] == ["script"]:
            self.scripts.append(data)

    def handle_startendtag(self, tag, attributes):
        self.tags.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def read_page(path: Path) -> str:
    """Return the text of the page at `path`, without its scripts.

    The page must be whole, stand alone, link to its own sections and to files beside it only.
    """
    text = path.read_text(encoding="utf-8")
    page = Page(text)
    assert page.inside and all(page.ids.count(name) == 1 for name in page.inside), page.inside
    assert all((path.parent / link).exists() for link in page.links), page.links
    assert "default-src 'none'" in text and "prefers-color-scheme: dark" in text
    for script in page.scripts:
        text = text.replace(script, "")
    return text
