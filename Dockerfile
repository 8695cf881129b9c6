# Image of Bestiary. The build ends with `bestiary doctor`, so it fails if an environment does not work.
#
#   docker build -t bestiary .                                                                        CPU
#   docker build -t bestiary:cuda --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cu130 .    CUDA
#   docker run --rm -v "$PWD/runs:/data/runs" bestiary train --preset hello --name hello
ARG PYTHON=3.11
FROM python:${PYTHON}-slim
# Index with the wheels of PyTorch: .../whl/cpu for CPUs, .../whl/cu130 for NVIDIA GPUs with CUDA 13.
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
# Optional dependencies, for example "[all]".
ARG EXTRAS=""

# The Qt libraries with which EnvPool draws ProcGen games need these two system libraries.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends libgl1 libglib2.0-0 \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /opt/bestiary
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY bestiary ./bestiary
RUN pip install --no-cache-dir --constraint constraints.txt --extra-index-url "${TORCH_INDEX}" ".${EXTRAS}"

# Runs are written to /data/runs by a user without root rights.
RUN useradd --create-home user && mkdir -p /data/runs && chown -R user /data
USER user
WORKDIR /data
RUN bestiary doctor
ENTRYPOINT ["bestiary"]
CMD ["doctor"]
