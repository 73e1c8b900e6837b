"""The parameters of which the gate runs each test with one value; all others are long."""

from __future__ import annotations

from tests.support.tiers import One

# Three nodes with one, two and three ranks have all that other shapes have: ranks that fold on one
# node, a node of one rank, and strategies that differ.
SHAPES = ("1+2+3", "2x2", "3x1")
TWO_BY_TWO = ("2x2", "(0, 0, 1, 1)", "[0, 0, 1, 1]")

GATE = (
    # A node of several ranks compares once all are there: with a late one, at the deadline.
    One(
        "tests/conformance/test_mismatch.py::test_who_calls_after_the_verdict",
        ("shared_job",),
        ("3x1",),
    ),
    One("tests/core/schedules/test_verify", ("nodes",), ("5",)),
    One("tests/core/pricing/test_price.py", ("chunks", "chunk_bytes"), ("16",)),
    One("tests/core/pricing/test_predict", ("elements", "arity"), ("20000", "3")),
    One("tests/conformance/", ("shared_job", "shape"), SHAPES),
    One("tests/conformance/", ("nodes",), TWO_BY_TWO),
    One("tests/conformance/", ("seed", "torch", "arena", "on_loss", "numel", "boundaries")),
    One("tests/client_sdk/test_cli_replicas.py", ("is_named",)),
    One("tests/client_sdk/test_cli_usage.py::test_a_setting_that_a_service", ("named",)),
    One("tests/deploy/test_schemas.py", ("name",)),
    One("tests/node_agent/groups/test_group.py", ("seed",)),
    One("tests/orchestrator/test_old_records.py", ("max_world",), ("4",)),
    One("tests/gpu/test_programs_on_cpu.py", ("shape", "options"), ("2x2",)),
    One("tests/browser/", ("scheme",)),
    One("tests/torch_backend/", ("torch_job",), TWO_BY_TWO),
    One("tests/torch_backend/test_collectives.py::test_a_mean_of_integers", ("program",)),
    One("tests/torch_backend/test_compiled.py", ("program",)),
    One("tests/torch_backend/test_training.py", ("options", "compute", "wire"), ("int8",)),
    One("tests/torch_backend/test_replaced_backends.py", ("has",)),
    One("tests/cuda/", ("nodes",), TWO_BY_TWO),
    One("tests/cuda/test_collectives.py", ("numel",), ("1000",)),
)
