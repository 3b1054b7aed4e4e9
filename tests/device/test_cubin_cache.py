"""The directory of compiled kernels where an entry cannot be saved; test_jit.py has the rest, with a compiler."""

from __future__ import annotations

from pathlib import Path

import pytest

from moe_rt.native.cubin_cache import open_cache


def test_an_entry_that_cannot_be_put_in_place_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is in the way stays, and is no entry."""
    tmp_path.chmod(0o700)
    (tmp_path / "key.cubin").mkdir()
    monkeypatch.setenv("MOE_RT_CACHE", str(tmp_path))
    with open_cache() as cache:
        assert cache is not None
        with pytest.warns(RuntimeWarning, match="are not kept: .*key.cubin"):
            cache.save("key", {}, b"code")
        assert cache.load("key") is None
    assert [path.name for path in tmp_path.iterdir()] == ["key.cubin"]
