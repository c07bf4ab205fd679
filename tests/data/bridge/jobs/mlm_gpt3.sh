#!/bin/bash
# a GPT of 2020: learned positions, biases, selective recomputation, in a pipeline
LAYERS=8
torchrun --nproc_per_node=4 --nnodes=2 pretrain_gpt.py \
  --num-layers $LAYERS --hidden-size 1024 --num-attention-heads 16 --seq-length 2048 --max-position-embeddings 2048 \
  --vocab-file gpt2-vocab.json --merge-file gpt2-merges.txt --tokenizer-type GPT2BPETokenizer \
  --micro-batch-size 1 --global-batch-size 16 --pipeline-model-parallel-size 4 \
  --num-layers-per-virtual-pipeline-stage 1 --lr 1e-4 --train-iters 100 --fp16 --loss-scale 1024 \
  --attention-backend unfused --recompute-activations --use-precision-aware-optimizer --exp-avg-dtype bf16 \
  --exp-avg-sq-dtype bf16 --optimizer-cpu-offload --use-distributed-optimizer
