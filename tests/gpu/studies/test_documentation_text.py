"""Test the documentation text: extraction from pages, selection, and independence of order."""

import gzip
import shutil
import subprocess

import pytest
from documentation_text import (
    LONG,
    NAME,
    PlainText,
    files_of,
    prepare_text,
    text_of,
    without_repeats,
)

from common.data import corpus
from common.data.indexed_dataset import Index
from common.errors import DataError
from llama31_8b import prepare

PAGE = """<!DOCTYPE html><html><head><title>Menu</title><style>p {}</style>
<script>if (a < b) {}</script></head><body>
<nav><ul><li>Menu</li></ul></nav>
<div class="big sphinxsidebar"><div>Menu</div> Menu</div><h1>Sea &amp;
land<a class="headerlink">Menu</a></h1><p>One <b>two</b>
three<br/>four</p><ul><li>five</li><li>six</li></ul>
<table><tr><td>seven</td><td>eight</td></tr></table>
<pre>
  def f():

    return "&lt;"
</pre><p>nine
ten</p><footer>Menu</footer></body></html>"""
TEXT = (
    "Sea & land\n\nOne two three\nfour\n\nfive\nsix\n\nseven eight\n\n  def f():\n\n"
    '    return "<"\n\n\nnine ten'
)
WORDS = (
    "lorem",
    "ipsum",
    "dolor",
    "sit",
    "amet",
    "consetetur",
    "sadipscing",
    "elitr",
    "sed",
    "diam",
)


def prose(seed: int, paragraphs: int = 3) -> str:
    """Paragraphs longer than LONG, different for every seed."""
    return "\n\n".join(
        " ".join(f"{word} {seed * 7919 + 31 * number + place}" for place, word in enumerate(WORDS))
        for number in range(paragraphs)
    )


def page(text: str) -> str:
    return (
        "<html><body><nav>Menu</nav>"
        + "".join(f"<p>{paragraph}</p>" for paragraph in text.split("\n\n"))
        + "</body></html>"
    )


def test_a_page_becomes_lines_and_paragraphs_without_menus():
    parser = PlainText()
    parser.feed(PAGE)
    parser.close()
    assert "".join(parser.parts).strip() == TEXT


def test_a_file_needs_english_text(tmp_path):
    def found(name: str, text: str) -> str:
        (tmp_path / name).write_bytes(
            gzip.compress(text.encode()) if name.endswith(".gz") else text.encode()
        )
        return text_of(tmp_path / name)

    text = prose(1)
    assert (
        found("a.html", page(text))
        == found("a.txt", text.replace("\n", "\r\n"))
        == found("a.rst.gz", text)
        == text + "\n"
    )
    assert (
        found("b.html", page("Too short.")) == "" and found("c.txt", text.replace("e", "ä")) == ""
    )
    assert (
        found("d.txt", text.replace("elitr ", "élitr\xa0")) == text.replace("elitr", "élitr") + "\n"
    )


def test_each_page_counts_once(tmp_path):
    names = [
        "a.html",
        "a.rst.gz",
        "sources/a.txt",
        "b.md",
        "c.htm",
        "de-DE/d.html",
        "en-US/e.html",
        "genindex.html",
        "x/class-use/A.html",
        "f.png",
    ]
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    (tmp_path / "g.html").symlink_to(tmp_path / "a.html")
    assert [str(path.relative_to(tmp_path)) for path in files_of(tmp_path)] == [
        "a.html",
        "c.htm",
        "en-US/e.html",
        "b.md",
    ]


def test_what_repeats_is_left_out():
    own = [prose(number, 1) + "\n\n" + prose(number + 100, 1) for number in range(8)]
    marked = prose(50, 1).replace("lorem", "*lorem*")
    texts = [
        f"Heading\n\n{own[n]}\n\n{prose(50, 1) if n % 2 else marked}\n\n=== 17 ===\n\n17\n\n---\n"
        for n in range(8)
    ]
    texts += [
        f"{prose(50, 1)}\n\n{prose(51, 1)}\n",
        f"{prose(51, 1)}\n\n{prose(50, 1)}\n",
        f"{prose(60, 2)}\n\n" + "\n\n".join(own[:2]),
    ]
    texts += [f"{prose(number, 1)[:150]}\n\n{prose(52, 1)[:120]}\n" for number in (70, 71)]
    found = [
        text
        for _, text in without_repeats({bytes([n]): ("p", text) for n, text in enumerate(texts)})
    ]
    assert len(prose(50, 1)) >= LONG and len(found) == 9, (
        "too little is left of three, and of another less than half"
    )
    assert found[0] == f"Heading\n\n{own[0]}\n\n{marked}\n"
    assert (
        found[1] == f"Heading\n\n{own[1]}\n"
        and found[2] == f"Heading\n\n{own[2]}\n"
        and found[3:] == [*(f"{text}\n" for text in own[3:]), texts[-2]]
    )


@pytest.fixture
def packages(tmp_path):
    """Two packages of three pages each, of which one is in both."""
    for package, numbers in (("tea-doc", (1, 2, 3)), ("coffee-doc", (3, 4, 5))):
        for number in numbers:
            path = tmp_path / "packages" / package / "usr" / f"{number}.html"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(page(prose(number)))
        (path.parent / "short.html").write_text(page("Too short."))
    return tmp_path / "packages"


@pytest.fixture
def data_dir(miniature_data, tmp_path):
    """A function that makes a folder with the miniature's data."""
    return lambda name: shutil.copytree(miniature_data, tmp_path / name)


def texts_of(prefix) -> list[str]:
    index = Index.read(prefix)
    tokenizer = corpus.load_sentencepiece(prefix.parent / prepare.TOKENIZER)
    tokens = index.open_tokens()
    return [
        tokenizer.decode(tokens.read_sequence(n, 0, int(length)).tolist())
        for n, length in enumerate(index.sequence_lengths)
    ]


@pytest.mark.slow
def test_the_token_files_hold_each_text_once_in_an_order_of_their_own(packages, data_dir, capsys):
    with pytest.raises(DataError, match="1,000,000 tokens"):
        prepare_text(packages, data_dir("too_few"), 1_000_000, 1)
    out = capsys.readouterr().out
    assert out.startswith("5 documents, ")
    tokens = int(out.split(" tokens\n")[0].split()[-1].replace(",", ""))
    prefix = prepare_text(packages, data_dir("all"), tokens, 2)
    texts = texts_of(prefix)
    assert prefix.name == NAME and sorted(texts) == sorted(
        f"{prose(number)}\n" for number in range(1, 6)
    )
    assert (
        Index.read(prefix).num_tokens == tokens
        and "2 packages, 5 documents" in capsys.readouterr().out
    )

    (packages / "tea-doc").rename(packages / "another-doc")
    again = prepare_text(packages, data_dir("again"), tokens, 1)
    assert prefix.with_suffix(".bin").read_bytes() == again.with_suffix(".bin").read_bytes()
    shutil.rmtree(packages)
    assert prepare_text(packages, prefix.parent, tokens, 1) == prefix, "built once"


@pytest.mark.slow
def test_it_stops_at_the_first_document_that_is_enough(packages, data_dir):
    first = prepare_text(packages, data_dir("one"), 1, 1)
    second = prepare_text(packages, data_dir("two"), Index.read(first).num_tokens + 1, 1)
    assert (
        len(texts_of(first)) == 1
        and len(texts_of(second)) == 2
        and texts_of(second)[:1] == texts_of(first)
    )


@pytest.mark.skipif(shutil.which("dpkg-deb") is None, reason="needs Debian's dpkg")
@pytest.mark.slow
def test_a_package_may_be_packed(packages, data_dir):
    unpacked = prepare_text(packages, data_dir("unpacked"), 1200, 1)
    for name in ("tea-doc", "coffee-doc"):
        control = packages / name / "DEBIAN" / "control"
        control.parent.mkdir()
        control.write_text(
            f"Package: {name}\nVersion: 1\nArchitecture: all\n"
            "Maintainer: nobody <nobody@example.org>\nDescription: test\n"
        )
        subprocess.run(
            [
                "dpkg-deb",
                "--root-owner-group",
                "--build",
                packages / name,
                packages / f"{name}_1_all.deb",
            ],
            check=True,
        )
        shutil.rmtree(packages / name)
    assert texts_of(prepare_text(packages, data_dir("packed"), 1200, 1)) == texts_of(unpacked)
