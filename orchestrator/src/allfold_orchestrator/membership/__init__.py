"""Membership as pure state machines. No I/O."""
