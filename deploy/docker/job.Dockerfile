# A training job: the SDK, the `allfold` command and the examples. Build with the repository root as
# context; take it as the pattern for your own job's image:
#   docker build -f deploy/docker/job.Dockerfile -t allfold-job .
# For NVIDIA GPUs, CUDA 13 (driver 580 or newer):
#   --build-arg ALLFOLD_EXTRA=cuda13 --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cu130
# and for CUDA 12 (driver 525 or newer) cuda12 and .../cu126.

# The stage is the same in agent.Dockerfile, so that both images share its layers. It takes the CPU
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
LABEL org.opencontainers.image.title="Allfold training job" \
      org.opencontainers.image.licenses="Apache-2.0"
WORKDIR /opt/allfold
# A job ends by itself; its exit status is what to look at.
HEALTHCHECK NONE
ENTRYPOINT ["allfold"]
CMD ["--help"]
RUN useradd --uid 10001 --user-group --create-home allfold \
 && install --directory --owner allfold --group allfold --mode 0700 /run/allfold
COPY constraints.txt deploy/docker/requirements.py /opt/allfold/
COPY client_sdk/pyproject.toml /opt/allfold/client_sdk/
ARG ALLFOLD_EXTRA=
RUN python requirements.py "client_sdk/pyproject.toml[cli,$ALLFOLD_EXTRA]" > requirements.txt \
 && pip install -c constraints.txt -r requirements.txt scikit-learn
COPY --from=wheels /wheels/allfold_core-*.whl /wheels/allfold-*.whl /opt/allfold/wheels/
RUN pip install --no-deps /opt/allfold/wheels/*.whl
COPY examples /opt/allfold/examples
USER 10001:10001
