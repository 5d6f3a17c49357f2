#!/bin/sh
# Makes .venv: Python 3.11 or newer, the exact packages of requirements/dev.txt checked by hash, this project editable.
# Run by make when something it depends on has changed. PYTHON=/path/to/python chooses the interpreter of a new .venv.
set -eu
cd "$(dirname "$0")/.."

say() { echo "setup: $*" >&2; }

fail() {
    say "$*"
    exit 1
}

# Two runs at once: the second waits, then finds the work done.
if [ -z "${SETUP_LOCKED:-}" ] && command -v flock > /dev/null; then
    SETUP_LOCKED=1 exec flock .setup.lock sh scripts/setup.sh
fi

wanted=$(cat requirements/dev.txt pyproject.toml scripts/setup.sh | cksum)
if [ "$(cat .venv/.ready 2> /dev/null)" = "$wanted" ]; then
    touch .venv/.ready
    exit 0
fi

is_new_enough() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2> /dev/null; }

find_python() {
    for candidate in ${PYTHON:-python3 python3.13 python3.12 python3.11 python3.14}; do
        if is_new_enough "$candidate"; then
            echo "$candidate"
            return
        fi
    done
}

# Debian keeps the standard library's venv in a package of its own.
add_venv_module() {
    version=$("$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
    say "$1 cannot make a virtual environment: Debian's python$version-venv is missing"
    if [ "$(id -u)" != 0 ] || ! command -v apt-get > /dev/null; then
        fail "install it (apt-get install python$version-venv, as root) and run make again"
    fi
    say "installing python$version-venv"
    apt-get update -qq >&2
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq "python$version-venv" >&2
}

if ! .venv/bin/python -c '' 2> /dev/null || ! is_new_enough .venv/bin/python; then
    python=$(find_python)
    [ -n "$python" ] || fail "Python 3.11 or newer is needed; name one with PYTHON=/path/to/python"
    "$python" -c 'import ensurepip, venv' 2> /dev/null || add_venv_module "$python"
    say "making .venv with $("$python" --version)"
    rm -rf .venv
    "$python" -m venv .venv
fi

# uv installs in seconds what takes pip most of a minute. It comes from the lock as well; where it cannot be used, pip does it all.
install() {
    if [ -x .venv/bin/uv ] && .venv/bin/uv pip install --quiet --python .venv/bin/python "$@"; then
        return
    fi
    say "installing with pip"
    .venv/bin/python -m pip install --quiet --disable-pip-version-check "$@"
}

if [ ! -x .venv/bin/uv ]; then
    sed -n '/^uv==/,/[^\\]$/p' requirements/dev.txt > .venv/uv.txt
    .venv/bin/python -m pip install --quiet --disable-pip-version-check --require-hashes -r .venv/uv.txt || say "no uv; going on without"
fi
say "installing the packages of requirements/dev.txt"
install --require-hashes -r requirements/dev.txt
install --no-deps --no-build-isolation --editable .
echo "$wanted" > .venv/.ready
