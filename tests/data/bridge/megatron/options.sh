tp=1; batch=2
while getopts "t:b:h" name; do
  case $name in
    t) tp=$OPTARG ;;
    b) batch=$OPTARG ;;
    *) echo "usage: $0 [-t TP]"; exit 1 ;;
  esac
done
torchrun --nproc_per_node 8 pretrain_gpt.py --tensor-model-parallel-size $tp --sequence-parallel \
  --micro-batch-size $batch --seq-length 64 --lr 1e-3 --lr-decay-style constant
