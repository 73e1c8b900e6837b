# The node agent: folds the tensors of its machine's ranks and exchanges the result with the other
# agents. Build with the repository root as context:
#   docker build -f deploy/docker/agent.Dockerfile -t allfold-agent .
# For NVIDIA GPUs: --build-arg ALLFOLD_EXTRA=cuda13 (driver 580 or newer) or cuda12 (525 or newer).
# Its torch stays the CPU build: it folds with kernels of its own, by the driver that the NVIDIA
# container toolkit brings.

# The stage is the same in job.Dockerfile, so that both images share its layers. It takes the CPU
# build of torch, because a plain "pip install torch" brings gigabytes of CUDA: from a wheel in
# deploy/docker/wheels/ when there is one (prepare-wheels.sh) and no CUDA index is asked for, else
# from PyTorch's own index.
FROM python:3.11-slim-bookworm AS torch
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore \
    PATH=/opt/venv/bin:$PATH PYTHONUNBUFFERED=1
RUN python -m venv /opt/venv
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
COPY constraints.txt deploy/docker/wheels /tmp/torch/
RUN cuda() { case $TORCH_INDEX in */cu[0-9]*) true ;; *) false ;; esac; } \
 && if ! cuda && ls /tmp/torch/torch-*.whl; then from="--no-index --find-links /tmp/torch"; \
    else from="--index-url $TORCH_INDEX"; fi \
 && pip install --no-compile --no-deps -c /tmp/torch/constraints.txt $from torch \
 && pip install --no-compile -c /tmp/torch/constraints.txt torch "numpy>=1.26" \
 # C++ headers and test programs, 200 MB that nothing uses at run time.
 && (cd /opt/venv/lib/python3.11/site-packages/torch \
     && rm -rf include test bin/test_* bin/*Test bin/protoc*) \
 # On all cores, unlike pip. Containers are read-only: what is not compiled here would be at each start.
 # Tests are left out, and so are files for later Pythons. Not in torch's folder, where `types` is
 # torch's own and no Python starts.
 && (python -m compileall -q -j 0 -x '/tests/|/py312_' /opt/venv || true)

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
COPY --from=torch /opt/venv /opt/venv
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore \
    PATH=/opt/venv/bin:$PATH PYTHONUNBUFFERED=1
LABEL org.opencontainers.image.title="Allfold node agent" \
      org.opencontainers.image.licenses="Apache-2.0"
WORKDIR /opt/allfold
ENV ALLFOLD_AGENT_CONTROL_LISTEN=0.0.0.0:7411 \
    ALLFOLD_AGENT_DATA_LISTEN=0.0.0.0:7412 \
    ALLFOLD_SOCKET=/run/allfold/agent.sock
EXPOSE 7411 7412
HEALTHCHECK --interval=5s --timeout=3s --start-period=20s --retries=3 \
    CMD ["python", "-IS", "/opt/allfold/ready.py", "ALLFOLD_AGENT_CONTROL_LISTEN"]
ENTRYPOINT ["python", "-m", "allfold_agent"]
# A named volume takes the owner of the folder that it covers, so the socket's folder exists here.
RUN useradd --uid 10001 --user-group --create-home allfold \
 && install --directory --owner allfold --group allfold --mode 0700 /run/allfold /run/allfold-token
COPY constraints.txt deploy/docker/requirements.py /opt/allfold/
COPY node_agent/pyproject.toml /opt/allfold/node_agent/
COPY client_sdk/pyproject.toml /opt/allfold/client_sdk/
ARG ALLFOLD_EXTRA=
# The allfold command is there for `docker compose exec` and `kubectl exec`: status, top, doctor.
RUN python requirements.py "node_agent/pyproject.toml[$ALLFOLD_EXTRA]" \
    "client_sdk/pyproject.toml[cli]" > requirements.txt \
 && pip install -c constraints.txt -r requirements.txt
COPY deploy/docker/ready.py /opt/allfold/
COPY --from=wheels /wheels/allfold_core-*.whl /wheels/allfold_agent-*.whl /wheels/allfold-*.whl \
    /opt/allfold/wheels/
RUN pip install --no-deps /opt/allfold/wheels/*.whl
USER 10001:10001
