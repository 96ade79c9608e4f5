"""Data files leave the page cache, or the answer is "no"."""

import mmap

import pytest

from launch import page_cache

pytestmark = pytest.mark.quick


def test_page_cache(tmp_path):
    path = tmp_path / "tokens.bin"
    path.write_bytes(b"x" * 100_000)
    assert page_cache.resident(path) > 0
    assert page_cache.clear([path]) == "fadvise" and page_cache.resident(path) == 0
    assert path.read_bytes() == b"x" * 100_000


def test_data_that_stays_in_the_page_cache_is_not_called_cleared(tmp_path):
    """A mapped page stays, whatever the kernel is told."""
    with (tmp_path / "tokens.bin").open("w+b") as file:
        file.write(b"x" * 100_000)
        file.flush()
        with mmap.mmap(file.fileno(), 0) as mapped:
            assert mapped[0] == ord("x")
            assert page_cache.clear([tmp_path / "tokens.bin"]) == "no"
    assert page_cache.clear([tmp_path / "absent"]) == "no"
