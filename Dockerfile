# scalerun for clusters of A100s. docs/cluster.md says how to build, start and check it.
#
# flash-attn and apex are compiled against torch, so CUDA has to be the version of torch's wheel:
# the wheel of torch 2.13 on the Python package index has 13.0. Ubuntu's packages and the build tools
# are not pinned, as older ones disappear from their servers:
# hadolint global ignore=DL3008,DL3013
ARG CUDA=13.0.2
ARG UBUNTU=24.04

FROM nvidia/cuda:${CUDA}-devel-ubuntu${UBUNTU} AS build
SHELL ["/bin/bash", "-o", "pipefail", "-c"]

RUN apt-get update \
 && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends \
      build-essential ca-certificates git python3 python3-dev python3-venv \
 && rm -rf /var/lib/apt/lists/*

RUN python3 -m venv /opt/venv
ENV PATH=/opt/venv/bin:${PATH}

# A requirement, or a wheel's address or file; and where pip looks for it.
ARG TORCH=torch==2.13.0
ARG TORCH_INDEX=https://pypi.org/simple
RUN pip install --no-cache-dir --index-url "${TORCH_INDEX}" --extra-index-url https://pypi.org/simple "${TORCH}"

# 8.0 is the A100; several are separated by semicolons: "8.0;9.0".
ARG TORCH_CUDA_ARCH_LIST=8.0
# Compilers at once. Each takes several GB of memory.
ARG MAX_JOBS=4

# A version, or 0 to leave it out. A wheel of somebody else's torch is never taken.
ARG FLASH_ATTN=2.8.3.post2
RUN if [ "${FLASH_ATTN}" != 0 ]; then \
      pip install --no-cache-dir ninja packaging psutil setuptools wheel \
   && FLASH_ATTENTION_FORCE_BUILD=TRUE FLASH_ATTN_CUDA_ARCHS="$(echo "${TORCH_CUDA_ARCH_LIST}" | tr -d .)" \
      pip install --no-cache-dir --no-build-isolation "flash-attn==${FLASH_ATTN}"; \
    fi

# 1 compiles NVIDIA's apex, for --adam-implementation apex. Without amp_C it would have no kernels.
ARG APEX=0
ARG APEX_TAG=26.09
RUN if [ "${APEX}" = 1 ]; then \
      pip install --no-cache-dir ninja packaging setuptools wheel \
   && git clone --depth 1 --branch "${APEX_TAG}" https://github.com/NVIDIA/apex /tmp/apex \
   && APEX_CPP_EXT=1 APEX_CUDA_EXT=1 pip install --no-cache-dir --no-build-isolation /tmp/apex \
   && python -c "from importlib.util import find_spec; assert find_spec('amp_C')" \
   && rm -rf /tmp/apex; \
    fi

# Last, so that a change of scalerun compiles nothing again.
ARG EXTRAS=serve,tensorboard,wandb,translation
COPY pyproject.toml setup.py README.md LICENSE /src/
COPY scalerun /src/scalerun
RUN pip install --no-cache-dir "/src[${EXTRAS}]" && pip check


FROM nvidia/cuda:${CUDA}-base-ubuntu${UBUNTU}
SHELL ["/bin/bash", "-o", "pipefail", "-c"]

# The libraries of ibverbs are what NCCL needs to use InfiniBand. 1 adds what --compile needs: a C
# compiler, with which Triton builds its launchers.
ARG COMPILER=0
RUN apt-get update \
 && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends \
      ca-certificates ibverbs-providers libibverbs1 python3 tini \
 && if [ "${COMPILER}" = 1 ]; then \
      DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends g++ python3-dev; \
    fi \
 && rm -rf /var/lib/apt/lists/*

# Open to every user, since those who mount folders start it with --user and a number of their own.
RUN groupadd --gid 10001 scalerun \
 && useradd --uid 10001 --gid 10001 --create-home --shell /bin/bash scalerun \
 && mkdir /workspace && chmod 1777 /workspace /home/scalerun
COPY --from=build /opt/venv /opt/venv

ARG REVISION=unknown
LABEL org.opencontainers.image.title="scalerun" \
      org.opencontainers.image.description="A trainer for large transformers" \
      org.opencontainers.image.licenses="MIT" \
      org.opencontainers.image.revision="${REVISION}"

ENV PATH=/opt/venv/bin:${PATH} \
    HOME=/home/scalerun \
    PYTHONUNBUFFERED=1
USER 10001:10001
WORKDIR /workspace
# tini hands signals on to the command, which saves before it ends.
ENTRYPOINT ["tini", "--", "python", "-m", "scalerun.cli"]
CMD ["--help"]
