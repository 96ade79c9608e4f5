"""Build a long training text from the documentation that a Linux distribution ships.

    PYTHONPATH=. python3 tests/gpu/studies/documentation_text.py --packages FOLDER --data-dir DIR
        [--tokens 100000000] [--processes 2]

The text of number_formats.py is too short for thousands of steps without a repetition. FOLDER holds
Debian packages, as files (`apt-get download NAME ...`) or each unpacked into a folder of its own
(`dpkg -x FILE.deb FOLDER/NAME`). Writes DIR/documentation_text_document.bin and .idx with the
miniature's vocabulary.

A document is a file in English: HTML (without its menus), reStructuredText, Markdown or plain text.
Documents are ordered by the SHA-256 of their texts, so the order does not depend on the order in
which packages are read. A long paragraph is kept only once and a short one three times, because
many classes inherit the same methods and many files end with the same links.

On 2026-11-23, the following 62 packages of Debian 12 (712 MB of files) held 101,485 documents with
615 million characters. The first 33,547 documents after removing repetitions gave 100,009,209
tokens of 2.35 characters. This took six minutes on two cores and 2 GB of memory.

    anarchism ant-doc apache2-doc buildbot-doc cmake-doc cppreference-doc-en-html db5.3-doc
    debian-handbook debian-reference-en derby-doc dpdk-doc erlang-doc exim4-doc-html gap-doc ghc-doc
    gimp-help-en git-doc grass-doc installation-guide-amd64 libboost1.74-doc libeigen3-doc
    libglib2.0-doc libgtk-4-doc libopenjfx-java-doc libpcl-doc libreoffice-help-en-us
    lilypond-doc-html linux-doc-6.1 llvm-14-doc maxima-doc netcdf-doc neutron-doc nodejs-doc
    nova-doc octave-doc openjdk-17-doc postfix-doc postgresql-doc-15 python-astropy-doc
    python-dask-doc python-django-doc python-pandas-doc python-pyqtgraph-doc python-scipy-doc
    python-sklearn-doc python-sqlalchemy-doc python-statsmodels-doc python-sympy-doc python3.11-doc
    qtbase5-doc-html racket-doc rust-doc selinux-policy-doc shorewall-doc slurm-wlm-doc sphinx-doc
    sqlite3-doc swi-prolog-doc twisted-doc vim-doc wx3.2-doc zsh-doc
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator
from functools import cache, partial
from html.parser import HTMLParser
from multiprocessing.pool import Pool
from pathlib import Path

import numpy as np

from common.data import corpus
from common.data.indexed_dataset_writer import IndexedDatasetWriter
from common.data.preparation import Recipe, build_once
from common.errors import DataError
from llama31_8b import prepare
from llama31_8b.rules import MINIATURE

NAME = "documentation_text_document"
MIN_CHARACTERS = 200  # of a document
# A paragraph of fewer than LONG characters may be a heading or a line of code: it is taken REPEATS
# times.
LONG = 100
REPEATS = 3
HTML, PLAIN = (".html", ".htm", ".xhtml"), (".txt", ".rst", ".md")
INDEX = re.compile(
    r"genindex|py-modindex|index-all|index-files|doc-index|(name|class|module)Index|allclasses"
    r"|-members\.|/functions_|/globals_|/class-use/|package-(use|tree)"
    r"|/libraries/.*\.txt"  # tables of Hoogle, a search engine for Haskell
)
TRANSLATION = re.compile(r"/(?!en)[a-z]{2}[-_][A-Z]{2}/")
LINES = {"div", "li", "tr", "dt", "dd", "br"}
PARAGRAPHS = {
    "p",
    "pre",
    "ul",
    "ol",
    "dl",
    "table",
    "blockquote",
    "section",
    "article",
    "hr",
    "main",
    "header",
}
PARAGRAPHS |= {"h1", "h2", "h3", "h4", "h5", "h6"}
NO_TEXT = {"script", "style", "title", "nav", "footer", "svg", "button", "select", "noscript"}
MENUS = {
    "navigation",
    "navheader",
    "navfooter",
    "sphinxsidebar",
    "related",
    "bd-sidebar",
    "tocset",
    "t-navbar",
    "footer",
    "headerlink",
}
MENUS |= {"viewcode-back", "lineno", "linenos", "line-numbers", "src-line-numbers"}
Documents = dict[bytes, tuple[str, str]]  # SHA-256 of the text -> package, text


def breaks_of(element: str) -> int:
    """Return the number of line ends before and after an element."""
    if element in PARAGRAPHS:
        return 2
    return 1 if element in LINES else 0


class PlainText(HTMLParser):
    """Parser that collects the text of a page in `parts`, without menus."""

    def __init__(self) -> None:
        super().__init__()
        self.parts: list[str] = []
        self.breaks = self.preformatted = self.depth = 0
        # The element that is being left out with all that it contains, and in `depth` the number
        # of its kind that are open.
        self.left_out = ""

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        names: set[str] = set()
        for key, value in attributes:
            if key in ("class", "role"):
                names.update((value or "").split())
        is_menu = tag in ("a", "div", "pre", "span", "td") and bool(names & MENUS)
        if self.left_out:
            if tag == self.left_out:
                self.depth += 1
        elif tag in NO_TEXT or is_menu:
            self.left_out = tag
            self.depth = 1
        else:
            if tag == "pre":
                self.preformatted += 1
            self.handle_startendtag(tag, attributes)

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.breaks = max(self.breaks, breaks_of(tag))
        if tag in ("td", "th"):
            self.handle_data(" ")

    def handle_endtag(self, tag: str) -> None:
        if self.left_out:
            if tag == self.left_out:
                self.depth -= 1
            if self.depth == 0:
                self.left_out = ""
        else:
            if tag == "pre" and self.preformatted > 0:
                self.preformatted -= 1
            self.breaks = max(self.breaks, breaks_of(tag))

    def handle_data(self, data: str) -> None:
        if not self.preformatted:
            data = re.sub(r"\s+", " ", data)
        if self.breaks:
            data = data.lstrip("\n" if self.preformatted else None)
        if data and not self.left_out:
            self.parts += ["\n" * self.breaks, data]
            self.breaks = 0


def text_of(path: Path) -> str:
    """Return the text of a file, or "" if it has too little or is not in English."""
    content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    text = content.decode(errors="replace")
    if path.suffix in HTML:
        parser = PlainText()
        parser.feed(text)
        parser.close()
        text = "".join(parser.parts)
    text = (
        re.sub(r"[ \t\r\f]+\n", "\n", text.replace("\xa0", " ").replace("\u200b", "")).strip()
        + "\n"
    )
    foreign = 0 if text.isascii() else len(re.findall(r"[^\W\d_a-zA-Z]|\ufffd", text))
    return text if len(text) >= MIN_CHARACTERS and foreign <= 0.01 * len(text) else ""


def files_of(package: Path) -> list[Path]:
    """Return the files with documentation. A page that exists as HTML and as source is HTML."""
    names = {
        path: f"/{path.relative_to(package)}"
        for path in sorted(package.rglob("*"))
        if path.is_file() and not path.is_symlink()
    }
    paths = [
        path
        for path, name in names.items()
        if not INDEX.search(name) and not TRANSLATION.search(name)
    ]
    html = [path for path in paths if path.suffix in HTML]
    stems = {path.name.partition(".")[0] for path in html}
    plain = [path for path in paths if path.name.removesuffix(".gz").endswith(PLAIN)]
    return html + [path for path in plain if path.name.partition(".")[0] not in stems]


def collect(packages: Path, pool: Pool) -> Documents:
    """Return the texts of all packages, each text once."""
    documents: Documents = {}
    for package in sorted(packages.iterdir()):
        with tempfile.TemporaryDirectory() as folder:
            if package.suffix == ".deb":
                subprocess.run(["dpkg", "-x", package, folder], check=True)
            for text in pool.imap(
                text_of, files_of(package if package.is_dir() else Path(folder)), chunksize=16
            ):
                documents.setdefault(
                    hashlib.sha256(text.encode()).digest(), (package.name.partition("_")[0], text)
                )
    documents.pop(hashlib.sha256(b"").digest(), None)
    return documents


def without_repeats(documents: Documents) -> Iterator[tuple[str, str]]:
    """Yield (package, text) in the order of the texts' SHA-256.

    Paragraphs that came before or have no words are left out.
    """
    seen: Counter[bytes] = Counter()
    for _, (package, text) in sorted(documents.items()):
        kept = []
        for paragraph in re.split(r"\n\s*\n", text):
            words = " ".join(re.findall(r"\w+", paragraph))  # the same whether marked up or not
            key = hashlib.blake2b(words.encode(), digest_size=8).digest()
            seen[key] += 1
            allowed = 1 if len(paragraph) >= LONG else REPEATS
            if re.search("[a-zA-Z]", words) and seen[key] <= allowed:
                kept.append(paragraph)
        # With less text left, the document is a copy of earlier ones.
        if sum(map(len, kept)) >= max(MIN_CHARACTERS, len(text) / 2):
            yield package, "\n\n".join(kept).strip("\n") + "\n"


tokenizer_at = cache(corpus.load_sentencepiece)  # each process loads it once


def encode(tokenizer: Path, document: tuple[str, str]) -> tuple[str, int, np.ndarray]:
    """Return (package, characters, ids) of `document`, which is (package, text)."""
    package, text = document
    return package, len(text), np.array(tokenizer_at(tokenizer).encode(text), np.uint16)


def prepare_text(packages: Path, data_dir: Path, tokens: int, processes: int = 2) -> Path:
    """Build token files of at least `tokens` tokens, whole documents, once. Return their prefix.

    Files that another machine built are taken as they are, without a look at `packages`. Raises
    DataError if those have too little text.
    """

    def build(folder: Path) -> dict:
        prepare.miniature(folder)
        writer = IndexedDatasetWriter(folder / NAME, MINIATURE.shape.vocab_size)
        taken: Counter[str] = Counter()  # package -> tokens
        characters = 0
        with Pool(processes) as pool:
            documents = collect(packages, pool)
            print(
                f"{len(documents):,} documents, "
                f"{sum(len(text) for _, text in documents.values()):,} characters found",
                flush=True,
            )
            for package, length, ids in pool.imap(
                partial(encode, folder / prepare.TOKENIZER), without_repeats(documents), chunksize=8
            ):
                writer.add(ids)
                taken[package] += len(ids)
                characters += length
                if taken.total() >= tokens:
                    break
        for package, number in taken.most_common():
            print(f"{number:12,} tokens of {package}")
        print(
            f"{len(taken)} packages, {len(writer.lengths):,} documents, {characters:,} "
            f"characters, {taken.total():,} tokens",
            flush=True,
        )
        if taken.total() < tokens:
            raise DataError(
                f"{packages}: expected {tokens:,} tokens, got {taken.total():,}",
                "there is too little text",
                "add packages",
            )
        writer.finish()
        return {}

    files, source = (f"{NAME}.bin", f"{NAME}.idx"), f"{NAME}, {tokens} tokens, recipe 1"
    build_once(
        data_dir,
        Recipe("documentation", source, MINIATURE.shape.vocab_size, files, f"{NAME}.json"),
        build,
    )
    return data_dir / NAME


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--packages", type=Path, required=True)
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=100_000_000)
    parser.add_argument("--processes", type=int, default=2)
    args = parser.parse_args()
    prepare_text(args.packages, args.data_dir, args.tokens, args.processes)


if __name__ == "__main__":
    main()
