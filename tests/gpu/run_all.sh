#!/usr/bin/env bash
# All GPU tests, the engine cases side by side (each group starts its own oracles): tests/gpu/run_all.sh OUT_DIR
# The device needs this package, stock vLLM for CUDA and pytest; ranks share devices where there are too few.
set -uo pipefail
out=${1:?where the logs go}
here=$(cd "$(dirname "$0")" && pwd)
export PYTHONUNBUFFERED=1 DCP_TEST_ENGINE_LIMIT_S=${DCP_TEST_ENGINE_LIMIT_S:-240}
groups=(${GROUPS_TO_RUN:-kernels graphs-ag_rs-cached-lfm2 a2a-I16 eager-fa2 fp8 qwen3})
pids=()
for group in "${groups[@]}"; do
  case $group in
    kernels) select=(-k "not parity") ;;
    a2a-I16) select=(-k "parity and a2a and I16") ;;
    graphs-ag_rs-cached-lfm2) select=(-k "parity and lfm2-graphs-ag_rs-cached") ;;
    *) select=(-k "parity and $group") ;;
  esac
  timeout "${LIMIT_S:-540}" python3 -m pytest "$here" -m gpu "${select[@]}" -s -x --tb=short -W default \
    -o timeout=500 -p no:cacheprovider --basetemp="/tmp/dcp-gpu-$group" >"$out/$group.log" 2>&1 &
  pids+=($!)
done
status=0
for i in "${!pids[@]}"; do
  wait "${pids[$i]}" || status=1
  printf '%-28s %s\n' "${groups[$i]}" "$(tail -n 1 "$out/${groups[$i]}.log")"
done
exit $status
