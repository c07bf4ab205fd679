#!/bin/bash
export CUDA_DEVICE_MAX_CONNECTIONS=1
GPUS=8
MODEL="--num-layers 24 --hidden-size 2048 --num-attention-heads 16 --ffn-hidden-size 5632 --swiglu \
  --normalization RMSNorm --disable-bias-linear --position-embedding-type rope --vocab-size 50000 \
  --untie-embeddings-and-output-weights --attention-dropout 0.0 --hidden-dropout 0.0"
BATCH="--micro-batch-size 2 --global-batch-size 64 --seq-length 4096 --max-position-embeddings 4096"
torchrun --nproc_per_node $GPUS pretrain_gpt.py $MODEL $BATCH \
  --tensor-model-parallel-size 2 --sequence-parallel --use-distributed-optimizer \
  --lr 3e-4 --min-lr 3e-5 --lr-decay-style cosine --train-iters 1000 --weight-decay 0.1 --adam-beta2 0.95 \
  --bf16 --overlap-grad-reduce --data-path /data/text_document --split 99,1,0 --save /runs/mlm --log-interval 10
