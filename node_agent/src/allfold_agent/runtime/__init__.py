"""Threads, memory and readiness."""
