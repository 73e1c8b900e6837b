"""Every installation that deploy/kubernetes can make."""

from __future__ import annotations

import pytest

from tests.deploy.manifests import (
    CONTAINERS,
    EXAMPLES,
    FOLDER,
    OVERLAYS,
    Object,
    built,
    containers,
    read,
)


@pytest.fixture(params=["base", *OVERLAYS])
def objects(request: pytest.FixtureRequest) -> list[Object]:
    """All objects of an installation, and the examples."""
    found = [*built(FOLDER / request.param), *read(*EXAMPLES)]
    # Whoever goes through the containers goes through all of them.
    assert sorted(each.name for each in containers(found)) == sorted(CONTAINERS)
    return found
