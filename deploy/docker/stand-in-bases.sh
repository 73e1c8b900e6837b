#!/usr/bin/env bash
# Make local stand-ins for the images that docker-compose.yml takes from a registry, for machines that
# reach a Debian mirror but no registry: python:3.11-slim-bookworm, redis:7-bookworm and
# prom/prometheus. Needs root, a Docker engine and apt.
# Images that are there are kept; --force makes stand-ins over them. All three, or those that are named:
#   stand-in-bases.sh [--force] [IMAGE...]
# They have Debian's redis-server (7.0) and prometheus (2.42). Debian has no Grafana.
set -euo pipefail

python_image=python:3.11-slim-bookworm
redis_image=redis:7-bookworm
prometheus_image=prom/prometheus:v3.5.0
base_image=allfold-stand-in-base
label=org.allfold.stand-in

force=
if [[ ${1:-} == --force ]]; then force=--force; shift; fi
images=("$@")
[[ ${#images[@]} -gt 0 ]] || images=("$python_image" "$redis_image" "$prometheus_image")

missing() {  # IMAGE: true when a stand-in for it is to be made
    local stand_in
    [[ $force == --force ]] && return
    stand_in=$(docker image inspect --format "{{index .Config.Labels \"$label\"}}" "$1" \
        2> /dev/null) || return 0
    if [[ $stand_in == yes ]]; then echo "$1: a stand-in is there"
    else echo "$1: the real image is there and kept"; fi
    return 1
}

mirror() {  # the Debian mirrors that this machine's apt uses, best first; may be none
    { cat /etc/apt/sources.list.d/*.sources 2> /dev/null || true; } \
        | awk 'BEGIN { RS = "" } /Suites:[^\n]*bookworm( |\n|$)/' | sed -n 's/^URIs: *\([^ ]*\).*/\1/p'
    { cat /etc/apt/sources.list /etc/apt/sources.list.d/*.list 2> /dev/null || true; } \
        | sed -n 's/^deb \(\[[^]]*\] \)\{0,1\}\([^ ]*\) bookworm main.*/\2/p'
}

make_base() {  # a minimal bookworm with Python and Redis: to install all at once takes half the time
    local source
    command -v debootstrap > /dev/null || {
        apt-get update -q && apt-get install -yq debootstrap debian-archive-keyring
    }
    root=$(mktemp -d)
    trap 'rm -rf "$root"' EXIT
    source=$(mirror)
    # Without a mirror of this machine's own, debootstrap uses its default.
    debootstrap --variant=minbase \
        --include=ca-certificates,python3,python3-pip,python3-venv,redis-server \
        bookworm "$root" ${source:+"${source%%$'\n'*}"}
    # This machine's CA bundle: pip in a build must trust what this machine trusts, for instance a
    # mirror that inspects TLS.
    cp /etc/ssl/certs/ca-certificates.crt "$root/etc/ssl/certs/ca-certificates.crt"
    # As in Debian's own images: an image build that dies is thrown away, so no fsync per file.
    echo force-unsafe-io > "$root/etc/dpkg/dpkg.cfg.d/unsafe-io"
    rm -rf "$root"/var/cache/apt/archives/*.deb "$root"/var/lib/apt/lists/*
    tar -C "$root" -c . | docker import --change "LABEL $label=yes" - "$base_image"
}

build() { docker build --quiet --network host --tag "$1" -; }

make_python() {  # `python` and `pip` on the PATH and no EXTERNALLY-MANAGED, as in the official image
    build "$python_image" << EOF
FROM $base_image
ENV PIP_CERT=/etc/ssl/certs/ca-certificates.crt SSL_CERT_FILE=/etc/ssl/certs/ca-certificates.crt
RUN rm /usr/lib/python3.11/EXTERNALLY-MANAGED && ln -s /usr/bin/python3 /usr/local/bin/python
CMD ["python3"]
EOF
}

make_redis() {  # user, folder, port, entry and command of the official image
    build "$redis_image" << EOF
FROM $base_image
RUN groupmod -g 999 redis && usermod -u 999 redis \
 && install --directory --owner redis --group redis /data \
 && printf '#!/bin/sh\n[ "\${1#-}" = "\$1" ] || set -- redis-server "\$@"\nexec "\$@"\n' \
      > /usr/local/bin/docker-entrypoint.sh && chmod +x /usr/local/bin/docker-entrypoint.sh
VOLUME /data
WORKDIR /data
EXPOSE 6379
ENTRYPOINT ["docker-entrypoint.sh"]
CMD ["redis-server"]
EOF
}

make_prometheus() {  # user, folders, port and entry of the official image
    build "$prometheus_image" << EOF
FROM $base_image
RUN apt-get update -q \
 && apt-get install -yq --no-install-recommends prometheus \
 && rm -rf /var/lib/apt/lists/* /var/cache/apt/*.bin /etc/prometheus/* \
 && install --directory --owner nobody --group nogroup /prometheus
USER nobody
VOLUME /prometheus
WORKDIR /prometheus
EXPOSE 9090
ENTRYPOINT ["/bin/prometheus"]
CMD ["--config.file=/etc/prometheus/prometheus.yml", "--storage.tsdb.path=/prometheus"]
EOF
}

docker version > /dev/null  # fails here, not after a minute, where no engine answers
for image in "${images[@]}"; do
    case $image in
    "$python_image") make=make_python ;;
    "$redis_image") make=make_redis ;;
    "$prometheus_image") make=make_prometheus ;;
    *) echo "$0: no stand-in for $image; usage: $0 [--force] [IMAGE...]" >&2; exit 2 ;;
    esac
    if missing "$image"; then
        # Made once, also where --force is given.
        if [[ -z ${root:-} ]] && missing "$base_image"; then make_base; fi
        "$make"
    fi
done
