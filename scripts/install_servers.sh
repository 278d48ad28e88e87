#!/bin/bash
# Installs what the tests need and pip does not have: sshd, ip, and Azurite by npm.
#
#     install_servers.sh FOLDER AZURITE      FOLDER: for Azurite; AZURITE: as npm install takes it
#
# sshd, ip and npm come from apt where they are missing, as root or by sudo.
set -euo pipefail
folder=$1 azurite=$2
PATH="$PATH:/usr/sbin:/usr/local/sbin"

install() {
    local as_root=()
    if ! command -v apt-get >/dev/null; then
        echo "the tests need npm and sshd (OpenSSH's server); install them and try again" >&2
        exit 1
    fi
    ((EUID == 0)) || as_root=(sudo)
    echo "installing: $*"
    "${as_root[@]}" apt-get update -qq
    "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive \
        apt-get install -y -qq --no-install-recommends "$@"
}

missing=()
command -v sshd >/dev/null || missing+=(openssh-server)
command -v npm >/dev/null || missing+=(nodejs)
command -v ip >/dev/null || missing+=(iproute2)
((${#missing[@]} == 0)) || install "${missing[@]}"
# Node's own package of nodejs has npm in it and conflicts with Debian's npm, which needs Debian's.
command -v npm >/dev/null || install npm

npm install --prefix "$folder" --no-audit --no-fund --loglevel=error "$azurite"
