BATCH=${BATCH:-2}
SCHEDULE="--lr 1e-3 --lr-decay-style constant"
