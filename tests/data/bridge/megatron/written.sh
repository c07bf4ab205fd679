export STAGES=2 BATCH=4
cat <<EOF > inner.sh
#!/bin/bash
NODES=\$SLURM_NNODES
torchrun --nproc_per_node 4 --nnodes \$NODES pretrain_gpt.py --pipeline-model-parallel-size $STAGES \\
  --num-layers 8 --micro-batch-size $BATCH --seq-length 64 --lr 1e-3 --lr-decay-style constant
EOF
sbatch --nodes 2 inner.sh
