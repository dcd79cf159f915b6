# swiftbatch with Ray: a Ray node and a command in one, for CPU or for CUDA workers (see k8s/README.md).
#   docker build --tag swiftbatch:0.1.0-cpu .
#   docker build --target cuda --tag swiftbatch:0.1.0-cuda .
#   docker build --target cuda12 --tag swiftbatch:0.1.0-cuda12 .
#   docker build --target cuda-flash --build-arg MAX_JOBS=16 --tag swiftbatch:0.1.0-cuda-flash .
# PyPI's torch for Linux is the build for CUDA 13; others are in indexes of their own. They count as newer, so pip takes
# them. Another index of such builds: --build-arg PIP_EXTRA_INDEX_URL=...
# The CPU image comes last, so that it is the one that is built where no target is named.
FROM python:3.11-slim-bookworm AS python
# Everything goes into the system's Python: KubeRay may start commands in a login shell, which forgets other folders.
ENV PIP_NO_CACHE_DIR=1 \
    PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PIP_ROOT_USER_ACTION=ignore \
    RAY_USAGE_STATS_ENABLED=0 \
    HOME=/home/swiftbatch
RUN groupadd --gid 1000 swiftbatch && useradd --uid 1000 --gid 1000 --create-home --home-dir "$HOME" swiftbatch
WORKDIR /build
COPY pyproject.toml constraints.txt ./
RUN python -c "import tomllib; p = tomllib.load(open('pyproject.toml', 'rb'))['project']; print(*p['dependencies'], *(line for extra in ('serve', 'mistral') for line in p['optional-dependencies'][extra]), sep='\n')" \
    > requirements.txt
RUN python -c "import tomllib; print(*tomllib.load(open('pyproject.toml', 'rb'))['project']['optional-dependencies']['gpu'], sep='\n')" \
    > requirements-gpu.txt
ENTRYPOINT ["swiftbatch"]
CMD ["--help"]

FROM python AS wheel
COPY README.md LICENSE setup.py ./
COPY swiftbatch/ swiftbatch/
COPY jobs/ jobs/
COPY metrics/ metrics/
COPY scheduler/ scheduler/
COPY worker/ worker/
RUN pip wheel --no-deps --wheel-dir /wheels .

FROM python AS gpu
# Triton, which comes with torch's CUDA builds, compiles what launches its kernels, once for each pod.
RUN apt-get update && apt-get install --yes --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
# Drivers are put into a container when it starts: into the libraries' folder, which Triton would ask ldconfig for, whose
# cache is as old as the image where files are read-only, or into GKE's own folder, for the loader and for gcc.
ENV NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility \
    TRITON_LIBCUDA_PATH=/usr/lib/x86_64-linux-gnu \
    LD_LIBRARY_PATH=/usr/local/nvidia/lib64 \
    LIBRARY_PATH=/usr/local/nvidia/lib64 \
    TRITON_CACHE_DIR=/opt/swiftbatch/triton
# Kernels that are compiled at build time go here. Pods, whose files are read-only, copy them to /tmp/triton.
RUN install --directory --owner 1000 --group 1000 "$TRITON_CACHE_DIR"

# The dependencies come before the code: a change of the code leaves their gigabytes alone. With ray[default], since jobs
# are submitted to the head's dashboard, and nodes answer probes through their dashboard agents. A torch for something
# else would make an image useless, and only a node would tell.
FROM gpu AS cuda-dependencies
RUN pip install --constraint constraints.txt --requirement requirements.txt "ray[default]" \
    && python -c "import torch; found = torch.version.cuda; assert (found or '').startswith('13.'), f'torch has CUDA {found}, expected 13'"

# For drivers from 525 to 579, which CUDA 13 refuses.
FROM gpu AS cuda12-dependencies
ARG PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cu126
RUN pip install --constraint constraints.txt --requirement requirements.txt "ray[default]" \
    && python -c "import torch; found = torch.version.cuda; assert (found or '').startswith('12.'), f'torch has CUDA {found}, expected 12'"

FROM cuda-dependencies AS cuda
RUN --mount=from=wheel,source=/wheels,target=/wheels pip install --no-deps /wheels/*.whl
WORKDIR /home/swiftbatch
USER 1000:1000
# Kernels that are compiled here spare each pod a minute. A model of the hub is downloaded for it, into the image.
ARG MODEL=embedded
RUN python -m swiftbatch.worker.forward.cuda.compile_ahead --model "$MODEL"

FROM cuda12-dependencies AS cuda12
RUN --mount=from=wheel,source=/wheels,target=/wheels pip install --no-deps /wheels/*.whl
WORKDIR /home/swiftbatch
USER 1000:1000
ARG MODEL=embedded
RUN python -m swiftbatch.worker.forward.cuda.compile_ahead --model "$MODEL"

# nvcc and its headers, of the major version that torch was built with: torch refuses to build with another one.
FROM nvidia/cuda:13.0.2-devel-ubuntu22.04 AS toolkit

# flash-attn has no wheels on PyPI, and takes long to compile: MAX_JOBS compilers at a time, each with some GB of memory.
FROM cuda-dependencies AS flash-attention
ARG MAX_JOBS=4
ENV CUDA_HOME=/usr/local/cuda \
    FLASH_ATTENTION_FORCE_BUILD=TRUE \
    FLASH_ATTN_CUDA_ARCHS="80;90"
RUN apt-get update && apt-get install --yes --no-install-recommends g++ && rm -rf /var/lib/apt/lists/* \
    && pip install ninja setuptools wheel
RUN --mount=from=toolkit,source=/usr/local/cuda-13.0,target=/usr/local/cuda \
    pip wheel --no-build-isolation --no-deps --wheel-dir /wheels --requirement requirements-gpu.txt

FROM cuda AS cuda-flash
USER 0:0
RUN --mount=from=flash-attention,source=/wheels,target=/wheels pip install --no-deps /wheels/*.whl
USER 1000:1000

FROM python AS cpu
ARG PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu
RUN pip install --constraint constraints.txt --requirement requirements.txt "ray[default]" \
    && python -c "import torch; found = torch.version.cuda; assert found is None, f'torch has CUDA {found}, expected the build for CPUs'"
RUN --mount=from=wheel,source=/wheels,target=/wheels pip install --no-deps /wheels/*.whl
WORKDIR /home/swiftbatch
USER 1000:1000
