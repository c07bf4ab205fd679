case "$(hostname)" in
  login*) echo "not here"; exit 1 ;;
  big*) CARDS=16; SAVE=/big ;;
  *) CARDS=8; SAVE=/small ;;
esac
torchrun --nproc_per_node $CARDS pretrain_gpt.py --micro-batch-size 1 --seq-length 64 --lr 1e-3 \
  --lr-decay-style constant --save $SAVE
