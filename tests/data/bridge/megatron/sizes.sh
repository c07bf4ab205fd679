if [ $# -lt 1 ]; then
  echo "usage: $0 SIZE"
  exit 1
fi
case "$1" in
  small) layers=4;  stages=1 ;;
  large|huge) layers=32; stages=4 ;;
  *) echo "no such size"; exit 2 ;;
esac
torchrun --nproc_per_node 8 pretrain_gpt.py --num-layers $layers --pipeline-model-parallel-size $stages \
  --micro-batch-size 1 --seq-length 64 --lr 1e-3 --lr-decay-style constant
