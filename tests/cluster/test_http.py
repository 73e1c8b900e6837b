"""The errors that other services answer to a command, such as a gateway in between."""

from __future__ import annotations

from typing import Any

import pytest

from allfold_cluster.http import NoAnswer, get_json
from allfold_core.errors import PeerMissing
from tests.client_sdk.http_service import service


@pytest.mark.parametrize(
    "body",
    [
        ["busy"],
        {"error": "busy"},
        {"error": {"message": "busy"}},
        {"error": {"code": 503, "message": "busy", "details": [{}]}},
        {"error": {"code": "Unavailable", "message": "busy", "details": None}},
    ],
)
def test_an_error_that_is_not_ours_is_told_by_its_status(body: Any) -> None:
    with service({"/v1/nodes": (503, body)}) as url:
        with pytest.raises(NoAnswer) as told:
            get_json(f"{url}/v1/nodes", "")
        assert str(told.value) == f"{url}/v1/nodes answers with HTTP status 503"


def test_an_error_of_ours_is_what_it_was_and_has_the_status() -> None:
    error = PeerMissing("rank 3 did not come", missing=[3]).to_dict()
    with service({"/v1/nodes": (504, {"error": error})}) as url, pytest.raises(PeerMissing) as told:
        get_json(f"{url}/v1/nodes", "")
    assert told.value.details == {"missing": [3], "http_status": 504}
