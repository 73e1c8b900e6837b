#!/usr/bin/env bash
# Put the CPU build of torch into deploy/docker/wheels/, as this machine's own pip configuration
# finds it: for machines that do not reach PyTorch's index. The images take it from there.
set -euo pipefail
cd "$(dirname "$0")/../.."

wheels=deploy/docker/wheels
pip="${PYTHON:-python3} -m pip"
version=$(sed -n 's/^torch==//p' constraints.txt)
case $(uname -m) in arm64 | aarch64) machine=aarch64 ;; *) machine=x86_64 ;; esac

if compgen -G "$wheels/torch-$version*.whl" > /dev/null; then
    echo "prepare-wheels: $wheels has torch $version"
    exit 0
fi
rm -f "$wheels"/*.whl  # other versions

# The platform of the images, not of this machine (a Mac builds Linux images).
$pip download --quiet --no-deps --only-binary=:all: --python-version 3.11 \
    --platform "manylinux_2_28_$machine" --constraint constraints.txt --dest "$wheels" torch

if ! compgen -G "$wheels/torch-$version+cpu*.whl" > /dev/null; then
    rm -f "$wheels"/*.whl
    echo "prepare-wheels: pip is configured for another than the CPU build of torch $version;" \
         "leave the folder empty, then the images take it from PyTorch's own index" >&2
    exit 1
fi
ls -l "$wheels"/*.whl
