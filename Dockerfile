# megadapo for CUDA machines: vLLM's CUDA build, transformer-engine, NVIDIA's apex and modelopt.
#   docker build -t megadapo .
#   docker run --gpus all --ipc host --ulimit memlock=-1 -v /data:/data -it megadapo
# Nothing is exposed: Ray and the engines listen on loopback or on the cluster's private network.
FROM nvidia/cuda:13.0.1-cudnn-devel-ubuntu24.04

ENV DEBIAN_FRONTEND=noninteractive \
    PIP_NO_CACHE_DIR=1 \
    RAY_AUTH_MODE=token \
    RAY_worker_niceness=0 \
    RAY_USAGE_STATS_ENABLED=0 \
    NVTE_FRAMEWORK=pytorch

RUN apt-get update \
    && apt-get install -y --no-install-recommends \
        build-essential cmake git ninja-build procps python3.12 python3.12-dev python3.12-venv \
        wget \
    && rm -rf /var/lib/apt/lists/*

RUN python3.12 -m venv /opt/venv
ENV PATH=/opt/venv/bin:$PATH

WORKDIR /opt/megadapo
COPY requirements/gpu.in requirements/gpu.in
RUN pip install "setuptools>=80" wheel ninja pybind11 && pip install -r requirements/gpu.in

# Both are compiled against the torch that vLLM pinned above; A100, H100/H200 and B200.
ARG MAX_JOBS=16
ENV TORCH_CUDA_ARCH_LIST="8.0;9.0;10.0" NVTE_CUDA_ARCHS="80;90;100"
RUN pip install --no-build-isolation "transformer-engine[core_cu13,pytorch]==2.20.2"
# On the package index "apex" is another project: NVIDIA's is built from its repository.
RUN git clone --depth 1 --branch 25.09 https://github.com/NVIDIA/apex /tmp/apex \
    && APEX_CPP_EXT=1 APEX_CUDA_EXT=1 pip install --no-build-isolation /tmp/apex \
    && rm -rf /tmp/apex

COPY . .
RUN pip install --no-deps --no-build-isolation -e . && megadapo --version

CMD ["megadapo", "doctor"]
