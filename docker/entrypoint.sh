#!/bin/sh
# Runs `finetune "$@"`. On the container's stop signal, active runs stop after their current step with a sealed checkpoint, and then
# the container ends. Give it time: docker stop --time 300, or stop_grace_period in compose.yaml.
set -u

child= asked=
stop() {
  asked=yes
  finetune pause --all >&2
  [ -z "$child" ] || kill -TERM "$child" 2>/dev/null
}
trap stop TERM INT # set before the child starts, or a signal in between would end only this shell

exec 3<&0 # a background process gets no standard input from the shell; this passes ours on
finetune "$@" <&3 &
child=$!
[ -z "$asked" ] || kill -TERM "$child" 2>/dev/null

# `wait` returns at each signal; wait until the child has ended.
while :; do
  wait "$child"
  code=$?
  kill -0 "$child" 2>/dev/null || break
done
exit "$code"
