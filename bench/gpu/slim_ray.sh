#!/usr/bin/env bash
# Collects what a GPU machine without a network may lack: a Ray of a third of its size, and other packages as wheels.
# Usage: slim_ray.sh FOLDER [PYTHON]    PYTHON is that machine's version (3.12), not this one's.
# There: tar xJf FOLDER/ray.tar.xz -C SITE
#        pip install --no-index --no-deps --target SITE FOLDER/*.whl
#        export PYTHONPATH=SITE
set -euo pipefail
to=$(mkdir -p "$1" && cd "$1" && pwd)
constraints=$(cd "$(dirname "$0")/../.." && pwd)/constraints.txt
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

python3 -m pip download --quiet --only-binary=:all: --implementation cp --python-version "${2:-3.12}" \
    --platform=manylinux_2_{31,28,17}_x86_64 --platform=manylinux2014_x86_64 \
    --constraint "$constraints" --dest "$work" ray pydantic tenacity llguidance
python3 -m zipfile -e "$work"/ray-*.whl "$work/site"
rm "$work"/ray-*.whl
mv "$work"/*.whl "$to"
cd "$work/site"
rm -rf ray/{jars,cpp,rllib,data,serve,train,tune,air,llm,tests,dashboard/client}
chmod +x ray/core/src/ray/gcs/gcs_server ray/core/src/ray/raylet/raylet  # unzipping forgets it
tar cJf "$to/ray.tar.xz" .
