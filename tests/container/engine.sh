#!/usr/bin/env bash
# Podman for the container tests: for root on Debian or Ubuntu, without a registry, systemd or cgroup v2.
#
#   engine.sh install                 install podman and its helpers, if they are missing
#   engine.sh base                    make the base image from this machine's package sources
#   engine.sh build FOLDER TAG [...]  build target `cpu` of FOLDER/docker/Dockerfile; further options are podman's, such
#                                     as --target=gpu
#   engine.sh env                     print variables to `eval` with which any podman sees these images
#
# Each command may be repeated. Images are in $DLSCALE_CONTAINERS (default: /var/tmp/dlscale-containers), unless
# CONTAINERS_STORAGE_CONF names another store. $DLSCALE_BASE_IMAGE names an existing image, which becomes the base.
set -euo pipefail

STATE=${DLSCALE_CONTAINERS:-/var/tmp/dlscale-containers}
BASE=${DLSCALE_BASE_IMAGE:-localhost/ci-base:bookworm}

settings() {
    [ -z "${CONTAINERS_STORAGE_CONF:-}" ] || return 0
    mkdir -p "$STATE"
    export CONTAINERS_CONF=$STATE/containers.conf CONTAINERS_STORAGE_CONF=$STATE/storage.conf
    # Use the current limits: podman's defaults would raise them, which needs CAP_SYS_RESOURCE.
    local files processes most
    files=$(ulimit -H -n) processes=$(ulimit -H -u) most=$(cat /proc/sys/kernel/pid_max)
    [ "$files" != unlimited ] || files=1048576
    if [ "$processes" = unlimited ] || [ "$processes" -gt "$most" ]; then processes=$most; fi
    # runc works with every cgroup version; cgroupfs and a file for events do not need systemd.
    printf '%s\n' '[containers]' "default_ulimits = [\"nofile=$files:$files\", \"nproc=$processes:$processes\"]" \
        '[engine]' 'runtime = "runc"' 'cgroup_manager = "cgroupfs"' 'events_logger = "file"' \
        '[network]' 'network_backend = "netavark"' >"$CONTAINERS_CONF"
    printf '%s\n' '[storage]' 'driver = "overlay"' "graphroot = \"$STATE/storage\"" "runroot = \"$STATE/run\"" \
        >"$CONTAINERS_STORAGE_CONF"
}

install() {
    local missing=() package
    for package in podman runc conmon catatonit netavark aardvark-dns iptables mmdebstrap; do
        dpkg --status "$package" 2>/dev/null | grep -q '^Status:.* installed' || missing+=("$package")
    done
    [ ${#missing[@]} -gt 0 ] || return 0
    apt-get -qq update
    DEBIAN_FRONTEND=noninteractive apt-get -qq -o DPkg::Lock::Timeout=300 install --no-install-recommends "${missing[@]}"
}

# pip_values KEY: print the values of KEY in pip's settings (files and environment), one per line.
pip_values() {
    { python3 -m pip config list 2>/dev/null || true; } |
        sed -n "s/^.*\.$1='\(.*\)'\$/\1/p" | sed 's/\\n/ /g' | xargs -n 1 | sort -u
}

# The base gets this machine's package indexes and certificates, so that the Dockerfile does not need them.
base() {
    settings
    if [ -n "${DLSCALE_BASE_IMAGE:-}" ] || podman image exists "$BASE"; then return 0; fi
    local work key suite sources
    work=$(mktemp -d)
    trap 'rm -rf "$work"; trap - RETURN' RETURN
    mkdir "$work/certificates"
    find /usr/local/share/ca-certificates -name '*.crt' -exec cp -t "$work/certificates" {} +
    {
        printf '[global]\ncert = /etc/ssl/certs/ca-certificates.crt\n'
        for key in index-url extra-index-url find-links; do
            [ -z "$(pip_values "$key")" ] || printf '%s = %s\n' "$key" "$(pip_values "$key" | xargs)"
        done
    } >"$work/pip.conf"
    suite=$(sed -n 's/^VERSION_CODENAME=//p' /etc/os-release)
    mapfile -t sources < <(find /etc/apt/sources.list /etc/apt/sources.list.d -type f -size +0 \
        \( -name '*.list' -o -name '*.sources' \) 2>/dev/null)
    # shellcheck disable=SC2016  # mmdebstrap sets $1
    mmdebstrap --quiet --variant=minbase --include=ca-certificates,python3,python3-venv \
        --aptopt='Acquire::Check-Valid-Until "false"' \
        --customize-hook="sync-in $work/certificates /usr/local/share/ca-certificates" \
        --customize-hook='chroot "$1" update-ca-certificates' \
        --customize-hook="copy-in $work/pip.conf /etc" \
        "$suite" "$work/base.tar" "${sources[@]}"
    podman import --quiet --change 'ENV PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin' \
        "$work/base.tar" "$BASE"
}

build() {
    local folder=$1 tag=$2 place mounts=()
    shift 2
    base
    # Package folders in pip's settings are mounted for the build, not copied. For an index, the parent of its folder
    # `simple` is mounted, because links of the index point there.
    while read -r place; do
        place=${place#file://}
        place=${place%/simple}
        [ ! -d "$place" ] || mounts+=("--volume=$place:$place:ro")
    done < <(pip_values extra-index-url; pip_values find-links)
    # The docker format keeps HEALTHCHECK. If the base is made here, a missing image is an error at once, without a
    # search over the network.
    podman build --format=docker --network=host --pull="$([ -n "${DLSCALE_BASE_IMAGE:-}" ] && echo missing || echo never)" \
        --build-arg="BASE_IMAGE=$BASE" --build-arg="GPU_BASE_IMAGE=$BASE" --build-arg=TORCH_INDEX= "${mounts[@]}" \
        --target=cpu "$@" --file="$folder/docker/Dockerfile" --tag="$tag" "$folder"
}

env() {
    settings
    printf 'export CONTAINERS_STORAGE_CONF=%q\n' "$CONTAINERS_STORAGE_CONF"
    [ -z "${CONTAINERS_CONF:-}" ] || printf 'export CONTAINERS_CONF=%q\n' "$CONTAINERS_CONF"
}

case ${1:-} in
    install | base | build | env) "$@" ;;
    *) sed -n '2,/^set/s/^# \{0,1\}//p' "$0" >&2; exit 2 ;;
esac
