"""Development versions lead to a release."""

from __future__ import annotations

import pytest

from covpool.provenance.machine import release


@pytest.mark.parametrize(
    ("version", "expected"),
    [("0.1.0", "0.1.0"), ("0.1.0.dev0", "0.1.0"), ("1.2.3.dev45+gabc", "1.2.3"), ("0.2.0rc1", "0.2.0")],
)
def test_the_release_a_version_leads_to(version: str, expected: str) -> None:
    assert release(version) == expected


def test_what_has_no_number_is_no_version() -> None:
    with pytest.raises(ValueError, match="begins with its number"):
        release("unknown")
