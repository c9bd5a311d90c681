#!/bin/bash
# HOSTFILE=hosts PROCESSES=16 ./mpi.sh --work-dir /shared/runs/digits
#
# The host file has a line for each machine: node1 slots=8 (MPICH and Intel MPI: node1:8). mpirun ends all processes when one fails
# and starts none again, which is what the loop is for. Each start continues from the newest checkpoint.
for start in 1 2 3 4; do
    ${MPIRUN:-mpirun} -n "${PROCESSES:-16}" ${HOSTFILE:+--hostfile "$HOSTFILE"} \
        "${PYTHON:-python}" "${TRAIN:-train.py}" "$@"
    status=$?
    # 143: the job was asked to stop. 130: Ctrl-C.
    case $status in 0 | 130 | 143) exit $status ;; esac
    echo "mpi.sh: start $start ended with status $status" >&2
done
exit $status
