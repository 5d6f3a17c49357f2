#!/usr/bin/env bash
# Builds the image without a docker daemon and runs it: a Debian base by debootstrap, the Dockerfile by buildah (both from
# Debian's packages), in a chroot. Optional: needs root and Debian; says why where it cannot run, and exits 0 then.
set -euo pipefail
cd "$(dirname "$0")/../.."

skip() {
    echo "test-container: skipped: $*"
    exit 0
}

[ "$(id -u)" = 0 ] || skip "needs root"
command -v apt-get > /dev/null || skip "needs Debian's packages"
for tool in debootstrap buildah; do
    command -v $tool > /dev/null || { apt-get update -qq && apt-get install -y -qq --no-install-recommends debootstrap buildah; }
done

work=$(mktemp -d "${TMPDIR:-/tmp}/cp-image.XXXXXX")
export STORAGE_DRIVER=vfs BUILDAH_ISOLATION=chroot
export XDG_DATA_HOME=$work/data XDG_RUNTIME_DIR=$work/run
base=docker.io/library/python:3.12-slim-bookworm
image=localhost/compaction-proxy:test
roots=(--root "$work/storage" --runroot "$work/runroot")
trap 'rm -rf "$work" 2> /dev/null || true' EXIT

# A stand-in for the official base: Debian's own Python (no image can be pulled everywhere).
debootstrap --variant=minbase --include=ca-certificates,python3,python3-venv,python3-pip bookworm "$work/root" > "$work/debootstrap.log" \
    || { tail -20 "$work/debootstrap.log"; exit 1; }
ln -sf python3 "$work/root/usr/bin/python"
rm -f "$work"/root/usr/lib/python3*/EXTERNALLY-MANAGED
cp /etc/resolv.conf "$work/root/etc/resolv.conf"
[ -d /etc/ssl/certs ] && cp -rL /etc/ssl/certs/. "$work/root/etc/ssl/certs/" 2> /dev/null || true
for file in /etc/pip.conf /etc/xdg/pip/pip.conf "$HOME/.config/pip/pip.conf"; do
    [ -e "$file" ] && install -D "$file" "$work/root/etc/pip.conf"
done
c=$(buildah "${roots[@]}" from scratch)
buildah "${roots[@]}" copy -q "$c" "$work/root" / > /dev/null
buildah "${roots[@]}" commit -q "$c" $base > /dev/null

pass=()
for name in PIP_INDEX_URL PIP_TRUSTED_HOST PIP_CERT SSL_CERT_FILE HTTPS_PROXY HTTP_PROXY NO_PROXY; do
    [ -n "${!name:-}" ] && pass+=(--env "$name=${!name}")
done
buildah "${roots[@]}" bud --pull-never --isolation chroot --network host --format docker "${pass[@]}" -t $image .

c=$(buildah "${roots[@]}" from --pull-never $image)
run() { buildah "${roots[@]}" run --isolation chroot "$c" -- "$@"; }
[ "$(run id -u)" = 10001 ] || { echo "the image does not run as the user without rights"; exit 1; }
run compaction-proxy --version
run python -c "import tiktoken.load as t; t.read_file = None
from compaction_proxy.tokens import O200K, exactly, load
assert exactly(load(O200K, None))('hello world') == 2"
run sh -c 'compaction-proxy serve --host 127.0.0.1 --port 18787 & p=$!
for i in $(seq 100); do python -c "import urllib.request as u; u.urlopen(\"http://127.0.0.1:18787/readyz\", timeout=1)" 2> /dev/null && ok=1 && break; sleep 0.1; done
kill $p; test -n "$ok"'
buildah "${roots[@]}" inspect --type image $image | grep -q Healthcheck
echo "test-container: passed"
