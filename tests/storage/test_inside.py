from __future__ import annotations

from pathlib import Path

import pytest

from covpool.storage.folders import check_outside, is_inside


def test_what_is_inside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    photos, other = tmp_path / "photos", tmp_path / "photos2"
    photos.mkdir()
    other.mkdir()
    (tmp_path / "link").symlink_to(photos)
    (photos / "away").symlink_to(other)
    monkeypatch.chdir(photos)
    for path in ("rows", "a/b", photos / "rows", tmp_path / "link" / "rows", other / ".." / "photos" / "x"):
        assert is_inside(path, ".")
        assert is_inside(path, tmp_path / "link")
    for path in ("../rows", "../photos2", "away/rows", ".", tmp_path):
        assert not is_inside(path, photos)
    assert not is_inside("rows", "memory://bucket")
    (photos / "table.csv").write_text("path,label\n")
    assert not is_inside("rows", "table.csv")
    with pytest.raises(ValueError, match=r"^rows would go into the images .*, as x is in \.: give --out$"):
        check_outside("x", ".", "rows")
