#!/bin/sh
# Writes the exact locks in requirements/ anew from pyproject.toml: versions and hashes for every platform, no host names.
# What is locked stays where pyproject.toml allows it; `scripts/lock.sh --upgrade` takes the newest.
set -eu
cd "$(dirname "$0")/.."

lock() {
    name=$1
    shift
    .venv/bin/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-emit-index-url --no-emit-find-links \
        --custom-compile-command scripts/lock.sh --output-file "requirements/$name.txt" "$@"
}

lock dev pyproject.toml --extra demo --group dev "$@"
# The image runs what the tests ran: the others are subsets of dev.
lock runtime pyproject.toml --constraints requirements/dev.txt
lock build --group build --constraints requirements/dev.txt
