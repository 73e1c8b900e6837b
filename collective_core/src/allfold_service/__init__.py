"""One way to be a service: its server, its answers, its metrics, its logs and its settings.

The orchestrator and the node agent may import all of it. The SDK and its commands may import
:mod:`~allfold_service.credentials`, :mod:`~allfold_service.tls` and
:mod:`~allfold_service.addresses`, which need the standard library alone; the rest needs FastAPI,
uvicorn, pydantic and the client library of Prometheus, which the two services bring along.
"""
