#!/usr/bin/env bash
# From a corpus to the table of docs/research: train a target, train and distil drafts, gate the pair, measure it.
#
#   evals/zoo/record.sh CORPUS OUT
#
# CORPUS is a folder of `posttrainllm zoo corpus`; a tokenizer is trained into it where there is none. OUT gets the models
# and one text file a measurement; what is there already is not made again, so a run that was cut off goes on.
# Environment, with the defaults:
#   TARGET=mega  DRAFTS="tiny tiny-shallow"  TARGET_MINUTES=12  DRAFT_MINUTES=1.5  DISTIL_MINUTES=2
#   TARGET_OPTIONS, DRAFT_OPTIONS, DISTIL_OPTIONS   of `zoo train`
#   TEXTS="--on-policy 0.3 --on-policy-rows 512"   that the target writes for its drafts
#   DTYPES="bfloat16 float32"  REPEATS=16  PROMPTS=100
#   SECOND_GPU=1   a GPU that trains the drafts while the first trains the target; none: one after the other
#   CHECKPOINT_EVERY=5   minutes; 0: none, and a run that is killed starts anew
#   PYTHON=python3
set -euo pipefail
CORPUS=$1 OUT=$2
PYTHON=${PYTHON:-python3} TARGET=${TARGET:-mega} DRAFTS=${DRAFTS:-tiny tiny-shallow}
TARGET_OPTIONS=${TARGET_OPTIONS:---optimizer muon --batch 32 --accumulate 4 --learning-rate 1e-3 --evaluate-every 250}
DRAFT_OPTIONS=${DRAFT_OPTIONS:---optimizer muon --batch 128 --learning-rate 3e-3}
DISTIL_OPTIONS=${DISTIL_OPTIONS:---optimizer muon --batch 64 --learning-rate 1.5e-3 --seed 1}
TEXTS=${TEXTS:---on-policy 0.3 --on-policy-rows 512}
mkdir -p "$OUT"

zoo() { "$PYTHON" -m posttrainllm zoo "$@"; }

# made PRESET FOLDER OPTIONS...: train unless FOLDER holds a whole model
made() {
  local preset=$1 folder=$2
  shift 2
  [ -e "$folder/TRAINING.json" ] && return
  zoo train "$preset" --corpus "$CORPUS" --out "$folder" --resume --checkpoint-every "${CHECKPOINT_EVERY:-5}" "$@" 2>&1 | tee -ia "$folder.txt"
}

# measured NAME COMMAND...: keep what it prints in OUT/NAME.txt; a measurement that fails does not end the others
measured() {
  local name=$1
  shift
  [ -e "$OUT/$name.txt" ] && return
  if "$PYTHON" -m "$@" > "$OUT/$name.part" 2>&1; then
    mv "$OUT/$name.part" "$OUT/$name.txt"
  else
    echo "$name: exit status $?, see $OUT/$name.part"
  fi
}

[ -e "$CORPUS/tokenizer.json" ] || zoo tokenizer --corpus "$CORPUS" --out "$CORPUS/tokenizer.json"

alone() { # the drafts before they know the target
  for draft in $DRAFTS; do
    made "$draft" "$OUT/$draft-alone" --minutes "${DRAFT_MINUTES:-1.5}" $DRAFT_OPTIONS
  done
}

if [ -n "${SECOND_GPU:-}" ]; then
  CUDA_VISIBLE_DEVICES=$SECOND_GPU alone &
  trap 'kill $! 2> /dev/null || true' EXIT
  made "$TARGET" "$OUT/$TARGET" --minutes "${TARGET_MINUTES:-12}" $TARGET_OPTIONS
  wait $!
else
  alone
  made "$TARGET" "$OUT/$TARGET" --minutes "${TARGET_MINUTES:-12}" $TARGET_OPTIONS
fi
for draft in $DRAFTS; do
  made "$draft" "$OUT/$draft" --minutes "${DISTIL_MINUTES:-2}" $DISTIL_OPTIONS $TEXTS \
    --init "$OUT/$draft-alone" --distill-from "$OUT/$TARGET"
done

for draft in $DRAFTS; do
  for dtype in ${DTYPES:-bfloat16 float32}; do
    pair=("$OUT/$TARGET" --draft-model "$OUT/$draft" --dtype "$dtype")
    name=$TARGET-$draft-$dtype
    measured "gate-$name" posttrainllm gate "${pair[@]}" --fresh --prompts "${PROMPTS:-100}"
    measured "bench-$name" posttrainllm bench "${pair[@]}" --draft-k 4 --repeats "${REPEATS:-16}" --sampled
    measured "accept-$name" posttrainllm.evals.accept_rate --model "${pair[@]}"
  done
done
for model in $TARGET $DRAFTS; do
  measured "heldout-$model" posttrainllm zoo evaluate "$OUT/$model" --corpus "$CORPUS" --limit-characters 400000
done
measured "bench-k" posttrainllm bench "$OUT/$TARGET" --draft-model "$OUT/${DRAFTS%% *}" --repeats 3 --no-mlx-lm
for draft in $DRAFTS; do # what the same time gives a draft that does not learn from the target
  made "$draft" "$OUT/$draft-control" --minutes "${DISTIL_MINUTES:-2}" $DISTIL_OPTIONS --init "$OUT/$draft-alone"
  measured "heldout-$draft-control" posttrainllm zoo evaluate "$OUT/$draft-control" --corpus "$CORPUS" --limit-characters 400000
  for dtype in ${DTYPES:-bfloat16 float32}; do
    measured "accept-$TARGET-$draft-control-$dtype" posttrainllm.evals.accept_rate \
      --model "$OUT/$TARGET" --draft-model "$OUT/$draft-control" --dtype "$dtype"
  done
done
tail -n 20 "$OUT"/*-*.txt
