# Lists of flags in strings, as scripts of 2021 have them.
CARDS=4
#RUN="--nproc_per_node 8 --nnodes 2"
RUN="--nproc_per_node $CARDS"
SIZE="--num-layers 4
--hidden-size 64
--micro-batch-size 1
--global-batch-size 8
--lr .0005
--train-iters 100 --lr-decay-iters 80
--lr-decay-style cosine
--fp16"
LOGS=" \
  --log-interval 10 \
  --seq-length 128 "
LOGS+=" --log-interval 50"
curl --retry 3 --output data.json example.org/data
python tools/preprocess.py --workers 4 --seed 9
python -m torch.distributed.launch $RUN pretrain_gpt.py --use-flash-attn $SIZE $LOGS --save ck
