#!/bin/bash
# HOSTS="node1 node2" PROCESSES=8 ./ssh.sh --work-dir /shared/runs/digits
#
# `flextrain run` on every machine; the first one keeps the rendezvous. All machines see this folder and Python at the same paths.
read -ra hosts <<<"${HOSTS:?names of the machines, separated by spaces}"
folder=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
arguments=$(printf ' %q' "$@")
agents=()
for host in "${hosts[@]}"; do
    # -tt: a terminal on the other side, whose end tells the processes there that this one is gone
    ${SSH:-ssh -tt} "$host" "cd $folder && exec ${PYTHON:-python} -m flextrain run \
        --nnodes=${LEAST_NODES:-1}:${#hosts[@]} --nproc-per-node=${PROCESSES:-8} --max-restarts=3 \
        --rdzv-endpoint=${hosts[0]}:${PORT:-29400} --rdzv-id=${JOB:-$$} \
        ${TRAIN:-train.py}$arguments" </dev/null &
    agents+=($!)
done
trap 'kill -TERM "${agents[@]}" 2>/dev/null' INT TERM
status=0
for agent in "${agents[@]}"; do
    wait "$agent" || status=$?
done
exit $status
