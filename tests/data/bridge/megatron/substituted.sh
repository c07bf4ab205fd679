export BATCH=4
export LENGTH=64
cat <<'EOF' | envsubst > inner.sh
srun python -u pretrain_gpt.py --micro-batch-size ${BATCH} --seq-length $LENGTH --lr 1e-3 --lr-decay-style constant
EOF
bash inner.sh
