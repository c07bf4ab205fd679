train() {
  local size=$1; shift
  local -a flags=(--micro-batch-size "$size" "$@")
  CMD="torchrun --nproc-per-node=2 pretrain_gpt.py ${flags[@]} $COMMON"
  echo "running: $CMD --micro-batch-size 64"
  eval "$CMD"
}
COMMON='--seq-length 64 --lr 1e-3'
common_of() { echo "--lr-decay-style $1"; }
COMMON="$COMMON $(common_of constant)"
train 3 --seed 5 --clip-grad=0
