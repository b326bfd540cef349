# megadapo for CUDA machines: vLLM's CUDA build, transformer-engine, NVIDIA's apex and modelopt.
#   docker build -t megadapo .
#   docker run --gpus all --ipc host --ulimit memlock=-1 -v /data:/data -it megadapo
# Nothing is exposed: Ray and the engines listen on loopback or on the cluster's private network.
# CUDA 13 needs driver 580 or later on the host.
# The base image has no cuDNN: torch brings its own, and a process must not load two.
FROM nvidia/cuda:13.0.1-devel-ubuntu24.04

ENV DEBIAN_FRONTEND=noninteractive \
    PIP_NO_CACHE_DIR=1 \
    RAY_AUTH_MODE=token \
    RAY_worker_niceness=0 \
    RAY_USAGE_STATS_ENABLED=0 \
    NVTE_FRAMEWORK=pytorch

RUN apt-get update \
    && apt-get install -y --no-install-recommends \
        build-essential cmake git ninja-build python3.12 python3.12-dev python3.12-venv \
    && rm -rf /var/lib/apt/lists/*

RUN python3.12 -m venv /opt/venv
ENV PATH=/opt/venv/bin:$PATH VIRTUAL_ENV=/opt/venv

WORKDIR /opt/megadapo
# pip install ".[cuda]" without the source, whose changes do not install it again; and Ray's dashboard
COPY pyproject.toml .
RUN pip install "setuptools>=80" wheel ninja pybind11 uv \
    && uv pip install --no-cache -r pyproject.toml --extra cuda "ray[default]" pytest pytest-timeout

# Both are compiled against the torch that vLLM pinned above, with the cuDNN and NCCL that it brings;
# A100, H100/H200 and B200. requirements/build_files.json has what their build files read.
ARG MAX_JOBS=16
ENV NVIDIA_WHEELS=/opt/venv/lib/python3.12/site-packages/nvidia
ENV TORCH_CUDA_ARCH_LIST="8.0;9.0;10.0" NVTE_CUDA_ARCHS="80;90;100" \
    NVTE_WITH_NCCL_EP=0 \
    NVTE_PYTORCH_FORCE_BUILD=TRUE \
    CUDNN_HOME=$NVIDIA_WHEELS/cudnn \
    CPATH=$NVIDIA_WHEELS/cudnn/include:$NVIDIA_WHEELS/nccl/include
RUN pip install --no-build-isolation "transformer-engine[core_cu13,pytorch]==2.20.2"
# On the package index "apex" is another project: NVIDIA's is built from its repository. Releases up
# to 25.09 name compute_70, which CUDA 13's compiler refuses.
ARG APEX_COMMIT=6424da3b4faa6c8f062da4a48c424fff3f02d42d
RUN git clone https://github.com/NVIDIA/apex /tmp/apex \
    && git -C /tmp/apex checkout $APEX_COMMIT \
    && APEX_CPP_EXT=1 APEX_CUDA_EXT=1 pip install --no-build-isolation /tmp/apex \
    && rm -rf /tmp/apex

COPY . .
RUN pip install --no-deps --no-build-isolation -e . && megadapo --version
# The packages and the model of make real, so that tools/first_gpu.sh runs its recipe without a network.
RUN pip install --no-deps -r requirements/real.lock && python tools/fetch_smollm2.py
# The baselines of benchmarks/head.py, whose speed is tools/first_gpu.sh's goal.
RUN pip install --no-deps -r requirements/bench.txt

CMD ["megadapo", "doctor"]
