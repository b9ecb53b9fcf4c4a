#!/usr/bin/env bash
# All that a Hopper GPU has to say, in one go: the kernels' tests, then their times, then whole layers.
#
#   benchmarks/on_hopper.sh [FOLDER] [MINUTES]     writes FOLDER/*.json and FOLDER/*.txt (default: benchmarks/results, 9)
#
# Needs torch with CUDA and Triton 3.6; sgl-flash-mla 1.0.0, where it is installed, is timed beside the kernels. A part
# that fails or runs out of its time does not keep the others from running; the exit code says whether all were right.
# Beside the tests, every benchmark case is run once: compilers take turns on the processors, and what is timed
# afterwards, alone on the GPU, is compiled already.
set -u
cd "$(dirname "${BASH_SOURCE[0]}")/.."
folder=${1:-benchmarks/results}
share=$((${2:-9} * 60 / 9))
mkdir -p "$folder"
export PYTHONPATH=src${PYTHONPATH:+:$PYTHONPATH} OPENV41_JAXTYPING=0
failed=0

part() { # part NAME SECONDS COMMAND...: its output in FOLDER/NAME
    local name=$1 seconds=$2
    shift 2
    timeout --kill-after=10 "$seconds" "$@" >"$folder/$name" 2>"$folder/$name.log" || { failed=1; echo "$name: failed ($?)"; }
    tail -n 15 "$folder/$name" "$folder/$name.log"
}

warm() { # warm NAME COMMAND...: for what it compiles; its findings come again
    local name=$1
    shift
    timeout --kill-after=10 $((3 * share)) "$@" >"$folder/warm-$name.log" 2>&1 &
}

for cases in Triton Gluon "index scores" "score and" "score, pick" pick store wq_ wo_; do
    warm "${cases// /-}" python3 -m openv41 bench kernels --only "$cases" --repeats 1
done
part hopper-tests.txt $((3 * share)) python3 -m pytest -q -p no:cacheprovider -n 8 tests/ops/hopper tests/bench/test_bench_layers.py
wait
part hopper-kernels.json $((3 * share)) python3 -m openv41 bench kernels --json
part hopper-layers.json $((3 * share)) python3 -m openv41 bench attention --ops hopper --json
rm -f "$folder"/warm-*.log
exit $failed
