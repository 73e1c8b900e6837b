"""The addresses of an agent's ports."""

import pytest

from allfold_core.errors import InvalidArgument
from allfold_service.addresses import parse_address


@pytest.mark.parametrize(
    ("address", "parsed"),
    [
        ("localhost:1", ("localhost", 1)),
        ("[::1]:65535", ("::1", 65535)),
        ("10.0.0.1:80", ("10.0.0.1", 80)),
    ],
)
def test_addresses_are_host_and_port(address: str, parsed: tuple[str, int]) -> None:
    assert parse_address(address) == parsed


@pytest.mark.parametrize("address", ["", "host", "host:", ":80", "::1:80", "h:0", "h:65536", "h:x"])
def test_other_addresses_are_invalid(address: str) -> None:
    with pytest.raises(InvalidArgument):
        parse_address(address)
