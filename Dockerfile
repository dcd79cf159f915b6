# swiftbatch with Ray: a Ray node and a command in one, for CPU or for CUDA workers (see k8s/README.md).
#   docker build --build-arg PIP_EXTRA_INDEX_URL=... --tag swiftbatch:0.1.0-cpu .
#   docker build --target cuda --tag swiftbatch:0.1.0-cuda .
#   docker build --target cuda-flash --build-arg MAX_JOBS=16 --tag swiftbatch:0.1.0-cuda-flash .
# PyPI's torch for Linux is the CUDA build; the much smaller one for CPUs is in an index of its own, which pytorch.org names.
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
RUN python -c "import tomllib; p = tomllib.load(open('pyproject.toml', 'rb'))['project']; print(*p['dependencies'], *p['optional-dependencies']['serve'], sep='\n')" \
    > requirements.txt
RUN python -c "import tomllib; print(*tomllib.load(open('pyproject.toml', 'rb'))['project']['optional-dependencies']['gpu'], sep='\n')" \
    > requirements-gpu.txt

FROM python AS wheel
COPY README.md LICENSE setup.py ./
COPY swiftbatch/ swiftbatch/
COPY jobs/ jobs/
COPY metrics/ metrics/
COPY scheduler/ scheduler/
COPY worker/ worker/
RUN pip wheel --no-deps --wheel-dir /wheels .

# The dependencies come before the code: a change of the code leaves their gigabytes alone. With ray[default], since jobs
# are submitted to the head's dashboard, and nodes answer probes through their dashboard agents.
FROM python AS cuda-dependencies
# A torch without CUDA would make this image useless, and only a GPU node would tell.
RUN pip install --constraint constraints.txt --requirement requirements.txt "ray[default]" \
    && python -c "import torch; assert torch.version.cuda, 'found a torch without CUDA, expected the build for GPUs'"
# Triton, which comes with torch's CUDA build, compiles what launches its kernels, once for each pod.
RUN apt-get update && apt-get install --yes --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*

FROM cuda-dependencies AS cuda
ENV NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
RUN --mount=from=wheel,source=/wheels,target=/wheels pip install --no-deps /wheels/*.whl
WORKDIR /home/swiftbatch
USER 1000:1000
ENTRYPOINT ["swiftbatch"]
CMD ["--help"]
# Kernels that are compiled here spare each pod a minute. A model of the hub is downloaded for it, into the image.
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
ARG PIP_EXTRA_INDEX_URL
RUN pip install --constraint constraints.txt --requirement requirements.txt "ray[default]"
RUN --mount=from=wheel,source=/wheels,target=/wheels pip install --no-deps /wheels/*.whl
WORKDIR /home/swiftbatch
USER 1000:1000
ENTRYPOINT ["swiftbatch"]
CMD ["--help"]
