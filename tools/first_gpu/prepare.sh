#!/usr/bin/env bash
# Pack what a first run on a GPU takes along: bash tools/first_gpu/prepare.sh DIRECTORY. Needs no GPU.
#
# For a machine without a network that is at hand for minutes. DIRECTORY then has a wheel of this commit, packages which
# torch's CUDA builds do not bring, the tests, and compiled kernels. Its Python there runs run.sh.
#
#   PYTHON    of the same version as on that machine (default python3)
#   COMPILER  a Python whose NVRTC is that machine's (default .venv/bin/python); other versions find no kernel
#   ARCH      of its GPU (default sm_90a)
#   TESTS     file or directory of tests whose kernels are compiled, too
#             (default tests/conformance/test_conformance.py; "" for none)
set -euo pipefail
cd "$(dirname "$0")/../.."
into=$(mkdir -p "$1" && cd "$1" && pwd)
cp tools/first_gpu/run.sh "$into"
git rev-parse HEAD > "$into/COMMIT"

# Kernels are found under the versions of the compiler and the headers, so the headers come along as they are here.
compiler=$(realpath --no-symlinks "${COMPILER:-.venv/bin/python}")
headers=nvidia-cuda-cccl
headers+="==$("$compiler" -c "from importlib.metadata import version; print(version('$headers'))")"

"${PYTHON:-python3}" -m venv "$into/venv"
mkdir "$into/source"
git archive HEAD | tar -x -C "$into/source"
"$into/venv/bin/pip" wheel --quiet --no-deps --wheel-dir "$into" "$into/source"
"$into/venv/bin/pip" download --quiet --no-deps --only-binary=:all: --dest "$into" "$headers"
"$into/venv/bin/pip" download --quiet --no-deps --only-binary=:all: --dest "$into" --constraint constraints.txt \
  nvshmem4py-cu13
"$into/venv/bin/pip" download --quiet --only-binary=:all: --dest "$into" --constraint constraints.txt \
  pytest pytest-timeout hypothesis
git archive HEAD pyproject.toml tests | xz > "$into/tests.tar.xz"
rm -rf "$into/venv" "$into/source"

(cd / && "$compiler" -m moe_rt compile --into "$into/kernels" --arch "${ARCH:-sm_90a}")
tests=${TESTS-tests/conformance/test_conformance.py}
if [ -n "$tests" ]; then
  MOE_RT_CACHE=$into/kernels "$compiler" -m pytest -q -p no:cacheprovider --gpu-rehearsal "${ARCH:-sm_90a}" "$tests"
fi
tar -C "$into" -cJf "$into/kernels.tar.xz" kernels # a tenth as large
rm -rf "$into/kernels"
du -sh "$into"
