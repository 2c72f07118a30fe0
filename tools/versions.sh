#!/usr/bin/env bash
# Run the tests that a dependency matters for with another version of it, in an environment of its own (uv must be
# on the PATH; a torch from the public index is several GB):
#   tools/versions.sh torch 2.12.0 | transformers 5.20.2 | triton 3.8.0 | python 3.13     [pytest options]
set -euo pipefail
cd "$(dirname "$0")/.."
what=$1 version=$2
shift 2
pin() { sed -n "s/^\($1==.*\)/\1/p" constraints.txt; }
folder=${VERSIONS_FOLDER:-${TMPDIR:-/tmp}/grape-versions}/$what-$version

core=(tests/test_{rotation,rank2,mixture,unipotent,spectrum,laws,recoveries,bias,paper_notes,reference}.py)
core+=(tests/test_attention*.py tests/test_cache*.py)
torch=$(pin torch) python=${PYTHON:-python3} extra=() tests=("${core[@]}")
case $what in
  torch) torch=torch==$version ;;
  python) python=$version ;;
  transformers)
    extra=(transformers=="$version" accelerate peft "$(pin pydantic)" datasets)
    tests=(tests/test_{hf,adapt,export}*.py tests/test_model_examples.py) ;;
  triton) tests=(tests/test_triton*.py) ;;
  *) echo "unknown: $what" && exit 2 ;;
esac

if [ ! -x "$folder/bin/python" ]; then
  uv venv -q --python "$python" "$folder"
  uv pip install -q --python "$folder" "$torch" "$(pin pytest)" "$(pin hypothesis)" "$(pin numpy)" "$(pin PyYAML)" "${extra[@]}"
  [ "$what" != triton ] || uv pip install -q --python "$folder" --no-deps triton=="$version"
fi
PYTHONPATH=src nice "$folder/bin/python" -m pytest -q -p no:cacheprovider -m "not slow" "$@" "${tests[@]}"
