"""The documents against the code: generated tables, links, commands, config keys, exit codes.

Not their prose.
"""

import importlib.util
import re
import shlex
import subprocess

import pytest

from common import config as configs
from common import errors
from common.benchmarks import config_class, load_all, names
from common.errors import Interrupted, RunError
from common.gpu_kinds import KINDS
from launch.cli import COMMANDS
from launch.plan.derive_config import nearest_file
from submission import describe
from tests.tools import docs_tables
from tests.tools.docs_tables import PAGES, ROOT, rewritten

pytestmark = pytest.mark.quick

DOCS = ROOT / "docs"
# Commands and keys as they were when something was measured.
RECORDS = {
    "log.md",
    "results.md",
    "results-archive.md",
}
each_page = pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))

each_current_page = pytest.mark.parametrize(
    "page", [p for p in PAGES if p.name not in RECORDS], ids=lambda p: str(p.relative_to(ROOT))
)


# --- generated tables -----------------------------------------------------------------------------


@each_page
def test_generated_tables_are_current(page):
    text = page.read_text()
    assert rewritten(text) == text, "run python3 -m tests.tools.docs_tables"


@pytest.mark.parametrize(
    "key", ["micro_batch_size", "linear", "reduce_scatter", "moment_precision", "recompute_layers"]
)
def test_a_changed_config_changes_its_table(monkeypatch, key):
    config = load_all(ROOT, "llama31_8b")["B200_1x8"]
    other = {
        "micro_batch_size": 1,
        "linear": "bf16",
        "reduce_scatter": "nccl",
        "moment_precision": "bf16",
        "recompute_layers": 3,
    }[key]
    before = docs_tables.configs_table("B200")
    changed = config.__class__(**{**config.__dict__, key: other})
    monkeypatch.setattr(
        docs_tables,
        "load_all",
        lambda root, benchmark: {"B200_1x8": changed} if benchmark == "llama31_8b" else {},
    )
    assert docs_tables.configs_table("B200").splitlines()[2] not in before


def test_every_gpu_kind_has_a_page():
    pages = {
        path.stem: path.read_text()
        for path in (DOCS / "gpus").glob("*.md")
        if path.stem != "README"
    }
    assert pages.keys() == {*KINDS, "CPU"}
    for gpu, text in pages.items():
        assert (
            f"<!-- made: configs {gpu} -->" in text and f"<!-- made: environment {gpu} -->" in text
        )


# --- links ----------------------------------------------------------------------------------------


def anchors(text: str) -> set[str]:
    return {
        re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-")
        for head in re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    }


def broken_links(page, text: str) -> list[str]:
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        path, _, anchor = target.partition("#")
        goal = (page.parent / path).resolve() if path else page
        if not re.match(r"https?:", target) and not (
            goal.exists() and (not anchor or anchor in anchors(goal.read_text()))
        ):
            broken.append(target)
    return broken


@each_page
def test_links_resolve(page):
    assert broken_links(page, page.read_text()) == []


def test_a_broken_link_is_noticed():
    text = (
        "[a](docs/none.md) [b](docs/plan.md#nowhere) [c](docs/plan.md) [d](https://example.org/x)"
    )
    assert broken_links(ROOT / "README.md", text) == ["docs/none.md", "docs/plan.md#nowhere"]


def test_every_page_is_in_the_index():
    index = (DOCS / "README.md").read_text()
    linked = {
        (DOCS / target.partition("#")[0]).resolve()
        for target in re.findall(r"\]\(([^)\s]+)\)", index)
    }
    assert {page for page in DOCS.glob("*.md") if page.name not in {"README.md", *RECORDS}} | {
        DOCS / "gpus" / "README.md"
    } <= linked


# --- commands and keys ----------------------------------------------------------------------------


def blocks(text: str) -> list[str]:
    return re.findall(r"^```[a-z]*\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def commands(text: str) -> list[list[str]]:
    """Return the words of each command of this repository on a page.

    Reads code blocks and code spans, and leaves out variables and comments.
    """
    lines = [line for block in blocks(text) for line in block.replace("\\\n", " ").splitlines()]
    lines += re.findall(
        r"`((?:[A-Z_]+=\S+ )*(?:sudo )?(?:\./|python3? -m |python3? tests/)[^`\n]+)`", text
    )
    found = []
    for line in lines:
        if re.match(
            r"(?:[A-Z_]+=\S+ )*(?:sudo )?(?:\./\w+\.sh|python3? -m |python3? tests/)", line
        ):
            words = shlex.split(re.sub(r"[<>|]", "", line), comments=True)
            found.append(
                [word for word in words if word != "sudo" and not re.fullmatch(r"[A-Z_]+=.*", word)]
            )
    return found


@each_current_page
def test_commands_exist(page):
    for words in commands(page.read_text()):
        if words[0].startswith("python"):
            module = words[2] if words[1] == "-m" else ""
            assert importlib.util.find_spec(module) if module else (ROOT / words[1]).is_file(), (
                words
            )
            continue
        assert (ROOT / words[0]).is_file(), words
        if words[:2] == ["./run_with_docker.sh", "--print"]:
            del words[1]
        if words[0] in ("./run_and_time.sh", "./run_with_docker.sh") and len(words) > 1:
            assert words[1] in (
                *names(),
                *COMMANDS,
                "benchmark",
                "name",
                "--help",
                "--version",
            ), words
            assert (
                len(words) < 3
                or words[1] in COMMANDS
                or words[2].startswith("-")
                or words[2] in COMMANDS
            ), words


@each_page
def test_shell_blocks_parse(page):
    for block in blocks(page.read_text()):
        if re.search(r"^(?:[A-Z_]+=\S+ )*(?:\./|sudo |bash |export |docker )", block, re.MULTILINE):
            script = re.sub(r"<\w+>|\.\.\.", "x", block)
            done = subprocess.run(["bash", "-n"], input=script, capture_output=True, text=True)
            assert done.returncode == 0, done.stderr


CONFIG_KEYS = {key for benchmark in names() for key in config_class(benchmark).__dataclass_fields__}


@each_current_page
def test_config_keys_exist(page):
    """`key = value` in code spans, and --set in commands. `describe` has keys of its own."""
    for line in page.read_text().splitlines():
        named = set(re.findall(r"--set '?([a-z_0-9]+)=", line))
        keys = describe.KEYS if ".sh describe " in line else CONFIG_KEYS
        assert named - set(keys) == set(), line
    named = set(re.findall(r"`([a-z][a-z_0-9]+) = [^`=]+`", page.read_text()))
    assert named - CONFIG_KEYS == set()


ADVICE = {
    (match[1], match[2])
    for page in PAGES
    for match in re.finditer(
        r"\.sh (llama\w+) ?\w* ((?:--set \S+ ?)+)$", page.read_text(), re.MULTILINE
    )
}


@pytest.mark.parametrize(("benchmark", "options"), sorted(ADVICE))
def test_advised_changes_load_on_every_kind(benchmark, options):
    overrides = dict(word.split("=", 1) for word in shlex.split(options) if word != "--set")
    for kind in KINDS.values():
        configs.load(nearest_file(ROOT, benchmark, kind, 8), config_class(benchmark), overrides)


def test_the_patterns_find_something():
    found = [words for page in PAGES for words in commands(page.read_text())]
    assert (
        len(found) > 40
        and any("prepare" in words for words in found)
        and ["./run_tests.sh"] in found
    )
    assert len(ADVICE) >= 2


# --- exit codes -----------------------------------------------------------------------------------


def test_every_exit_code_has_its_entry_and_no_other():
    classes = [
        value
        for value in vars(errors).values()
        if isinstance(value, type) and issubclass(value, RunError)
    ]
    known = {cls.exit_code: cls.kind for cls in classes if cls is not Interrupted}
    signals = {Interrupted(number).exit_code: Interrupted.kind for number in errors.STOP_SIGNALS}
    heads = re.findall(
        r"^## ([\d, ]+) · (\w+)$", (DOCS / "troubleshooting.md").read_text(), re.MULTILINE
    )
    listed = {int(code): kind for codes, kind in heads for code in codes.split(",")}
    assert listed == {0: "good", **known, **signals}


# --- measured packages ----------------------------------------------------------------------------


def measured_packages() -> dict[str, str]:
    """Return name -> version of the packages that results.md calls measured on a GPU."""
    section = (DOCS / "results.md").read_text().split("## The installed packages", 1)[1]
    rows = re.findall(
        r"^\| ([a-z0-9-]+) \| ([0-9][^ |]*) \|", section.split("\n## ")[0], re.MULTILINE
    )
    return dict(rows)


def pins(lock: str) -> dict[str, str]:
    return dict(re.findall(r"^([a-z0-9-]+)==([^ \\]+)", (ROOT / lock).read_text(), re.MULTILINE))


def test_the_locks_install_what_was_measured():
    locked = pins("requirements.lock") | pins("requirements-hopper.lock")
    measured = measured_packages()
    assert {"torch", "triton", "nvidia-nccl-cu13", "flash-attn-4"} <= measured.keys()
    assert measured == {name: locked[name] for name in measured}
