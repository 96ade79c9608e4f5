"""The pictures of the documents: the one that is drawn from a table against that table, and their sizes."""

import re

import pytest

pytest.importorskip("matplotlib")
from tests.tools import pictures

TEXT = (pictures.ROOT / "docs" / "results.md").read_text()


def labels(path) -> list[str]:
    return re.findall(r"<text[^>]*>([^<]+)</text>", path.read_text())


def test_the_pies_are_those_of_the_results(tmp_path):
    pictures.draw(tmp_path / "now.svg")
    assert labels(tmp_path / "now.svg") == labels(pictures.PICTURE), "run python3 -m tests.tools.pictures"


@pytest.mark.parametrize("title", pictures.PIES)
def test_each_part_of_a_table_has_its_label(title):
    parts = pictures.table(title, TEXT)
    assert len(parts) >= 9 and all(
        any(label.startswith(f"{name} {value:,g} (") for label in labels(pictures.PICTURE)) for name, value in parts.items()
    )


def test_the_pictures_are_small():
    sizes = {path.name: path.stat().st_size for path in pictures.PICTURE.parent.glob("*.*") if path.suffix in (".png", ".svg")}
    assert len(sizes) >= 2 and max(sizes.values()) < 150_000, sizes
