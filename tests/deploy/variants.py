"""The variants of the chart, and the folders of kustomize that mean the same."""

from __future__ import annotations

from tools.kubernetes_manifests import BASE, CERT_MANAGER, MONITORING

GPU = (*BASE, "gpu.enabled=true")
TLS = (*BASE, "tls.enabled=true")
EXTERNAL = (
    "redis.mode=external",
    "redis.external.url=rediss://:$(REDIS_PASSWORD)@redis.example:6380/0",
    "redis.external.ports={6380}",
)

VARIANTS: dict[str, tuple[str, ...]] = {
    "base": BASE,
    "gpu": GPU,
    "gpu-by-mount": (*GPU, "gpu.byVolumeMount=true"),
    "tls": TLS,
    "cert-manager": CERT_MANAGER,
    "cert-manager, own issuer": (*CERT_MANAGER, "tls.certManager.issuer.name=ours"),
    "monitoring": MONITORING,
    "monitoring, tls": (*MONITORING, "tls.enabled=true"),
    "sentinel": (*BASE, "redis.mode=sentinel"),
    "external Redis": EXTERNAL,
    "by hand": ("agent.updateStrategy=OnDelete", "agent.tolerateAllTaints=true", "agent.zone=a"),
    "registry": (
        "images.registry=registry.example/allfold/",
        "images.pullPolicy=Always",
        "images.pullSecrets={pull}",
        "orchestrator.env.ALLFOLD_LOG_LEVEL=DEBUG",
        "agent.env.ALLFOLD_AGENT_GPU=off",
        "agent.drainSeconds=2592000",
        "priorityClass.create=false",
        "priorityClass.name=",
        "networkPolicy.enabled=false",
        "agent.nodeSelector.pool=gpu",
    ),
}
"""By name, what is given to Helm's --set."""

SAME: dict[str, tuple[str, ...]] = {
    "base": ("base",),
    "gpu": ("overlays/gpu",),
    "gpu-by-mount": ("overlays/gpu-volume-mounts",),
    "tls": ("base", "components/tls"),
    "cert-manager": ("base", "components/tls", "components/cert-manager"),
    "monitoring": ("base", "components/monitoring"),
}
"""By variant, the folder of kustomize with the same objects, and the components beside it."""
