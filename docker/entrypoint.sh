#!/bin/sh
# `finetune "$@"`, with the container's stop signal: the runs at work stop after their step, with a sealed checkpoint, and only
# then the container ends. Give it time for that: docker stop --time 300, or stop_grace_period in compose.yaml.
set -u

child= asked=
stop() {
  asked=yes
  finetune stop --all >&2
  [ -z "$child" ] || kill -TERM "$child" 2>/dev/null
}
trap stop TERM INT # before there is something to stop, or a signal in between would end this shell alone

exec 3<&0 # a shell gives what it starts in the background no input; this keeps ours
finetune "$@" <&3 &
child=$!
[ -z "$asked" ] || kill -TERM "$child" 2>/dev/null

# `wait` ends at each signal; go on until the child itself has ended.
while :; do
  wait "$child"
  code=$?
  kill -0 "$child" 2>/dev/null || break
done
exit "$code"
