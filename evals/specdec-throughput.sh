#!/usr/bin/env bash
# The standard workload of `posttrainllm bench`, with its picture and its JSON line kept:
#
#     evals/specdec-throughput.sh [--short] [--out FOLDER] [ARGUMENT OF posttrainllm bench]...
#
# FOLDER (default: throughput) gets table.txt, result.json and throughput.png. --short is for CI: three prompts, K=4, no
# picture; it fails when an output is not the reference's, when the draft is accepted too rarely, or when the JSON line
# lacks something, and never for being slow. PYTHON names the interpreter.
set -euo pipefail
PYTHON=${PYTHON:-python3}
short=false
if [[ ${1:-} == --short ]]; then
  short=true
  shift
fi
folder=throughput
if [[ ${1:-} == --out ]]; then
  folder=${2:?--out: expected a folder}
  shift 2
fi
mkdir -p "$folder"
if $short; then
  options=(--repeats 3 --draft-k 4)
  min_accept_rate=0.4 # these three prompts of the embedded pair are far above it
else
  options=(--plot "$folder/throughput.png")
  min_accept_rate=0
fi
"$PYTHON" -m posttrainllm bench "${options[@]}" "$@" | tee "$folder/table.txt"
tail -n 1 "$folder/table.txt" >"$folder/result.json"
"$PYTHON" -m posttrainllm.evals.bench.check "$folder/result.json" --accept-rate "$min_accept_rate"
