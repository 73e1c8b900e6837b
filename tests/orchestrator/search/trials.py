"""The evidence that is brought before the failure detector."""

from __future__ import annotations

from tests.orchestrator.search.detector_world import Trial

TRIALS = [
    Trial("a death", deaths=1),
    Trial("two deaths", deaths=2),
    Trial("a death behind a firewall", deaths=1, rejects="abc"),
    Trial("a stop", stops=1),
    Trial("a stop that ends", stops=1, wake=True),
    Trial("a dead link", cuts=("ab",)),
    Trial("a link that comes back", cuts=("ab",), heals=1),
    Trial("two dead links of one node", cuts=("ab", "ac")),
    Trial("two dead links of one node, and a mistake", "abcd", cuts=("da", "db"), false=1),
    Trial("false suspicions", false=2),
    Trial("no way to the orchestrator", lonely=1),
    Trial("no way to the orchestrator for all", lonely=3),
    Trial("no way to the orchestrator, and a firewall", lonely=1, rejects="b"),
    Trial("the replica stands still", stalls=1, false=1),
    Trial("a stuck node", sticks=1),
    Trial("a stuck node that recovers", sticks=1, recovers=True),
    Trial("a stuck node that is suspected of silence", sticks=1, recovers=True, false=1),
    Trial("a stuck node dies, or another one", sticks=1, recovers=True, deaths=1),
    Trial("a death and a dead link", deaths=1, cuts=("ab",)),
    Trial("a stop, a false suspicion, no way to the orchestrator", stops=1, false=1, lonely=1),
]
LONG_TRIALS = [
    Trial(
        "deep: four nodes",
        nodes="abcd",
        deaths=1,
        stops=1,
        wake=True,
        false=2,
        lonely=1,
        stalls=1,
    ),
    Trial("deep: dead links", nodes="abcd", cuts=("ab", "bc"), heals=1, deaths=1, false=1),
]
BY_NAME = {each.name: each for each in TRIALS + LONG_TRIALS}
