#!/bin/bash
# A training run over MPI under Slurm: 2 stages x 4 replicas, requeued until its steps are done.
#
#   sbatch examples/slurm-job.sh
#
# Change ntasks to stages x replicas of the plan, and the paths. Every path must be one that all nodes see.

#SBATCH --job-name=ratrain
#SBATCH --ntasks=8
#SBATCH --cpus-per-task=1
#SBATCH --time=04:00:00
#SBATCH --signal=TERM@180       # three minutes before the end: ranks end their step, save, and leave with exit code 75
#SBATCH --requeue
#SBATCH --open-mode=append

set -u
export OPENBLAS_NUM_THREADS=1   # one thread a rank; ranks of one job must agree on this and on OPENBLAS_CORETYPE
program=$SLURM_SUBMIT_DIR/model.rtx
run=$SLURM_SUBMIT_DIR/run1

total=500                       # steps of the training; --steps counts those of one job
done=$(ls "$run" 2>/dev/null | sed -n 's/^step-0*//p' | sort -n | tail -1)
resume=()
[ -n "$done" ] && resume=(--resume "$run")

# --kill-on-bad-exit: when a rank is lost, the others are ended at once.
# --mpi=pmix with Open MPI, --mpi=pmi2 with MPICH; 'srun --mpi=list' says what there is.
srun --kill-on-bad-exit=1 --mpi=pmi2 \
  ratrainc run "$program" --engine mpi --rank-order pp-first --data "$SLURM_SUBMIT_DIR/tokens.bin" \
  --steps $((total - ${done:-0})) --save "$run" --save-every 50 "${resume[@]}" --log "$run.jsonl"
code=$?

# What each rank was doing, where any was lost.
[ "$code" -eq 0 ] || [ "$code" -eq 75 ] || ratrainc postmortem "$run"
# 75: saved on SIGTERM. Run again.
[ "$code" -eq 75 ] && scontrol requeue "$SLURM_JOB_ID"
exit "$code"
