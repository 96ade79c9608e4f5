"""Convert text to Megatron's token files for training and validation.

The inputs are JSON lines, Parquet, plain text, or a Hugging Face data set on disk.

The tokenizer is a tokenizer.json or a SentencePiece model, or a folder with a tokenizer.json or
tokenizer.model, and is copied to the folder of the token files. Each document ends with the
tokenizer's end-of-text token. An interrupted preparation continues where it stopped.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from common.command_line import Parser, add_command, program
from common.data.text_inputs import add_text_options
from common.values import count, number

CHAT = """Convert conversations to token files whose loss counts the answers only.

A record of the inputs (a JSON line, an object of a JSON array, or a row of a table) has messages
(role, content), ShareGPT's conversations (from, value), instruction, input and output, or prompt
and completion. It may also have system and tools.

The chat template of the tokenizer's folder renders it. A mask file has a 1 for each token of an
answer, with the end of its turn. A conversation that the template refuses or rewrites is refused.
"""


def fraction(text: str) -> float:
    """Parse an argument that is a number between 0 and 1, both excluded."""
    value = number(text)
    if not 0 < value < 1:
        raise argparse.ArgumentTypeError(f"'{text}' is not between 0 and 1")
    return value


def text(args: argparse.Namespace) -> None:
    """Run `prepare text`."""
    # Imports numpy, which parsing the command line does not need.
    from open_llama.text import Settings, prepare_text

    tokenizer = str(args.tokenizer.absolute()) if args.tokenizer else ""
    settings = Settings(tokenizer, args.eos, args.key, args.validation_fraction)
    folder = args.data_dir.absolute()
    prepare_text(args.input, folder, settings, args.processes, args.train_tokenizer)


def chat(args: argparse.Namespace) -> None:
    """Run `prepare chat`."""
    text(argparse.Namespace(**vars(args), key=None, train_tokenizer=0))


def verify(args: argparse.Namespace) -> None:
    """Run `prepare verify`."""
    from open_llama.text import verify_text

    verify_text(args.data_dir.absolute(), args.full)


def parser(benchmark: str = "open_llama") -> Parser:
    """Return the parser. `work(args)` of the parsed arguments executes the command."""
    example = "open_llama prepare text --input docs/ --train-tokenizer 4096 --data-dir data/docs"
    parser = Parser(f"{benchmark} prepare", __doc__, [example])
    commands = parser.add_subparsers(dest="command", required=True)
    _add_text(commands)
    _add_chat(commands)
    _add_verify(commands)
    return parser


def _add_text(commands: argparse._SubParsersAction[Parser]) -> None:
    texts = commands.add_parser("text", help="tokenize text", description=__doc__)
    texts.set_defaults(work=text)
    add_text_options(texts)
    _add_outputs(texts)
    which = texts.add_mutually_exclusive_group(required=True)
    which.add_argument(
        "--tokenizer", type=Path, metavar="PATH", help="tokenizer file of the model, or its folder"
    )
    which.add_argument(
        "--train-tokenizer",
        type=count,
        default=0,
        metavar="N",
        help="train a SentencePiece tokenizer of N pieces on the text",
    )


def _add_chat(commands: argparse._SubParsersAction[Parser]) -> None:
    chats = commands.add_parser("chat", help="tokenize conversations", description=CHAT)
    chats.set_defaults(work=chat)
    add_text_options(chats, key=False)
    _add_outputs(chats)
    chats.add_argument(
        "--tokenizer",
        type=Path,
        required=True,
        metavar="FOLDER",
        help="folder of the model, with tokenizer.json and a chat template",
    )


def _add_outputs(texts: Parser) -> None:
    """Add the options that `text` and `chat` share, besides those of the inputs."""
    texts.add_argument(
        "--data-dir", type=Path, required=True, metavar="DIR", help="folder for the token files"
    )
    texts.add_argument(
        "--eos", default="", metavar="TOKEN", help="end-of-text token (default: the tokenizer's)"
    )
    texts.add_argument(
        "--validation-fraction",
        type=fraction,
        default=0.01,
        metavar="X",
        help="share of the documents held out for validation (default: %(default)s)",
    )


def _add_verify(commands: argparse._SubParsersAction[Parser]) -> None:
    files = add_command(commands, "verify", "compare token files with their record", verify)
    files.add_argument(
        "--data-dir", type=Path, required=True, metavar="DIR", help="folder of the token files"
    )
    files.add_argument("--full", action="store_true", help="read every token and every byte")


main = program(parser, lambda args: args.work(args))

if __name__ == "__main__":
    sys.exit(main())
