"""The tests that `benchmarks.versions` runs on every release exist."""

from __future__ import annotations

from benchmarks import versions


def test_every_file_is_there() -> None:
    assert [name for name in versions.TESTS if not (versions.ROOT / name).exists()] == []
