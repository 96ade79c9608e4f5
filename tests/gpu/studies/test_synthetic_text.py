"""Test the synthetic text of the golden losses."""

from convergence import synthetic_batches


def test_the_synthetic_text_is_the_same_everywhere():
    """Golden losses hang on it."""
    first = next(synthetic_batches(1, 2048))
    assert (
        first.shape == (8, 2, 1024)
        and first[0, 0, :8].tolist() == FIRST
        and (first[:, 0, 1:] == first[:, 1, :-1]).all()
    )


FIRST = [1628, 587, 1968, 242, 1001, 395, 1358, 1405]
