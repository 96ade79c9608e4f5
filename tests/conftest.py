"""What several test files share: a process group of one, tiny token files, and one pair of ranks that does all that needs two."""

import fcntl
import json
import os
import shutil
import signal
from pathlib import Path

import fp8_on_cpu  # noqa: F401  (changes torch)
import pytest
import torch
from megatron_datasets import megatron  # noqa: F401  (a fixture)

# Without a GPU the kernels run in Triton's interpreter. Triton reads this when a kernel's module is imported, which happens after this file.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
    # Here and in every process of the tests: on tiny tensors two threads only wait for each other, 100 times slower beside other work.
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"

# A shell that starts the tests in the background lets them ignore the interrupt, and every process of theirs with them.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="module")
def processes():
    """A group of one process in this one, ended with the test file."""

    from common.sharding.processes import start_processes

    yield start_processes("cpu", 60.0)
    torch.distributed.destroy_process_group()


def made_once(tmp_path_factory, name, make):
    """The folder that make(folder) filled for the first of pytest's processes that asked; the others wait for it. Only to be read."""
    place = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        place = place.parent  # of this run's workers together
    folder, done = place / name, place / f"{name}.done"
    with (place / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not done.exists():
            shutil.rmtree(folder, ignore_errors=True)  # what a failure left
            folder.mkdir()
            make(folder)
            done.touch()
    return folder


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
        (folder / "documents.json").write_text(json.dumps([[document.source, document.text] for document in corpus.documents()]))

    folder = made_once(tmp_path_factory, "documents", write)
    return [corpus.Document(*fields) for fields in json.loads((folder / "documents.json").read_text())]


@pytest.fixture(scope="session")
def tiny_data(tmp_path_factory):
    from tiny import write_data

    return write_data(tmp_path_factory.mktemp("tiny_data"))


@pytest.fixture(scope="session")
def two_ranks(tmp_path_factory, tiny_data):
    """What two gloo processes found, by rank: see two_ranks.py."""
    from tiny import call_on_ranks

    def find(folder):
        (folder / "data").symlink_to(tiny_data)
        call_on_ranks(2, "two_ranks:everything", folder)

    folder = made_once(tmp_path_factory, "two_ranks", find)
    return [torch.load(folder / f"rank_{rank}.pt", weights_only=True) for rank in (0, 1)]


# --- -m quick: the first case of each test function that neither builds something large nor starts ranks -----------------

TESTS = Path(__file__).parent
NOT_QUICK = {  # files that train, start several processes, compile kernels, or import a peer such as transformers
    *("data/test_corpus.py", "llama2_70b_lora/test_lora_round_trip.py", "llama31_8b/test_prepare.py", "llama31_8b/test_random_kills.py"),
    *("kernels/test_compilation.py", "kernels/test_kernels.py", "kernels/test_lora.py", "kernels/test_lora_kernels.py"),
    *("kernels/test_rms_norm.py", "kernels/test_rope.py"),
    *(
        "launch/test_containers.py",
        "launch/test_faults.py",
        "launch/test_multi_node.py",
        "launch/test_series.py",
        "launch/test_two_nodes.py",
    ),
    *("model/test_adapters.py", "model/test_lora_adapter.py", "model/test_lora_parity.py", "model/test_model.py", "model/test_weights.py"),
    *("kernels/test_block_formats.py", "llama2_70b_lora/test_lora_block_format.py", "model/test_block_scaling.py"),
    *("llama2_70b_lora/test_lora_checkpoint.py", "training/test_block_format_run.py", "training/test_checkpoint.py"),
    "training/test_checkpoint_kills.py",
    *("launch/test_main.py", "llama2_70b_lora/test_lora_training.py", "sharding/test_frozen.py", "training/test_fp8_run.py"),
    *("submission/test_lost_attempts.py", "submission/test_package.py", "submission/test_score.py", "submission/test_survey.py"),
    *("throughput/test_flux.py", "throughput/test_flux_model.py"),
    *("submission/test_submission_of_the_loop.py", "training/test_loop.py"),
}
SLOW_FIXTURES = {"built", "checkpoints", "collectives", "copy", "documents", "megatron", "miniature_data", "two_ranks"}
# Tests that call one of these directly.
SLOW_CALLS = {
    "Popen",
    "call_on_ranks",
    "check_compiles",
    "import_module",
    "run_in_interpreter",
    "run_ranks",
    "start_ranks",
    "trace_step",
    "transformers",
}
SLOW_TESTS = {  # more than two seconds of a core each
    *("test_a_broken_rank_is_a_refusal", "test_hours_of_samples_stay_a_small_page", "test_the_loss_is_that_of_hugging_face"),
    *("test_the_verb_on_this_cpu_with_two_gloo_ranks", "test_the_verb_without_a_gpu_is_refused", "test_profile_of_the_miniature"),
    *("test_official_tools_accept_both_benchmarks_for_all_rulesets", "test_one_of_ten_may_miss_the_target"),
    *("test_a_series_that_converges_too_fast_is_no_success", "test_package_checker_and_summarizer_find_our_numbers"),
    *("test_rcp_checker_prints_our_numbers", "test_it_says_what_it_takes", "test_code_of_held_out_modules_is_not_in_training"),
    *("test_a_tool_on_path_is_called_around_rank_0",),
}


def is_quick(item: pytest.Item) -> bool:
    function = getattr(item, "function", None)
    slow = any(item.get_closest_marker(name) for name in ("gpu", "slow")) or getattr(function, "__name__", "") in SLOW_TESTS
    slow = slow or bool(SLOW_FIXTURES & set(getattr(item, "fixturenames", ())))
    slow = slow or bool(SLOW_CALLS & set(getattr(getattr(function, "__code__", None), "co_names", ())))
    return not slow and item.path.relative_to(TESTS).as_posix() not in NOT_QUICK


def pytest_ignore_collect(collection_path, config):
    """With -m quick the other files are not even imported."""
    if config.option.markexpr == "quick" and collection_path.is_relative_to(TESTS):
        return collection_path.relative_to(TESTS).as_posix() in NOT_QUICK or None
    return None


def pytest_collection_modifyitems(items):
    seen = set()
    for item in items:
        function = item.nodeid.partition("[")[0]
        if is_quick(item) and function not in seen:
            seen.add(function)
            item.add_marker("quick")
