#!/usr/bin/env bash
# Builds the image from the Dockerfile and tests it, without a Docker daemon: sudo scripts/image_test.sh [FOLDER]
#
# debootstrap makes the base image and buildah builds with chroot isolation; both are Debian packages and need root.
# FOLDER keeps base and images (default: /var/tmp/finetune-image). BUILD_OPTIONS is passed to `buildah bud`, for a package index of
# your own; REUSE=1 tests the image of an earlier build. E.g. BUILD_OPTIONS="--volume /etc/pip.conf:/etc/pip.conf:ro --build-arg TORCH_INDEX=".
set -euo pipefail
cd "$(dirname "$0")/.."
folder=${1:-/var/tmp/finetune-image}
suite=${SUITE:-bookworm}
mirror=${MIRROR:-http://deb.debian.org/debian}
image=localhost/finetune:test
mkdir -p "$folder"
page_pid=

buildah() { command buildah --root "$folder/storage" --runroot "$folder/run" --storage-driver vfs "$@"; }
say() { printf '\n== %s\n' "$*"; }
fail() { printf 'FAILED: %s\n' "$*" >&2; exit 1; }
inside() { buildah run --isolation chroot "$container" -- "$@"; }
tini_of() { pgrep -f "^/usr/bin/tini -- entrypoint.sh $1 " || true; }
finish() {
  for command in ui run; do
    kill -TERM "$(tini_of "$command")" 2>/dev/null || true
  done
  [ -z "${container:-}" ] || buildah rm "$container" >/dev/null 2>&1 || true
}
trap finish EXIT

say "base: Debian $suite by debootstrap"
if [ ! -e "$folder/base/etc/debian_version" ]; then
  debootstrap --variant=minbase "$suite" "$folder/base" "$mirror" >"$folder/debootstrap.log"
fi
if ! buildah inspect --type image localhost/debian:base >/dev/null 2>&1; then
  scratch=$(buildah from scratch)
  buildah add -q "$scratch" "$folder/base" / >/dev/null
  buildah commit -q --rm "$scratch" localhost/debian:base >/dev/null
fi

if [ -n "${REUSE:-}" ]; then
  say "build: reused (REUSE)"
else
  say "build"
  began=$(date +%s)
  # shellcheck disable=SC2086
  buildah bud -q --isolation chroot --format docker --layers=false --build-arg BASE=localhost/debian:base \
    --build-arg TORCH=cpu ${BUILD_OPTIONS:-} -t "$image" . >"$folder/build.log"
  printf 'built in %s s\n' "$(($(date +%s) - began))"
fi

say "configuration"
buildah inspect --type image "$image" >"$folder/image.json"
python3 - "$folder/image.json" <<'PYTHON'
import json, pathlib, sys
config = json.loads(pathlib.Path(sys.argv[1]).read_text())["Docker"]["config"]
environment = dict(entry.split("=", 1) for entry in config["Env"])
assert config["User"] == "1000:1000", config["User"]
assert config["Entrypoint"] == ["tini", "--", "entrypoint.sh"], config["Entrypoint"]
assert config["Cmd"] == ["ui", "--host", "0.0.0.0"], config["Cmd"]
assert config["Healthcheck"]["Test"][0] == "CMD" and config["StopSignal"] == "SIGTERM"
assert environment["NVIDIA_DRIVER_CAPABILITIES"] == "compute,utility"
assert {"/cache", "/work/runs", "/work/recipes"} == set(config["Volumes"])
secrets = [name for name in environment if any(word in name for word in ("TOKEN", "SECRET", "PASSWORD", "KEY", "PIP_", "PROXY"))]
assert not secrets, secrets
print("user, entry point, health check, volumes and environment are as expected")
PYTHON

container=$(buildah from --pull-never "$image")
place=$(buildah mount "$container")
printf 'size: %s MB\n' "$(du -sm --apparent-size "$place" | cut -f1)"
say "contents"
found=$(cd "$place" && find . -xdev \( -name .git -o -name .netrc -o -name 'id_rsa*' -o -name .env -o -path '*/.cache/pip' \
  -o -path '*/huggingface/token' -o -path './root/.cache/*' -o -path './tmp/*' -o -path ./etc/pip.conf -size +0 \) -print | head)
[ -z "$found" ] || fail "secrets or caches in the image: $found"
[ -z "$(find "$place/var/lib/apt/lists" -type f 2>/dev/null)" ] || fail "apt lists in the image"
! grep -rlE 'hf_[A-Za-z0-9]{30,}' "$place/opt/finetune/lib" --include='*.json' --include='*.yaml' || fail "a token in the image"
echo "no secret, no cache, no history"

say "as uid 1000"
[ "$(inside id -u)" = 1000 ] || fail "not uid 1000"
for path in /work/runs /work/recipes /cache /home/finetune; do
  inside sh -c "touch $path/probe && rm $path/probe" || fail "$path can't be written by uid 1000"
done
inside sh -c 'if touch /opt/finetune/probe 2>/dev/null; then exit 1; fi' || fail "uid 1000 can write to the program"
inside finetune --version

say "doctor"
inside finetune doctor tiny-cpu || fail "doctor fails"

say "plan"
inside finetune plan tiny-cpu >"$folder/plan.txt" || fail "plan"
tail -n 3 "$folder/plan.txt"

say "page and health check"
inside tini -- entrypoint.sh ui --host 0.0.0.0 >"$folder/page.log" 2>&1 &
page_pid=$!
for _ in $(seq 120); do
  curl -fs http://127.0.0.1:7860/healthz >/dev/null 2>&1 && break
  sleep 1
done
curl -fsS http://127.0.0.1:7860/healthz; echo
[ "$(curl -s -o /dev/null -w '%{http_code}' http://127.0.0.1:7860/)" = 401 ] || fail "the page opens without its token"
inside python /opt/finetune/bin/healthcheck.py || fail "health check"

say "a training, stopped by the container's stop signal"
inside tini -- entrypoint.sh run tiny-cpu max_steps=100000 save_steps=0 eval_steps=0 output_dir=runs/long >"$folder/run.log" 2>&1 &
run_pid=$!
for _ in $(seq 120); do
  inside grep -q '"kind": "step"' runs/long/events.jsonl 2>/dev/null && break
  sleep 1
done
kill -TERM "$(tini_of run)" || fail "the training has ended: $(tail -n 3 "$folder/run.log")"
code=0
wait "$run_pid" || code=$?
[ "$code" = 143 ] || fail "the container ended with $code, not 143"
grep -a 'with a checkpoint' "$folder/run.log" || fail "not stopped with a checkpoint"
inside sh -c 'ls runs/long/checkpoints/checkpoint-*/MANIFEST.json' || fail "no sealed checkpoint"
inside finetune runs

say "the page stops on SIGTERM"
kill -TERM "$(tini_of ui)"
wait "$page_pid" || true
page_pid=
! pgrep -f '/opt/finetune/bin/python -P -m finetune.app' >/dev/null || fail "the page is still running"

say "a tiny training to its end"
inside tini -- entrypoint.sh run tiny-cpu max_steps=3 dataset.max_rows=32 eval_steps=0 output_dir=runs/short | tail -n 5
inside test -f runs/short/adapter/adapter_model.safetensors || fail "no adapter"
say "passed"
