#!/bin/sh
# Every check that runs no test, all of them even if one fails. Exit 1 if any did.
cd "$(dirname "$0")/.." || exit 1
failed=

check() {
    name=$1
    shift
    if output=$("$@" 2>&1); then
        printf '%-12s ok\n' "$name"
    else
        printf '%-12s FAILED: %s\n%s\n' "$name" "$*" "$output"
        failed="$failed $name"
    fi
}

bin=.venv/bin
check format $bin/ruff format --check .
check lint $bin/ruff check .
check types $bin/mypy
check imports $bin/lint-imports
check dependencies $bin/deptry proxy policies
check dead-code $bin/vulture
check dockerfile $bin/hadolint Dockerfile

if [ -n "$failed" ]; then
    echo "failed:$failed"
    exit 1
fi
