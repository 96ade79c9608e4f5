"""Prepare the data of `llama31_8b`.

The commands build the miniature's data, convert text, verify MLCommons' files, and print how to
fetch them.

    ./run_and_time.sh llama31_8b prepare miniature --data-dir D
    ./run_and_time.sh llama31_8b prepare convert --input FILES... --tokenizer T --output-prefix P
        [--key text] [--processes N]
    ./run_and_time.sh llama31_8b prepare verify --data-dir D [--manifest M.json] [--full]
        [--write-manifest M.json]
    ./run_and_time.sh llama31_8b prepare fetch --data-dir D [--download]

No command deletes or overwrites a file that it did not create. Messages go to stderr. The exit code
names the kind of failure (docs/troubleshooting.md).
"""

from __future__ import annotations

import argparse
import http.client
import platform
import sys
import urllib.error
import urllib.request
from dataclasses import replace
from pathlib import Path

from common.command_line import Parser, add_command, program
from common.data import corpus
from common.data.hub import download
from common.data.manifest import Manifest, PairFacts
from common.data.preparation import (
    Recipe,
    build_once,
    lack_of_space,
    require_data_dir,
    say,
)
from common.data.text_inputs import add_text_options
from common.errors import first_line
from common.terminal import data_size
from llama31_8b.rules import CLOSED, MINIATURE

# Raise it when the corpus, the vocabulary or the format changes: existing data is then rebuilt.
MINIATURE_RECIPE = 1
TOKENIZER = "tokenizer.model"
SHIPPED_MANIFEST = Path(__file__).with_name("manifest.json")

TOKENIZER_REPOSITORY = "meta-llama/Llama-3.1-8B"  # gated: its license must be accepted on its page
TOKENIZER_FILE = "tokenizer.json"  # input of `convert`
DATA_URI = (
    "https://training.mlcommons-storage.org/metadata/llama-3-1-8b-preprocessed-c4-dataset.uri"
)
DOWNLOADER = "https://github.com/mlcommons/r2-downloader"
(DATA,) = CLOSED.downloads
LOGIN_CODES = (301, 302, 303, 307, 308, 401, 403)  # of a storage behind a login
# Whether the storage asked for a login (None: it did not answer) -> what that means, what to do.
ACCESS = {
    False: ("It needs no login.", "It asks for no login."),
    True: (
        "It needs a login in a browser, which this program cannot do for you.",
        "A browser opens once. Without a browser, ask\n   MLCommons for service credentials "
        "(option -s).",
    ),
    None: (
        "So it is unknown whether it needs a login.",
        "If it needs a login, a browser opens once.\n   Without a browser, ask MLCommons for "
        "service credentials (option -s).",
    ),
}
HOW_TO_FETCH = f"""\
No token files were downloaded.
{{access}}
Missing in {{data_dir}}: {{missing}}

1. Get MLCommons' downloader, and read it before you run it. It may install cloudflared, and it
   checks MD5 sums.
     git clone {DOWNLOADER}
     less r2-downloader/mlc-r2-downloader.sh
2. Download about {data_size(DATA.size_bytes)}. {{login}}
     bash r2-downloader/mlc-r2-downloader.sh -d {{data_dir}} \\
       {DATA_URI}
3. If this created a folder inside {{data_dir}}, move the four files up to {{data_dir}}.
4. Check the files:
     {{check}} --full
   Record sizes and SHA-256, to compare later copies with them:
     {{check}} --write-manifest c4.json

Training reads token ids only, without the tokenizer or its license. To convert your own text, get
the tokenizer with fetch --download.
If access is refused, ask MLCommons (https://training.mlcommons-storage.org)."""


def miniature(data_dir: Path) -> None:
    """Build the vocabulary, token files and manifest of the miniature, unless they are complete."""
    library = f"the standard library of Python {platform.python_version()}"
    source = f"documentation of {library}, recipe {MINIATURE_RECIPE}"
    recipe = Recipe(
        title="miniature data",
        source=source,
        vocab_size=MINIATURE.shape.vocab_size,
        files=(TOKENIZER, *MINIATURE.data_files),
        manifest=MINIATURE.manifests[0],
    )
    build_once(data_dir, recipe, _build_miniature)


def _build_miniature(data_dir: Path) -> dict[str, PairFacts]:
    # Imports numpy, which parsing the command line does not need. So do the imports below.
    from common.data.indexed_dataset_writer import IndexedDatasetWriter

    train, validation = corpus.split(corpus.documents())
    corpus.train_sentencepiece(train, MINIATURE.shape.vocab_size, data_dir / TOKENIZER)
    tokenizer = corpus.load_sentencepiece(data_dir / TOKENIZER)
    pairs = {}
    for prefix, texts in (
        (MINIATURE.train_prefix, train),
        (MINIATURE.validation_prefix, validation),
    ):
        writer = IndexedDatasetWriter(data_dir / prefix, tokenizer.vocab_size())
        for ids in tokenizer.encode(texts):
            writer.add(ids)
        index = writer.finish()
        pairs[prefix] = PairFacts(index.dtype.name, index.num_documents, index.num_tokens)
        say(f"{prefix}: {index.num_documents:,} documents, {index.num_tokens:,} tokens")
    return pairs


def fetch(data_dir: Path, download_tokenizer: bool) -> None:
    """Print how to get MLCommons' files, by what their storage answers.

    `download_tokenizer`: download the tokenizer first.

    The instructions are printed before an error is raised. Raises the errors of `download`.
    """
    if not download_tokenizer:
        _say_how(data_dir)
        return
    try:
        download(TOKENIZER_REPOSITORY, "main", [TOKENIZER_FILE], data_dir, "model")
    finally:  # the command ends with the failure of the download
        _say_how(data_dir)


def _say_how(data_dir: Path) -> None:
    """Print how to get the missing files, or how to check them if all are there."""
    missing = ", ".join(name for name in CLOSED.data_files if not (data_dir / name).exists())
    check = f"./run_and_time.sh llama31_8b prepare verify --data-dir {data_dir}"
    if not missing:
        say(f"{data_dir}: all four files are present. Check them:\n  {check} --full")
        return
    needs_login, answer = asks_for_login(DATA_URI)
    meaning, login = ACCESS[needs_login]
    access = f"MLCommons' storage {answer}. {meaning}"
    texts = {"access": access, "login": login, "missing": missing, "check": check}
    say(HOW_TO_FETCH.format(data_dir=data_dir, **texts))
    if lack := lack_of_space(data_dir, DATA.size_bytes, DATA.what):
        say(f"warning: {lack}")


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Make a redirect an HTTPError: the storage redirects to its login."""

    def redirect_request(self, *args: object) -> None:
        return None


def asks_for_login(url: str) -> tuple[bool | None, str]:
    """Ask by one HEAD request whether `url` needs a login. Return that, and the answer in words.

    None if the answer does not say so, or if there is none.
    """
    request = urllib.request.Request(url, method="HEAD")
    try:
        with urllib.request.build_opener(_NoRedirect).open(request, timeout=10):
            return False, "can be read"
    except urllib.error.HTTPError as error:
        if error.code in LOGIN_CODES:
            return True, f"cannot be read (HTTP {error.code})"
        return None, f"failed (HTTP {error.code})"
    except (OSError, http.client.HTTPException) as error:
        return None, f"did not answer ({getattr(error, 'reason', None) or first_line(error)})"


def convert(args: argparse.Namespace) -> None:
    """Run `prepare convert`."""
    from llama31_8b.convert import convert

    convert(args.input, args.tokenizer, args.output_prefix, args.key, args.processes)


def verify(args: argparse.Namespace) -> None:
    """Run `prepare verify`."""
    from common.data.verification import verify

    require_data_dir(args.data_dir)
    manifest = Manifest.read(args.manifest)
    output = args.write_manifest
    found = verify(args.data_dir, manifest, args.manifest, args.full or output is not None)
    if output is not None:
        source = f"{manifest.source}; facts as found in a downloaded copy"
        replace(found, source=source).write(output)
        say(f"wrote {output}: sizes, SHA-256 and counts as found here")


def parser(benchmark: str = "llama31_8b") -> Parser:
    """Return the parser. `work(args)` of the parsed arguments executes the command."""
    parser = Parser(f"{benchmark} prepare", __doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    data = Parser("", add_help=False)
    data.add_argument("--data-dir", type=Path, required=True, help="directory of the token files")

    add_command(
        commands,
        "miniature",
        "build the data of the CPU miniature",
        lambda args: miniature(args.data_dir),
        data,
    )
    _add_convert(commands)
    _add_verify(commands, data)
    _add_fetch(commands, data)
    return parser


def _add_convert(commands: argparse._SubParsersAction[Parser]) -> None:
    texts = add_command(commands, "convert", "convert text to .bin and .idx files", convert)
    add_text_options(texts)
    texts.add_argument(
        "--tokenizer",
        type=Path,
        required=True,
        help="SentencePiece model, or tokenizer.json of Llama 3.1",
    )
    texts.add_argument(
        "--output-prefix", type=Path, required=True, help="path of the output without .bin or .idx"
    )


def _add_verify(commands: argparse._SubParsersAction[Parser], data: Parser) -> None:
    files = add_command(
        commands, "verify", "compare downloaded files with a manifest", verify, data
    )
    files.add_argument(
        "--manifest",
        type=Path,
        default=SHIPPED_MANIFEST,
        help="manifest to compare with (default: %(default)s)",
    )
    files.add_argument("--full", action="store_true", help="read every token and every byte")
    files.add_argument(
        "--write-manifest",
        type=Path,
        metavar="FILE",
        help="write sizes, SHA-256 and counts to FILE (reads every byte)",
    )


def _add_fetch(commands: argparse._SubParsersAction[Parser], data: Parser) -> None:
    how = add_command(
        commands,
        "fetch",
        "print how to get MLCommons' files",
        lambda args: fetch(args.data_dir, args.download),
        data,
    )
    how.add_argument(
        "--download",
        action="store_true",
        help=f"download {TOKENIZER_FILE} of {TOKENIZER_REPOSITORY}, for convert",
    )


main = program(parser, lambda args: args.work(args))

if __name__ == "__main__":
    sys.exit(main())
