"""The network policies of deploy/kubernetes: the services and ports that each pod may reach."""

from __future__ import annotations

from collections.abc import Iterator

from tests.deploy.manifests import EXAMPLES, NAME, Object, jobs, of_kind, read

ANYBODY = "anybody"
DNS = [(ANYBODY, "UDP", 53), (ANYBODY, "TCP", 53)]
INGRESS = {
    "agent": [("agent", "TCP", 7411), ("agent", "TCP", 7412), ("orchestrator", "TCP", 7411)],
    "orchestrator": [("agent", "TCP", 7400)],
    "redis": [("orchestrator", "TCP", 6379)],
}
EGRESS = {
    "agent": [
        ("agent", "TCP", 7411),
        ("agent", "TCP", 7412),
        ("orchestrator", "TCP", 7400),
        *DNS,
    ],
    # "allfold status" and "allfold doctor" in its container ask the agents.
    "orchestrator": [("redis", "TCP", 6379), ("agent", "TCP", 7411), *DNS],
}
JOB_NAME = "batch.kubernetes.io/job-name"

Way = tuple[object, object, object]


def policies(objects: list[Object]) -> dict[str, Object]:
    return {name: each["spec"] for name, each in of_kind(objects, "NetworkPolicy").items()}


def of_services(objects: list[Object]) -> dict[str, Object]:
    """The policies of the installation, without those of the examples."""
    return {name: each for name, each in policies(objects).items() if name not in LABELS}


def ways(policy: Object, direction: str, label: str = NAME) -> Iterator[Way]:
    """Every (peer, protocol, port) that a policy opens; what is not named is :data:`ANYBODY`."""
    for rule in policy.get(direction, ()):
        for peer in rule.get("from" if direction == "ingress" else "to", [None]):
            for port in rule.get("ports", [{}]):
                assert "endPort" not in port
                yield who(peer, label), port.get("protocol", "any"), port.get("port", "any")


def who(peer: Object | None, label: str) -> str:
    """A pod's name where a peer is just that, else all of what it says."""
    if peer is None:
        return ANYBODY
    if peer.keys() == {"podSelector"} and peer["podSelector"].keys() == {"matchLabels"}:
        labels = peer["podSelector"]["matchLabels"]
        if labels.keys() == {label}:
            return str(labels[label])
    return str(peer)


def test_everything_is_refused_unless_a_policy_allows_it(objects: list[Object]) -> None:
    assert policies(objects)["default-deny"] == {
        "podSelector": {},
        "policyTypes": ["Ingress", "Egress"],
    }


def test_policies_are_for_the_pods_of_their_name(objects: list[Object]) -> None:
    found = {
        name: policy["podSelector"]
        for name, policy in of_services(objects).items()
        if name != "default-deny"
    }
    assert found == {name: {"matchLabels": {NAME: name}} for name in INGRESS}


def test_nobody_else_comes_in(objects: list[Object]) -> None:
    found = {name: list(ways(each, "ingress")) for name, each in of_services(objects).items()}
    assert {name: each for name, each in found.items() if each} == INGRESS


def test_nobody_goes_out_but_to_pods_of_ours_and_to_dns(objects: list[Object]) -> None:
    found = {name: list(ways(each, "egress")) for name, each in of_services(objects).items()}
    assert {name: each for name, each in found.items() if each} == EGRESS


def test_who_may_send_may_also_be_heard() -> None:
    """Every way out to a pod of ours has its way in, and the other way round."""
    out = {(here, *way) for here, ways in EGRESS.items() for way in ways if way not in DNS}
    into = {(there, here, *rest) for here, ways in INGRESS.items() for there, *rest in ways}
    assert out == into
    assert len(out) == 5


# --- jobs with a network

LABELS = {
    "ddp": JOB_NAME,
    "ddp-set": "jobset.sigs.k8s.io/jobset-name",
    "ddp-trained": "jobset.sigs.k8s.io/jobset-name",
}


def test_the_pods_of_one_job_may_reach_each_other_and_nobody_else() -> None:
    found = policies(read(*EXAMPLES))
    assert found.keys() == LABELS.keys()
    for name, policy in found.items():
        label = LABELS[name]
        assert policy["podSelector"] == {"matchLabels": {label: name}}
        assert policy["policyTypes"] == ["Ingress", "Egress"]
        assert list(ways(policy, "ingress", label)) == [(name, "any", "any")]
        assert list(ways(policy, "egress", label)) == [(name, "any", "any"), *DNS]


def test_the_job_of_a_policy_is_there() -> None:
    kinds = {"ddp": "Job", "ddp-set": "JobSet", "ddp-trained": "TrainJob"}
    objects = read(*EXAMPLES)
    assert all(name in of_kind(objects, kind) for name, kind in kinds.items())


def test_rank_0_of_a_job_has_the_name_that_its_pods_are_told() -> None:
    objects = read(*EXAMPLES)
    service = of_kind(objects, "Service")["ddp"]
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["publishNotReadyAddresses"] is True
    assert service["spec"]["selector"] == {JOB_NAME: "ddp"}
    # An indexed job's pod is called after the job and its index; the subdomain is the service.
    job = jobs(objects)["ddp"]
    assert job.pod["subdomain"] == "ddp"
    assert job.value("MASTER_ADDR") == "ddp-0.ddp"
    # JobSet adds the name and index of the replicated job, and makes the service itself.
    (replicated,) = of_kind(objects, "JobSet")["ddp-set"]["spec"]["replicatedJobs"]
    host = f"ddp-set-{replicated['name']}-0-0.ddp-set"
    assert jobs(objects)["ddp-set"].value("MASTER_ADDR") == host
