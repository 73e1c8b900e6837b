"""The rules of who may register under a node's name."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from allfold_core.errors import Evicted, MultipleRegister
from allfold_orchestrator.membership.nodes import (
    LEASE_ENDED,
    Admission,
    NodeRecord,
    admit,
    reason_of,
)
from allfold_orchestrator.store import keys
from tests.orchestrator.builders import node

HERE = NodeRecord(node("a", "1", version="0.1.0"), registered_at=5.0)
RESTARTED = NodeRecord(node("a", "2"), registered_at=9.0)
MOVED = NodeRecord(node("a", "2", data_address="elsewhere:7402"), registered_at=9.0)


def test_a_new_name_is_free() -> None:
    assert admit(None, lease_alive=False, applicant=HERE) == Admission(HERE)


@pytest.mark.parametrize("lease_alive", [True, False])
def test_registering_again_is_fine_and_does_not_make_the_node_younger(lease_alive: bool) -> None:
    again = replace(HERE, registered_at=9.0)
    assert admit(HERE, lease_alive=lease_alive, applicant=again) == Admission(HERE)


@pytest.mark.parametrize("lease_alive", [True, False])
def test_a_restarted_agent_takes_its_name_back_at_once(lease_alive: bool) -> None:
    result = admit(HERE, lease_alive=lease_alive, applicant=RESTARTED)
    assert result == Admission(RESTARTED, replaced=HERE.info)


def test_a_name_whose_lease_is_over_can_be_taken_from_anywhere() -> None:
    result = admit(HERE, lease_alive=False, applicant=MOVED)
    assert result == Admission(MOVED, replaced=HERE.info)


@pytest.mark.parametrize("applicant", [RESTARTED, MOVED])
def test_a_name_that_was_given_up_is_free(applicant: NodeRecord) -> None:
    gone = replace(HERE, lost_at=7.0)
    assert admit(gone, lease_alive=False, applicant=applicant) == Admission(applicant)


def test_a_life_that_is_over_does_not_begin_again() -> None:
    gone = replace(HERE, lost_at=7.0, lost_how="was stopped")
    error = admit(gone, lease_alive=False, applicant=replace(HERE, registered_at=9.0))
    assert isinstance(error, Evicted)
    assert error.details["how"] == "was stopped"


def test_a_second_agent_with_a_living_name_is_refused_and_told_both_addresses() -> None:
    error = admit(HERE, lease_alive=True, applicant=MOVED)
    assert isinstance(error, MultipleRegister)
    for address in ("http://a:7401", "a:7402", "elsewhere:7402"):
        assert address in error.message
    assert error.details["holder"]["data_address"] == "a:7402"
    assert error.details["applicant"]["data_address"] == "elsewhere:7402"


def test_records_survive_their_json_form() -> None:
    record = replace(HERE, lost_at=7.0)
    assert NodeRecord.from_dict(json.loads(json.dumps(record.to_dict()))) == record


def test_a_record_of_an_older_release_has_its_version_beside_the_node() -> None:
    written = HERE.to_dict()
    assert written["version"] == written["info"].pop("version") == "0.1.0"
    assert NodeRecord.from_dict(written) == HERE


def test_a_life_names_a_node_and_an_incarnation() -> None:
    assert keys.parse_life(keys.life("node-a.1", "b_2")) == ("node-a.1", "b_2")


def test_a_record_is_alive_in_its_own_incarnation_until_it_is_lost() -> None:
    record = NodeRecord(node("a", "1"), 0.0)
    assert record.is_alive_as("1")
    assert not record.is_alive_as("2")
    assert not replace(record, lost_at=1.0).is_alive_as("1")


def test_a_node_that_lives_is_ended_by_its_own_incarnation_alone() -> None:
    record = NodeRecord(node("a", "1"), 0.0)
    assert record.may_be_ended_by("1")
    assert not record.may_be_ended_by("2")
    assert replace(record, lost_at=1.0).may_be_ended_by("2")


def test_how_a_life_has_ended_is_known_from_the_record_of_its_node() -> None:
    assert HERE.end_of("1") == LEASE_ENDED
    assert replace(HERE, lost_at=7.0, lost_how="was stopped").end_of("1") == "was stopped"
    assert RESTARTED.end_of("1") == "was started anew"


def test_the_ends_of_lives_are_of_few_kinds() -> None:
    assert [reason_of(how) for how in (LEASE_ENDED, "was stuck", "signed off")] == [
        "lease_ended",
        "evicted",
        "signed_off",
    ]
