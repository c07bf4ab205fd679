FLAGS=(--micro-batch-size 1 --seq-length 64 --lr 1e-3)
FLAGS+=("--lr-decay-style" "constant")
mpirun -np 16 --hostfile hosts -x NCCL_DEBUG=INFO --bind-to none \
  numactl --membind=0 python3 -u /opt/megatron/pretrain_gpt.py "${FLAGS[@]}" "$@" 2>&1 | tee log.txt
