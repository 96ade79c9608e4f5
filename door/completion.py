"""`completion bash|zsh`: a script that completes benchmarks, verbs, their options and choices, made from the parsers themselves.

source <(./run_and_time.sh completion bash)          in ~/.bashrc, with the path of the project
"""

from __future__ import annotations

import sys

from common.command_line import Parser
from door.verbs import NEVER, ROOT, SWITCHES, VERBS, parser_of
from launch.select_config import benchmarks

SCRIPT = """\
_run_and_time() {{
    local verb= word
    for word in "${{COMP_WORDS[@]:1:COMP_CWORD-1}}"; do
        case $word in {verbs}) verb=$word; break ;; esac
    done
    [[ -n $verb || $COMP_CWORD -lt 2 ]] || case ${{COMP_WORDS[1]}} in {benchmarks}) [[ ${{COMP_WORDS[2]}} != -* ]] || verb=run ;; esac
    case $verb in
{cases}
        *) words='{first}' ;;
    esac
    mapfile -t COMPREPLY < <(compgen -W "$words" -- "${{COMP_WORDS[COMP_CWORD]}}")
}}
complete -o default -F _run_and_time run_and_time.sh ./run_and_time.sh
"""
ZSH = "autoload -U +X bashcompinit && bashcompinit\n"


def parser(benchmark: str) -> Parser:
    parser = Parser("completion", __doc__, ["completion zsh > ~/.run_and_time_completion"])
    parser.add_argument("shell", choices=("bash", "zsh"))
    return parser


def words_of(parser: Parser) -> list[str]:
    """Its options, and the choices of its positional arguments."""
    choices = [str(choice) for action in parser._actions if not action.option_strings for choice in action.choices or ()]
    return [*choices, *dict.fromkeys(parser.options()), *SWITCHES]


def script(shell: str) -> str:
    known = benchmarks(ROOT)
    found = {
        name: dict.fromkeys(word for each in known for parser in [parser_of(name, each)] if parser for word in words_of(parser))
        for name in VERBS
    }
    own = {name: known if VERBS[name].benchmark != NEVER else [] for name in VERBS}
    cases = "\n".join(f"        {name}) words='{' '.join([*own[name], *words])}' ;;" for name, words in found.items())
    text = SCRIPT.format(
        verbs="|".join(VERBS), benchmarks="|".join(known), cases=cases, first=" ".join([*known, *VERBS, "--help", "--version"])
    )
    return ZSH * (shell == "zsh") + text.replace("local verb= word", "local verb= word words")


if __name__ == "__main__":
    print(script(parser("").parse_args(sys.argv[1:]).shell), end="")
