source /etc/cluster/env.sh
torchrun --nproc_per_node 2 pretrain_gpt.py --micro-batch-size ${BATCH:-2} --seq-length 64 --lr 1e-3 \
  --lr-decay-style constant
