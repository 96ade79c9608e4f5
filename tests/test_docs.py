"""What the pages under docs/ say, held to the code: tables, exit codes, quoted messages, links, verbs, and who measured what.

Blocks between `<!-- made: NAME ARGUMENTS -->` and `<!-- end -->` are made from configs, hardware table and published results:
`PYTHONPATH=. python tests/test_docs.py` writes them anew. All else on those pages is written by hand.
"""

import ast
import re
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest

from common import config as configs
from common import errors
from common.config import RunConfig
from common.errors import Interrupted, RunError
from common.hardware import GIB, KINDS, config_path, fp8_family
from launch.__main__ import VERBS
from launch.choose import benchmarks, key_value
from plan.command import config_class, load_all
from records.published import RESULTS

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted((ROOT / "README.md", *ROOT.glob("*/README.md"), *DOCS.rglob("*.md")))
GPU_PAGES = {name: DOCS / "gpus" / f"{name}.md" for name in (*KINDS, "CPU")}
TROUBLESHOOTING = DOCS / "troubleshooting.md"
AMD_KINDS = [name for name, kind in KINDS.items() if kind.vendor == "amd"]
NAMES_AN_AMD_GPU = re.compile(r"\bMI3\d\dX\b")
NOT_RUN = (
    "Nothing of this package was run on an AMD GPU",
    "nothing of this package was run on an AMD GPU",
    "Nothing here was run on an AMD GPU",
    "We have no AMD GPU. None of this was ever run on one",
    "written and compiled for AMD's GPUs in the tests, and were never run there",
    "Nothing on this page was measured by us",
)
SECTIONS = ["What is configured, and why", "Measured by us", "Published by others", "Never run"]
MADE = re.compile(r"(<!-- made: ([^>]+) -->\n).*?(<!-- end -->)", re.DOTALL)
name_of = lambda path: str(path.relative_to(ROOT))  # noqa: E731
each_page = pytest.mark.parametrize("page", PAGES, ids=name_of)


# --- the blocks that are made -----------------------------------------------------------------------------------------


def configs_of(gpu: str) -> list[tuple[str, str, RunConfig]]:
    """(benchmark, name, config) of every shipped config of this kind."""
    found = [(benchmark, *entry) for benchmark in reversed(benchmarks(ROOT)) for entry in load_all(ROOT, benchmark).items()]
    return [entry for entry in found if entry[2].gpu == gpu]


def linears(config: RunConfig) -> str:
    if not config.fp8:
        return config.precision
    formats = {"ocp": "e4m3, gradients e5m2", "fnuz": "e4m3fnuz, gradients e5m2fnuz"}[fp8_family(KINDS[config.gpu].arch)]
    return f"FP8 ({formats}), {config.fp8_recipe} scaling, engine {config.fp8}{', the head too' * config.fp8_head}"


def swiglu_input(config: RunConfig) -> str:
    kept = "8 bits" if config.fp8_swiglu_input else config.precision
    return kept + f", {config.offload_layers} layers' on the host" * bool(config.offload_layers)


def sharding(benchmark: str, config: RunConfig) -> str:
    """Where weights, gradients and optimizer states are."""
    if benchmark == "llama2_70b_lora" and config.fp8 == "torch":
        if config.frozen_base == "replicated_both":
            return "FP8 base and its transpose whole on each GPU"
        if config.frozen_base == "replicated" or config.gpus_per_node == 1:
            return "FP8 base whole on each GPU, transposed layer by layer"
        through = {"nccl": "collectives", "copy_engine": "copy engines"}[config.transport]
        return f"FP8 base and its transpose in shards, a layer gathered by {through} for each pass"
    what = "frozen base" if benchmark == "llama2_70b_lora" else "weights, gradients, Adam"
    when = "gathered again in backward" if config.reshard_after_forward else "weights gathered once per step"
    alone = "one process" + (", a layer's bf16 weights live while it computes" if config.reshard_after_forward else "")
    how = ", gradients by copy engines" if config.transport == "copy_engine" and benchmark == "llama31_8b" else ""
    return f"{what} in shards, {when}{how}" if config.world_size > 1 else alone


def blocks(config: RunConfig) -> str:
    return "fused" if config.fused_blocks else "compiled" if config.compile else "eager"


def micro_batches(config: RunConfig) -> str:
    return f"{config.micro_batch_size} x {config.gradient_accumulation_steps}"


def learning_rate(config: RunConfig) -> str:
    mantissa, exponent = f"{config.opt_base_learning_rate:e}".split("e")
    return f"{float(mantissa):g}e{int(exponent)}"


def markdown(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def card_block(gpu: str) -> str:
    kind = KINDS[gpu]
    units = "compute units" if kind.vendor == "amd" else "multiprocessors"
    peaks = f"{kind.peak_bf16_tflops:,.1f} bf16, {kind.peak_fp8_tflops:,.1f} FP8"
    family = {"ocp": "OCP", "fnuz": "fnuz"}[fp8_family(kind.arch)]
    head = ["architecture", "memory, GiB", units, "dense peak, TFLOP/s", "FP8 format"]
    return markdown(head, [[kind.arch, f"{kind.memory_bytes / GIB:.0f}", str(kind.compute_units), peaks, family]])


def configs_block(gpu: str) -> str:
    head = ["config", "global batch", "micro-batch x accumulation", "precision of the linears", "blocks", "SwiGLU's input kept in"]
    rows = [
        [
            f"[{benchmark}/{name}](../../configs/{benchmark}/{name}.toml)",
            str(config.global_batch_size),
            micro_batches(config),
            linears(config),
            blocks(config),
            swiglu_input(config),
            str(config.recompute_layers),
            sharding(benchmark, config),
        ]
        for benchmark, name, config in configs_of(gpu)
    ]
    return markdown([*head, "layers recomputed", "sharding"], rows)


def environment_block(gpu: str) -> str:
    """The [env] tables with the reasons that stand beside them, and in how many of the kind's configs."""
    reasons: dict[tuple[str, str, str], int] = {}
    for benchmark, name, config in configs_of(gpu):
        text = (ROOT / "configs" / benchmark / f"{name}.toml").read_text()
        for key, value in config.env.items():
            line = re.search(rf'^{key} = "[^"]*" *# (.+)$', text, re.MULTILINE)
            assert line, f"{name}: {key} has no reason beside it"
            reasons[key, value, line[1]] = reasons.get((key, value, line[1]), 0) + 1
    count = len(configs_of(gpu))
    rows = [[f"`{key}={value}`", why, f"{n} of {count}"] for (key, value, why), n in reasons.items()]
    return markdown(["variable", "why", "configs"], rows)


def published_block(gpu: str) -> str:
    head = ["round", "benchmark", "GPUs", "submitter", "global batch", "score, minutes", "samples/s", "evaluation, s"]
    rows = [
        [r.round, r.benchmark, str(r.gpus), r.submitter, str(r.batch), f"{r.score:.3f}", f"{r.samples_per_s:.3f}", f"{r.evaluation_s:.2f}"]
        for r in RESULTS
        if r.gpu == gpu and r.score
    ]
    return markdown(head, rows) if rows else "None that we compare with (`records/published.json`).\n"


def submitted_block(submitter: str) -> str:
    """All results of one submitter, with the sequences to the target."""
    head = ["benchmark", "GPU", "score, minutes", "without RCP factor", "sequences to the target", "samples/s", "step, ms", "evaluation, s"]
    rows = [
        [
            r.benchmark,
            f"{r.gpus} x {r.gpu}",
            f"{r.score:.3f}",
            f"{r.minutes:.3f}",
            f"{r.samples:,}",
            f"{r.samples_per_s:.3f}",
            f"{r.batch / r.samples_per_s * 1e3:,.0f}",
            f"{r.evaluation_s:.2f}",
        ]
        for r in RESULTS
        if r.submitter == submitter
    ]
    return markdown(head, rows)


def plan_block(benchmark: str, *gpus: str) -> str:
    """The rows of these kinds in docs/plan.md's table of all configs, which tests/plan/test_plan.py holds to the code."""
    section = (DOCS / "plan.md").read_text().partition(f"## {benchmark}: all configs")[2].partition("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    rows = [line for line in lines[2:] if line[2:].startswith(tuple(f"{gpu}_" for gpu in gpus))]
    return "\n".join((*lines[:2], *rows)) + "\n"


def ours(benchmark: str, config: RunConfig) -> dict[str, str]:
    """What the last column of a comparison says, for the lines that follow from the config."""
    schedule = {
        "llama31_8b": lambda c: (
            f"{c.opt_learning_rate_warmup_steps} steps = {c.opt_learning_rate_warmup_steps * c.global_batch_size} sequences"
        ),
        "llama2_70b_lora": lambda c: f"{c.opt_learning_rate_warmup_ratio:g} of {c.opt_learning_rate_training_steps:,} steps of cosine",
    }[benchmark]
    lines = {
        "global batch": str(config.global_batch_size),
        "learning rate": learning_rate(config),
        "warm-up of the learning rate": schedule(config),
        "micro-batch x accumulation": micro_batches(config),
        "precision of the linears": linears(config),
        "SwiGLU's input kept in": swiglu_input(config),
        "layers recomputed": str(config.recompute_layers),
        "sharding": sharding(benchmark, config),
        "synthetic steps before the clock": f"{config.warmup_train_steps} with the optimizer, {config.warmup_eval_steps} of evaluation; undone, and proven by a digest",
    }
    # Gradients of adapters are summed in fp32, whatever FSDP does with sharded ones.
    return lines | ({"gradients are reduced in": config.reduce_precision} if benchmark == "llama31_8b" else {})


def comparison_block(old: str, benchmark: str, name: str) -> str:
    """`old` with its last column made anew; lines about something else than the config stay as they were written."""
    known = ours(benchmark, load_all(ROOT, benchmark)[name])
    rows = [[cell.strip() for cell in line[1:-1].split("|")] for line in old.splitlines() if line.startswith("|")]
    assert all(len(row) == 3 for row in rows) and known.keys() <= {row[0] for row in rows}, "three columns, and a line for each key"
    return markdown(rows[0], [[row[0], row[1], known.get(row[0], row[2])] for row in rows[2:]])


BLOCKS: dict[str, Callable[..., str]] = {
    "card": card_block,
    "configs": configs_block,
    "environment": environment_block,
    "published": published_block,
    "submitted": submitted_block,
    "plan": plan_block,
}


def made_anew(text: str) -> str:
    def block(match: re.Match[str]) -> str:
        name, *arguments = match[2].split()
        if name == "comparison":
            return match[1] + comparison_block(match[0], *arguments) + match[3]
        return match[1] + BLOCKS[name](*arguments) + match[3]

    return MADE.sub(block, text)


@each_page
def test_made_blocks_are_what_the_code_says(page):
    text = page.read_text()
    assert made_anew(text) == text, "write it anew: PYTHONPATH=. python tests/test_docs.py"


def test_a_changed_config_is_noticed(monkeypatch):
    """A block made from another batch, precision and layout differs, so the test above can fail."""
    config = load_all(ROOT, "llama31_8b")["MI355X_1x8"]
    changed = config.__class__(
        **{
            **config.__dict__,
            "micro_batch_size": 1,
            "fp8": "" if config.fp8 else "te",
            "recompute_layers": 3,
            "reshard_after_forward": not config.reshard_after_forward,
        }
    )
    page = GPU_PAGES["MI355X"].read_text()
    monkeypatch.setitem(globals(), "load_all", lambda root, benchmark: {"MI355X_1x8": changed} if benchmark == "llama31_8b" else {})
    line = configs_block("MI355X").splitlines()[2]
    assert "llama31_8b/MI355X_1x8" in line and line not in page


# --- a page per GPU kind ----------------------------------------------------------------------------------------------


def sections(text: str) -> dict[str, str]:
    """Heading of the second level -> what stands under it."""
    return dict(part.partition("\n")[::2] for part in re.split(r"^## ", text, flags=re.MULTILINE)[1:])


@pytest.mark.parametrize("gpu", GPU_PAGES)
def test_every_kind_with_configs_has_its_page(gpu):
    page = GPU_PAGES[gpu]
    assert configs_of(gpu), f"{gpu} has no config: what is its page about?"
    parts = sections(page.read_text())
    assert list(parts) == SECTIONS and all(part.strip() for part in parts.values())
    wanted = {f"configs {gpu}", f"environment {gpu}"} | ({f"card {gpu}", f"published {gpu}"} if gpu in KINDS else set())
    assert {match[2] for match in MADE.finditer(page.read_text())} == wanted
    assert f"gpus/{gpu}.md" in (ROOT / "README.md").read_text() or f"({gpu}.md)" in (DOCS / "gpus" / "README.md").read_text()


def test_no_page_of_a_kind_that_does_not_exist():
    assert {path.stem for path in (DOCS / "gpus").glob("*.md")} == {*GPU_PAGES, "README"}


# --- who measured what ------------------------------------------------------------------------------------------------


def flat(text: str) -> str:
    return " ".join(text.replace("**", "").split())


@each_page
def test_a_page_that_names_an_amd_gpu_says_that_nothing_was_run_there(page):
    text = flat(page.read_text())
    if NAMES_AN_AMD_GPU.search(text):
        assert any(sentence in text for sentence in NOT_RUN)


@pytest.mark.parametrize("gpu", AMD_KINDS)
def test_an_amd_page_claims_no_number_as_ours(gpu):
    mine = flat(sections(GPU_PAGES[gpu].read_text())["Measured by us"])
    assert mine.startswith(f"{NOT_RUN[0]}.") and not re.search(r"\d", mine.replace("gfx942", "").replace("gfx950", ""))


def test_our_results_hold_no_amd_number():
    text = (DOCS / "results.md").read_text()
    measured, _, rest = text.partition("## Not measured")
    assert rest and not NAMES_AN_AMD_GPU.search(measured)


# --- troubleshooting --------------------------------------------------------------------------------------------------


def families() -> dict[int, type[RunError]]:
    """Exit code -> the class of common/errors.py; signals are not among them."""
    classes = [value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, RunError)]
    return {cls.exit_code: cls for cls in classes if cls is not Interrupted}


def entries() -> dict[tuple[int, ...], str]:
    """Exit codes in a heading such as `## 13 · hang` or `## 130, 143 · interrupted` -> the entry under it."""
    found = sections(TROUBLESHOOTING.read_text())
    return {tuple(map(int, re.findall(r"\d+", head.partition("·")[0]))): f"{head}\n{text}" for head, text in found.items() if "·" in head}


def entry(code: int) -> str:
    return next(text for codes, text in entries().items() if code in codes)


def test_every_exit_code_has_its_entry_and_no_other():
    listed = [code for codes in entries() for code in codes]
    assert len(listed) == len(set(listed))
    assert set(listed) == {0, *families(), *(Interrupted(number).exit_code for number in (1, 2, 15))}


@pytest.mark.parametrize("code", [*families(), 130], ids=str)
def test_an_entry_has_kind_causes_cure_and_place(code):
    text = entry(code)
    kind = families()[code].kind if code in families() else Interrupted.kind
    assert text.splitlines()[0].endswith(f"· {kind}")
    for part in ("**Causes.**", "**Do.**", "**Look at.**"):
        assert len(text.partition(part)[2].split("**")[0].split()) >= 3, part


def test_the_files_to_look_at_are_those_that_a_run_writes():
    """Each name stands in the code that writes it, and in some entry."""
    written = {
        "failure.json": "launch/verdict.py",
        "events.jsonl": "common/training/session.py",
        "check.txt": "launch/__main__.py",
        "heartbeat": "common/sharding/processes.py",
        ".stack": "common/training/guard.py",
        ".traceback": "common/training/guard.py",
        "torchrun.log": "launch/torchrun.py",
        "attempts.jsonl": "records/ledger.py",
    }
    for name, source in written.items():
        assert name in (ROOT / source).read_text(), f"{source} does not write {name}"
        assert any(name in text for text in entries().values()), name


def templates(source: str) -> set[str]:
    """All texts of a Python file, with … for what an f-string fills in."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.JoinedStr):
            found.add("".join(part.value if isinstance(part, ast.Constant) else "…" for part in node.values))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.add(node.value)
    return found


def quoted(text: str) -> list[tuple[str, Path]]:
    """Lines `| `message` | [file](../file) | ...` of an entry."""
    return [
        (message, (DOCS / path).resolve()) for message, path in re.findall(r"^\| `([^`]+)` \| \[[^]]+\]\(([^)]+)\) \|", text, re.MULTILINE)
    ]


@pytest.mark.parametrize("code", [*families(), 130], ids=str)
def test_quoted_messages_are_those_of_the_code(code):
    messages = quoted(entry(code))
    assert messages, "an entry quotes at least one real message"
    for message, path in messages:
        source = path.read_text()
        assert any(template.startswith(message) for template in templates(source)), f"{name_of(path)} says no such thing: {message}"
        assert (families().get(code) or Interrupted).__name__ in source or "SystemExit" in source, f"{name_of(path)} never ends with {code}"


def test_a_message_that_the_code_does_not_say_is_noticed():
    known = templates("raise Hang(f'no rank moved for {s:.0f} s', 'why')")
    assert "no rank moved for … s" in known and "no rank moved for 9 s" not in known


# --- links, verbs, keys -----------------------------------------------------------------------------------------------


def anchors(page: Path) -> set[str]:
    heads = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


def broken_links(page: Path, text: str) -> list[str]:
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        path, _, anchor = target.partition("#")
        goal = (page.parent / path).resolve() if path else page
        if re.match(r"https?:", target):
            continue
        if not goal.exists() or (anchor and anchor not in anchors(goal)):
            broken.append(target)
    return broken


@each_page
def test_links_resolve(page):
    assert broken_links(page, page.read_text()) == []


def test_a_broken_link_is_noticed():
    text = "[a](docs/none.md) [b](docs/plan.md#nowhere) [c](docs/plan.md) [d](https://example.org/x)"
    assert broken_links(ROOT / "README.md", text) == ["docs/none.md", "docs/plan.md#nowhere"]


@each_page
def test_verbs_and_keys_exist(page):
    text = page.read_text()
    for verb in re.findall(r"run_(?:and_time|with_docker)\.sh (?:llama31_8b|llama2_70b_lora|<benchmark>) ([a-z_]+)", text):
        assert verb in VERBS
    known = {key for benchmark in benchmarks(ROOT) for key in config_class(benchmark).__dataclass_fields__}
    assert {key for key in re.findall(r"--set '?([a-z_0-9]+)=", text)} <= known


CHANGES = {
    (match[1], match[2])
    for page in PAGES
    for match in re.finditer(r"\.sh (llama\w+) ?\w* ((?:--set \S+ ?)+)$", page.read_text(), re.MULTILINE)
}


@pytest.mark.parametrize(("benchmark", "options"), sorted(CHANGES))
def test_changes_that_a_page_advises_load_on_the_gpus_of_8(benchmark, options):
    overrides = dict(key_value(word) for word in shlex.split(options) if word != "--set")
    for gpu in KINDS:
        configs.load(config_path(ROOT, benchmark, f"{gpu}_1x8"), config_class(benchmark), overrides)


def test_the_advice_is_found():
    assert len(CHANGES) >= 5, "the pattern above matches the commands of the pages"


if __name__ == "__main__":
    for page in PAGES:
        text = page.read_text()
        if (anew := made_anew(text)) != text:
            page.write_text(anew)
            print(f"written: {name_of(page)}")
