"""Objects of Kubernetes held against the schemas of those who read them.

Built-in kinds have Kubernetes' own OpenAPI schemas, in the strict form that refuses unknown fields.
Kinds of others have models that are made from their schemas; a model drops a field that it does not
know, so what it keeps must be what it was given.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import kubernetes_validate  # type: ignore[import-untyped]

from tests.deploy.manifests import Object, pod_templates

OLDEST, NEWEST = "1.27.0", "1.37.0"


def _by_cloudcoil(model: Any) -> Callable[[Object], Object]:
    return lambda given: dict(
        model.model_validate(given).model_dump(mode="json", by_alias=True, exclude_unset=True)
    )


def _by_kubeflow(model: Any) -> Callable[[Object], Object]:
    return lambda given: dict(model.from_dict(given).to_dict())


@cache
def models() -> dict[tuple[str, str], Callable[[Object], Object]]:
    """Return what reads an object of each kind that has a model.

    Imported here alone: they take seconds, which each process that collects tests would spend.
    """
    from cloudcoil.models.cert_manager import v1 as cert_manager
    from cloudcoil.models.prometheus_operator import v1 as prometheus
    from kubeflow_trainer_api import models as trainer  # type: ignore[import-untyped]

    return {
        ("cert-manager.io/v1", "Certificate"): _by_cloudcoil(cert_manager.Certificate),
        ("cert-manager.io/v1", "Issuer"): _by_cloudcoil(cert_manager.Issuer),
        ("monitoring.coreos.com/v1", "PodMonitor"): _by_cloudcoil(prometheus.PodMonitor),
        ("monitoring.coreos.com/v1", "PrometheusRule"): _by_cloudcoil(prometheus.PrometheusRule),
        ("monitoring.coreos.com/v1", "ServiceMonitor"): _by_cloudcoil(prometheus.ServiceMonitor),
        ("jobset.x-k8s.io/v1alpha2", "JobSet"): _by_kubeflow(trainer.JobsetV1alpha2JobSet),
        ("trainer.kubeflow.org/v1alpha1", "ClusterTrainingRuntime"): _by_kubeflow(
            trainer.TrainerV1alpha1ClusterTrainingRuntime
        ),
        ("trainer.kubeflow.org/v1alpha1", "TrainJob"): _by_kubeflow(
            trainer.TrainerV1alpha1TrainJob
        ),
    }


# Nobody publishes models of these in a Python package; what they have of Kubernetes is checked.
WITHOUT_MODEL = {
    ("leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet"),
    ("kueue.x-k8s.io/v1beta2", "ClusterQueue"),
    ("kueue.x-k8s.io/v1beta2", "LocalQueue"),
    ("kueue.x-k8s.io/v1beta2", "ResourceFlavor"),
}


class UnknownFields(ValueError):
    """An object has fields that its kind does not have; the text has their paths."""


def check(found: Object) -> None:
    """Raise if an object does not fit its schema, in the oldest and the newest Kubernetes.

    Models know no more of a pod than its fields, so a kind of others has its pods checked apart.
    """
    kind = found["apiVersion"], found["kind"]
    model = models().get(kind)
    if model is None and kind not in WITHOUT_MODEL:
        _check_built_in(found)
        return
    if model is not None:
        unknown = list(lost_fields(found, model(found)))
        if unknown:
            raise UnknownFields(f"{kind[1]} has no {', '.join(unknown)}")
    for template in pod_templates(found):
        metadata = {"name": found["metadata"]["name"]}
        as_object = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": metadata}
        _check_built_in({**as_object, "template": template})


def _check_built_in(found: Object) -> None:
    for version in (OLDEST, NEWEST):
        kubernetes_validate.validate(found, version, strict=True)


def lost_fields(given: Any, kept: Any, path: str = "") -> Iterator[str]:
    """Iterate over the paths of what was given and is not in what was kept."""
    if isinstance(given, dict):
        for name, value in given.items():
            if not isinstance(kept, dict) or name not in kept:
                yield f"{path}.{name}"
            else:
                yield from lost_fields(value, kept[name], f"{path}.{name}")
    elif isinstance(given, list):
        for index, value in enumerate(given):
            if not isinstance(kept, list) or index >= len(kept):
                yield f"{path}[{index}]"
            else:
                yield from lost_fields(value, kept[index], f"{path}[{index}]")
