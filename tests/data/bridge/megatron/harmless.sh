ARGS="--micro-batch-size 1 --seq-length 64 --lr 1e-3 --lr-decay-style constant"
if [ -n "$WANDB_API_KEY" ]; then ARGS="$ARGS --wandb-project demo"; fi
if nvidia-smi | grep -q H100; then ARGS="$ARGS --log-throughput"; fi
which conda || echo "no conda"
[ -d ck ] && LOAD="--load ck"
torchrun --nproc_per_node 2 pretrain_gpt.py $ARGS $LOAD
