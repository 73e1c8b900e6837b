"""The objects of deploy/kubernetes and of the chart fit the schemas of their kinds."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from pathlib import Path

import pytest

from tests.deploy import schemas
from tests.deploy.manifests import EXAMPLES, FOLDER, Object, built, charted, of_kind, read
from tests.deploy.variants import VARIANTS


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_an_example_fits_its_schemas(path: Path) -> None:
    for each in read(path):
        schemas.check(each)


@pytest.mark.parametrize("name", VARIANTS)
def test_every_object_of_the_chart_fits_its_schema(name: str) -> None:
    for each in charted(*VARIANTS[name]):
        schemas.check(each)


def misspelt(job: Object) -> None:
    job["spec"]["backofLimit"] = 0


def of_another_type(job: Object) -> None:
    job["spec"]["completions"] = "two"


def misspelt_deep_down(job: Object) -> None:
    job["spec"]["template"]["spec"]["containers"][0]["envs"] = []


@pytest.mark.parametrize("spoil", [misspelt, of_another_type, misspelt_deep_down])
def test_what_does_not_fit_is_found(spoil: Callable[[Object], None]) -> None:
    (job,) = deepcopy(read(FOLDER / "examples" / "job.yaml"))
    schemas.check(job)
    spoil(job)
    with pytest.raises(Exception, match=r"backofLimit|two|envs"):
        schemas.check(job)


@pytest.mark.parametrize("kind", ["JobSet", "ClusterTrainingRuntime"])
def test_what_a_model_does_not_know_is_found(kind: str) -> None:
    ((_, found),) = of_kind(deepcopy(read(*EXAMPLES)), kind).items()
    schemas.check(found)
    template = found["spec"]["template"]["spec"] if kind != "JobSet" else found["spec"]
    template["replicatedJobs"][0]["replica"] = 2
    with pytest.raises(schemas.UnknownFields, match=r"replicatedJobs\[0\].replica"):
        schemas.check(found)


def test_every_object_that_kustomize_builds_is_one_of_the_chart_and_so_fits() -> None:
    kinds = {each["kind"] for each in built(FOLDER / "base")}
    assert kinds <= {each["kind"] for each in charted(*VARIANTS["base"])}
