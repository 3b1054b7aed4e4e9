#!/usr/bin/env bash
# First run on a GPU, with what prepare.sh has packed: bash DIRECTORY/run.sh [OPTION OF GPUCHECK ...].
#
# Installs the wheels if moe_rt is missing, then runs gpucheck within BUDGET seconds, the benchmark within BENCH_S, and
# the tests of GPU ranks within TESTS_S (tests/support/real_gpu.py; tests.log has each result as soon as it is known).
# $OUT has the report after every step; it is whole even if the machine is taken away. Names of failed steps come last.
#
#   PYTHON (default python3), OUT (default ./first_gpu), BUDGET (default 480), BENCH_S (default 60; 0 leaves it out),
#   TESTS_S (default 180; 0 leaves them out)
set -uo pipefail
here=$(cd "$(dirname "$0")" && pwd)
python=${PYTHON:-python3}
out=$(mkdir -p "${OUT:-first_gpu}" && cd "${OUT:-first_gpu}" && pwd)
begin=$(date +%s)

"$python" -c 'import moe_rt' 2> "$out/import.log" ||
  "$python" -m pip install --quiet --no-index --no-deps --no-compile "$here"/*.whl
if [ -f "$here/kernels.tar.xz" ]; then
  export MOE_RT_CACHE=$out/kernels
  tar -C "$out" --no-same-owner -xJf "$here/kernels.tar.xz" && chmod -R go-w "$out/kernels" && chmod 700 "$out/kernels"
fi
{
  cat "$here/COMMIT" 2> /dev/null
  nvidia-smi 2> /dev/null
  "$python" -m moe_rt info
} > "$out/machine.txt" 2>&1

spent=$(($(date +%s) - begin))
"$python" -m moe_rt gpucheck --report "$out/report" --budget "$((${BUDGET:-480} - spent))" "$@" > "$out/gpucheck.log" 2>&1
code=$?
if [ "${BENCH_S:-60}" != 0 ]; then
  timeout "${BENCH_S:-60}" "$python" -m moe_rt bench --heap loopback --case deepseek-v3-decode --contestants moe_rt,memcpy \
    > "$out/bench.log" 2>&1 || echo "bench: exit status $?" >> "$out/bench.log"
fi
if [ "${TESTS_S:-180}" != 0 ] && [ -f "$here/tests.tar.xz" ]; then
  mkdir -p "$out/checkout" && tar -C "$out/checkout" --no-same-owner -xJf "$here/tests.tar.xz"
  (cd "$out/checkout" && timeout --kill-after 10 "$((${TESTS_S:-180} + 30))" "$python" -m pytest --gpu -v \
    -p no:cacheprovider --session-timeout "${TESTS_S:-180}" --junitxml "$out/tests.xml" tests/conformance tests/device) \
    > "$out/tests.log" 2>&1 || echo "tests: exit status $?" >> "$out/tests.log"
fi
tail -n 1 "$out/gpucheck.log" | cut -c 1-2000
exit "$code"
