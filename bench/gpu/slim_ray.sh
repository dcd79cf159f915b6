#!/usr/bin/env bash
# Collects wheels for a machine without a network: a Ray of a third of its size, and the other packages named.
# Usage: slim_ray.sh FOLDER [PYTHON [PACKAGE...]]   PYTHON is that machine's version (3.12), not this one's.
# There: tar xJf FOLDER/ray.tar.xz -C SITE; pip install --no-index --no-deps --target SITE FOLDER/*.whl
#        export PYTHONPATH=SITE
set -euo pipefail
to=$(mkdir -p "$1" && cd "$1" && pwd)
version=${2:-3.12}
here=$(cd "$(dirname "$0")" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

fetch() {
    python3 -m pip download --quiet --no-deps --only-binary=:all: --implementation cp --python-version "$version" \
        --platform manylinux_2_28_x86_64 --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 \
        --constraint "$here/../../constraints.txt" --dest "$@"
}

fetch "$work" ray
python3 -m zipfile -e "$work"/ray-*.whl "$work/site"
cd "$work/site"
rm -rf ray/{jars,cpp,rllib,data,serve,train,tune,air,llm,tests,dashboard/client}
chmod +x ray/core/src/ray/gcs/gcs_server ray/core/src/ray/raylet/raylet  # unzipping forgets it
tar cJf "$to/ray.tar.xz" .
[ $# -lt 3 ] || fetch "$to" "${@:3}"
