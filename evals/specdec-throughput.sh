#!/usr/bin/env bash
# The standard workload of `posttrainllm bench`, with its picture and its JSON line kept:
#
#     evals/specdec-throughput.sh [--serve] [--short] [--out FOLDER] [ARGUMENT OF posttrainllm bench]...
#
# FOLDER (default: throughput) gets table.txt, result.json and throughput.png. --short is for CI: three prompts, K=4, no
# picture; it fails when an output is not the reference's, when the draft is accepted too rarely, or when the JSON line
# lacks something, and never for being slow. --serve sends the workload to `posttrainllm serve` instead, through HTTP
# (python -m posttrainllm.evals.serve_throughput, whose arguments it takes); FOLDER (default: throughput-serve) then gets
# no picture. PYTHON names the interpreter.
set -euo pipefail
PYTHON=${PYTHON:-python3}
short=false
serve=false
folder=
while true; do
  case ${1:-} in
    -h | --help)
      sed -n '2,/^set/s/^# \{0,1\}//p' "$0" # this comment
      exit 0
      ;;
    --short) short=true ;;
    --serve) serve=true ;;
    --out)
      folder=${2:?--out: expected a folder}
      shift
      ;;
    *) break ;;
  esac
  shift
done
options=()
min_accept_rate=0
if $short; then
  options=(--repeats 3 --draft-k 4)
  min_accept_rate=0.4 # these three prompts of the embedded pair are far above it
fi
if $serve; then
  folder=${folder:-throughput-serve}
  command=(posttrainllm.evals.serve_throughput)
else
  folder=${folder:-throughput}
  command=(posttrainllm bench)
  $short || options=(--plot "$folder/throughput.png")
fi
mkdir -p "$folder"
"$PYTHON" -m "${command[@]}" ${options[@]+"${options[@]}"} "$@" | tee "$folder/table.txt"
tail -n 1 "$folder/table.txt" >"$folder/result.json"
"$PYTHON" -m posttrainllm.evals.bench.check "$folder/result.json" --accept-rate "$min_accept_rate"
