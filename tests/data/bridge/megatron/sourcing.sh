HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
source "$HERE/common.sh"
torchrun --nproc_per_node 2 pretrain_gpt.py --micro-batch-size $BATCH --seq-length 64 $SCHEDULE
