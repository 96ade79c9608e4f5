"""Typos, missing arguments and wrong orders, and the page that shows what each is answered with. Standard library only."""

from common.errors import ConfigError
from common.paths import ROOT
from launch import cli

PAGE = ROOT / "docs" / "screens" / "typos.txt"
HEAD = "What a typo, a missing argument or a wrong order is answered with (python3 -m tests.tools.docs_tables writes this page).\n"
RUN = "./run_and_time.sh"

# What was typed: what is wrong, and what to do.
TABLE = {
    # verbs and benchmarks
    "": ("which benchmark or verb?", "--help lists the verbs"),
    "lama31_8b": ("unknown benchmark or verb lama31_8b", "did you mean llama31_8b?"),
    "llama2_70b_lore": ("unknown benchmark or verb", "did you mean llama2_70b_lora?"),
    "LLAMA31_8B": ("unknown benchmark or verb LLAMA31_8B", "did you mean llama31_8b?"),
    "gpt5": ("unknown benchmark or verb gpt5", "there are: llama2_70b_lora, llama31_8b, run"),
    "repport results": ("unknown benchmark or verb repport", "did you mean report?"),
    "llama31_8b benhc": ("unknown verb benhc", "did you mean bench?"),
    "llama31_8b dance": ("unknown verb dance", "there are: run"),
    "llama31_8b results/x": ("unknown verb results/x", "there are: run"),
    "run": ("run needs a benchmark", f"{RUN} llama31_8b run ..."),
    "bench --steps 3": ("bench needs a benchmark", f"{RUN} llama31_8b bench ..."),
    "prepare lama31_8b fetch": ("unknown benchmark lama31_8b", "did you mean llama31_8b?"),
    "preflight lama31_8b": ("lama31_8b: one word too many", f"{RUN} preflight --help"),
    "llama31_8b merge": ("llama31_8b has no verb merge", f"{RUN} llama2_70b_lora merge ..."),
    "version": ("unknown benchmark or verb version", "did you mean --version?"),
    # order
    "--config x.toml llama31_8b": ("--config comes before the benchmark or verb", f"{RUN} llama31_8b --config"),
    "llama31_8b score results": ("score takes no benchmark", f"{RUN} score results"),
    "check x --weror": ("unknown option --weror", "did you mean --werror?"),
    "llama31_8b NEXP=10": ("NEXP=10 is no benchmark or verb", f"NEXP=10 {RUN} llama31_8b"),
    "NEXP=10 llama31_8b bench": ("NEXP=10 is no benchmark or verb", f"NEXP=10 {RUN} llama31_8b bench"),
    "--versoin": ("--versoin comes before the benchmark or verb", "did you mean --version?"),
    "-v": ("-v comes before the benchmark or verb", f"{RUN} llama31_8b -v ..."),
    # options and their values
    "llama31_8b --quite": ("unknown option --quite", "did you mean --quiet?"),
    "llama31_8b --confg x.toml": ("unknown option --confg", "did you mean --config?"),
    "llama31_8b --dry-run": ("unknown option --dry-run", "there are: --help"),
    "llama31_8b --nexp=10": ("unknown option --nexp", "there are"),
    "llama31_8b --device gpu": ("--device gpu", "choose one of them"),  # not cpu
    "llama31_8b --device cudda": ("--device cudda", "did you mean cuda?"),
    "llama31_8b --config": ("argument --config: expected one argument", "--help"),
    "llama31_8b --max-failures two": ("argument --max-failures: invalid int value: 'two'", "--help"),
    "llama31_8b bench --step 5": ("unknown option --step", "did you mean --steps?"),
    "llama31_8b bench 5": ("5: one word too many", "--help"),
    "score": ("the following arguments are required: DIR_OR_LOG", f"{RUN} score --help"),
    "score results --agianst x": ("unknown option --agianst", "did you mean --against?"),
    "check x --ruleset 6.1": ("--ruleset 6.1", "did you mean 6.1.0?"),
    "report": ("the following arguments are required: DIR", f"{RUN} report --help"),
    "describe": ("the following arguments are required: --out", f"{RUN} describe --help"),
    "package --out x": ("the following arguments are required: --benchmark, --system, --org", f"{RUN} package --help"),
    "plan --modle llama3.1-8b": ("unknown option --modle", "did you mean --model?"),
    "llama31_8b plan --config a --all": ("argument --all: not allowed with argument --config", "--help"),
    "llama31_8b gemms recrod x": ("unknown step recrod", "did you mean record?"),
    "llama31_8b prepare": ("the following arguments are required: command", "--help"),
    "llama31_8b prepare fetsh --data-dir x": ("unknown command fetsh", "did you mean fetch?"),
    "llama31_8b prepare verify --data-dir x --ful": ("unknown option --ful", "did you mean --full?"),
    "tuning aply": ("unknown verb aply", "did you mean apply?"),
    "tuning": ("the following arguments are required: verb", f"{RUN} tuning --help"),
    "throughput": ("the following arguments are required: measurement", f"{RUN} throughput --help"),
    "throughput gem": ("unknown measurement gem", "did you mean gemm?"),
    "completion fish": ("unknown shell fish", "choose one of them"),
}


def page() -> str:
    """Raises AssertionError where a line is taken for right."""
    lines = [HEAD]
    for line in TABLE:
        try:
            cli.read(line.split())
        except ConfigError as error:
            lines.append(f"$ {RUN}{' ' * bool(line)}{line}\n{error.lines()}\n")
        else:
            raise AssertionError(f"{line}: taken for right")
    return "\n".join(lines)
