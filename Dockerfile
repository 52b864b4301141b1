# `ultrascale train` on GPUs:
#   docker build -t ultrascale .
#   docker run --rm --gpus all --ipc host -v "$PWD:/work" ultrascale train plan.yaml
# The job files of `ultrascale export` start this image by the name ultrascale:latest.
FROM pytorch/pytorch:2.11.0-cuda12.8-cudnn9-runtime

# Triton compiles its launchers with a C compiler, which the base image does not have.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*

COPY pyproject.toml README.md LICENSE /src/
COPY src /src/src
COPY benchmarks/kernel_contest /src/benchmarks/kernel_contest
# The torch of the base image satisfies the extra `train`, so it stays.
RUN pip install --no-cache-dir --break-system-packages "/src[train,data]" && rm -rf /src

RUN useradd --create-home --uid 1001 ultrascale
USER ultrascale
WORKDIR /work
ENTRYPOINT ["ultrascale"]
CMD ["--help"]
