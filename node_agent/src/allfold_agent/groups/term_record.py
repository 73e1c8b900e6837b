"""The record of a term, which the orchestrator may lose and then asks its nodes for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from allfold_core.survival.plans import term_fields, voter_of
from allfold_core.survival.records import Term


def record_of(term: Term, announced: int, known: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the record of a term that a node may have learned of from another one.

    What it does not say is as in the record that is known.

    Args:
        announced: the generation of the store that has announced the term.
        known: of this term or an earlier one.
    """
    if known["term"]["number"] >= term.number:
        return known
    voters = {**known["voters"], **{each.node: voter_of(each) for each in term.newcomers}}
    voters = {node: voters[node] for node in term.voters}
    return {**known, "term": term_fields(term), "voters": voters, "generation": announced}
