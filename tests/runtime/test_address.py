"""Which address a worker announces."""

from __future__ import annotations

import pytest

from stretto.runtime.address import NoAddress, of_interface


def test_an_interface_has_an_address() -> None:
    assert of_interface("lo") == "127.0.0.1"


def test_one_that_is_not_there_is_told_with_those_that_are() -> None:
    with pytest.raises(NoAddress, match=r"no network interface 'nope0'.* lo"):
        of_interface("nope0")
