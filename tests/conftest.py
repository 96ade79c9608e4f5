"""Shared fixtures: a process group of one rank, small token files, and one pair of ranks."""

import json
import os
import signal
import sys
from unittest import mock

import fp8_on_cpu  # noqa: F401  (changes torch)
import pytest
import torch
import yaml_by_libyaml  # noqa: F401  (changes yaml)
from made_once import made_once
from megatron_datasets import megatron  # noqa: F401  (a fixture)

from common import engines, variables

# Without a GPU the kernels run in Triton's interpreter. Triton reads this when a kernel's module is
# imported, which happens after this file.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
    # Here and in every process of the tests: on tiny tensors two threads only wait for each other,
    # 100 times slower beside other work.
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"

# The choices of whoever starts the tests, such as LOGDIR or SEED, are not those of the tests.
for variable in variables.TABLE.values():
    if variable.set_by == "user" and variables.Use.POD in variable.use:
        os.environ.pop(variable.name, None)

# Images often forbid compiled files. Without them, each of some hundred processes that the tests
# start compiles the package again, and each worker rewrites the assertions of all tests.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# If a shell starts the tests in the background, they and all their child processes ignore SIGINT.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def no_engines_chosen():
    """Forget the chosen engines: tests change the variables and packages that decide."""
    engines.forget()
    yield
    engines.forget()


@pytest.fixture(autouse=True, scope="module")
def own_environment():
    """Restore the environment after the tests of a file, which call commands that set variables."""
    with mock.patch.dict(os.environ):
        yield


@pytest.fixture(scope="module")
def processes():
    """Yield a process group that holds only this process, and end it after the test file."""

    from common.sharding.processes import start_processes

    yield start_processes("cpu", 60.0)
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="session")
def miniature_data(tmp_path_factory):
    """The data of the 8B's miniature, as its `prepare` builds them."""
    from llama31_8b import prepare

    def build(folder):
        assert prepare.main(["miniature", "--data-dir", str(folder)]) == 0

    return made_once(tmp_path_factory, "miniature_data", build)


@pytest.fixture(scope="session")
def documents(tmp_path_factory):
    """The texts of the standard library, perhaps as another process found them."""
    from common.data import corpus

    def write(folder):
        (folder / "documents.json").write_text(
            json.dumps([[document.source, document.text] for document in corpus.documents()])
        )

    folder = made_once(tmp_path_factory, "documents", write)
    return [
        corpus.Document(*fields) for fields in json.loads((folder / "documents.json").read_text())
    ]


@pytest.fixture(scope="session")
def tiny_data(tmp_path_factory):
    from tiny import write_data

    return write_data(tmp_path_factory.mktemp("tiny_data"))


@pytest.fixture(scope="session")
def two_ranks(tmp_path_factory, tiny_data):
    """Results of two gloo ranks, by rank (see tiny.everything)."""
    from ranks import call_on_ranks

    def find(folder):
        (folder / "data").symlink_to(tiny_data)
        call_on_ranks(2, "tiny:everything", folder)

    folder = made_once(tmp_path_factory, "two_ranks", find)
    return [torch.load(folder / f"rank_{rank}.pt", weights_only=True) for rank in (0, 1)]


def pytest_collection_modifyitems(config, items):
    """Run only the first case of each test function with -m quick."""
    if config.option.markexpr != "quick":
        return
    first: dict[str, pytest.Item] = {}
    for item in items:
        first.setdefault(item.nodeid.partition("[")[0], item)
    config.hook.pytest_deselected(items=[item for item in items if item not in first.values()])
    items[:] = first.values()
