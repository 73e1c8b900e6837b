"""Policies of groups, by those options that matter to a test."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from allfold_core.group_options import GroupOptions
from allfold_core.survival.plans import GroupPolicy


def policy_with(**options: Any) -> GroupPolicy:
    """The policy of group ``g``."""
    return GroupPolicy("g", GroupOptions(30.0, **options))


def changed(policy: GroupPolicy, **options: Any) -> GroupPolicy:
    """A policy with other options."""
    return replace(policy, options=replace(policy.options, **options))
