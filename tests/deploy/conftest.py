"""Every installation that deploy/kubernetes can make."""

from __future__ import annotations

import pytest

from tests.deploy.manifests import (
    BASE_FILES,
    CONTAINERS,
    FOLDER,
    JOB_FILES,
    OVERLAYS,
    Object,
    built,
    containers,
    read,
)


@pytest.fixture(params=["files", "base", *OVERLAYS])
def objects(request: pytest.FixtureRequest) -> list[Object]:
    """All objects of an installation, and the example jobs."""
    if request.param == "files":
        found = [each for each in read(*BASE_FILES) if each["kind"] != "Kustomization"]
    else:
        found = built(FOLDER / request.param)
    found = [*found, *read(*JOB_FILES)]
    # Whoever goes through the containers goes through all of them.
    assert sorted(each.name for each in containers(found)) == sorted(CONTAINERS)
    return found
