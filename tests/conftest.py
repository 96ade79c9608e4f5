"""What several test files share: a process group of one, tiny token files, and one pair of ranks that does all that needs two."""

import signal

import pytest

# A shell that starts the tests in the background lets them ignore the interrupt, and every process of theirs with them.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="module")
def processes():
    """A group of one process in this one, ended with the test file."""
    import torch

    from common.distributed import start_processes

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # on tiny tensors two threads only wait for each other: 100x slower beside other work
    yield start_processes("cpu", 60.0)
    torch.distributed.destroy_process_group()
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def tiny_data(tmp_path_factory):
    from tiny import write_data

    return write_data(tmp_path_factory.mktemp("tiny_data"))


@pytest.fixture(scope="session")
def two_ranks(tmp_path_factory, tiny_data):
    """What two gloo processes found, by rank: see two_ranks.py."""
    from tiny import call_on_ranks

    folder = tmp_path_factory.mktemp("two_ranks")
    (folder / "data").symlink_to(tiny_data)
    return call_on_ranks(2, "two_ranks:everything", folder)
