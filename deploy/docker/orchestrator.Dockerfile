# The orchestrator: control plane. Build with the repository root as context:
#   docker build -f deploy/docker/orchestrator.Dockerfile -t allfold-orchestrator .

# The wheels of our packages. The stage is the same in all images, which then share its layers; each
# takes the wheels that it needs.
FROM python:3.11-slim-bookworm AS wheels
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore \
    PATH=/opt/venv/bin:$PATH PYTHONUNBUFFERED=1
RUN python -m venv /opt/venv
RUN pip install hatchling
COPY collective_core /src/collective_core
COPY orchestrator /src/orchestrator
COPY node_agent /src/node_agent
COPY client_sdk /src/client_sdk
RUN pip wheel --no-deps --no-build-isolation --wheel-dir /wheels /src/*

# What changes seldom first: settings, the third-party packages, then our own.
FROM python:3.11-slim-bookworm
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore \
    PATH=/opt/venv/bin:$PATH PYTHONUNBUFFERED=1
RUN python -m venv /opt/venv
LABEL org.opencontainers.image.title="Allfold orchestrator" \
      org.opencontainers.image.licenses="Apache-2.0"
WORKDIR /opt/allfold
# Services bind to loopback unless told otherwise; a container has a network of its own.
ENV ALLFOLD_ORCHESTRATOR_LISTEN=0.0.0.0:7400
EXPOSE 7400
HEALTHCHECK --interval=5s --timeout=3s --start-period=20s --retries=3 \
    CMD ["python", "-IS", "/opt/allfold/ready.py", "ALLFOLD_ORCHESTRATOR_LISTEN"]
ENTRYPOINT ["python", "-m", "allfold_orchestrator"]
# A named volume takes the owner of the folder that it covers, so those of secrets and certificates
# exist here.
RUN useradd --uid 10001 --user-group --create-home allfold \
 && install --directory --owner allfold --group allfold --mode 0750 /run/allfold-token \
    /run/allfold-redis /run/allfold-prometheus /run/allfold-grafana \
    /run/allfold-certs /run/allfold-tls /run/allfold-tls/redis /run/allfold-tls/orchestrator \
    /run/allfold-tls/agent-a /run/allfold-tls/agent-b /run/allfold-tls/prometheus
COPY constraints.txt deploy/docker/requirements.py /opt/allfold/
COPY orchestrator/pyproject.toml /opt/allfold/orchestrator/
COPY client_sdk/pyproject.toml /opt/allfold/client_sdk/
# The allfold command is there for `docker compose exec` and `kubectl exec`: status, top, doctor.
RUN python requirements.py orchestrator/pyproject.toml "client_sdk/pyproject.toml[cli]" \
    > requirements.txt \
 && pip install -c constraints.txt -r requirements.txt
COPY deploy/docker/ready.py deploy/docker/make_secrets.py deploy/docker/make_certs.py /opt/allfold/
COPY --from=wheels /wheels/allfold_core-*.whl /wheels/allfold_orchestrator-*.whl \
    /wheels/allfold-*.whl /opt/allfold/wheels/
RUN pip install --no-deps /opt/allfold/wheels/*.whl
USER 10001:10001
