HOSTS=(node1 node2 node3)
RANK=0
for host in "${HOSTS[@]}"; do
  ssh "$host" "cd /work && torchrun --nnodes ${#HOSTS[@]} --nproc_per_node 4 --node_rank $RANK pretrain_gpt.py \
    --micro-batch-size 1 --seq-length 64 --lr 1e-3 --lr-decay-style constant" &
  RANK=$((RANK + 1))
done
wait
