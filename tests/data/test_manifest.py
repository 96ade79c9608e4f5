"""Manifests that mean harm."""

import pytest

from common.data.manifest import Manifest
from common.errors import DataError


@pytest.mark.parametrize(
    "text", ["[" * 100_000, '{"files": ' + "[" * 100_000, "[]", '{"files": 7}']
)
def test_a_manifest_of_any_other_shape_is_one_error(tmp_path, text):
    (tmp_path / "m.json").write_text(text)
    with pytest.raises(DataError, match="not a manifest"):
        Manifest.read(tmp_path / "m.json")


def test_a_folder_is_not_called_a_pipe(tmp_path):
    with pytest.raises(DataError, match="Is a directory"):
        Manifest.read(tmp_path)
