# finetune in a container: by default the page, which listens on 0.0.0.0 inside and always needs its token; or any command, as arguments.
#
#   docker build -t finetune .                                  with CUDA, for a machine with an NVIDIA card
#   docker build -t finetune:cpu --build-arg TORCH=cpu .        for a machine without one
#   docker run --gpus all --init --stop-timeout 300 -p 127.0.0.1:7860:7860 -v finetune-cache:/cache -v "$PWD":/work finetune
#
# BASE: a Debian image with Python 3.11 or later; without Python, Debian's own is installed.
ARG BASE=python:3.12-slim-bookworm

# hadolint ignore=DL3006
FROM ${BASE} AS python
SHELL ["/bin/sh", "-euc"]
# gcc and Python's headers: Triton compiles its launchers when a run starts. tini: forwards signals and reaps processes.
# hadolint ignore=DL3008,SC2086
RUN export DEBIAN_FRONTEND=noninteractive; \
    packages="gcc libc6-dev tini ca-certificates"; \
    command -v python3 >/dev/null || packages="$packages python3 python3-venv python3-dev"; \
    apt-get update -qq; \
    apt-get install -y -qq --no-install-recommends $packages >/dev/null; \
    rm -rf /var/lib/apt/lists/* /var/log/*.log /var/log/apt; \
    python3 -m venv /opt/finetune
ENV PATH=/opt/finetune/bin:$PATH

FROM python AS wheel
WORKDIR /source
COPY pyproject.toml setup.py package.json package-lock.json .npmrc README.md LICENSE ./
COPY scripts/browser_files.py scripts/
COPY finetune finetune
COPY app app
COPY recipes recipes
RUN pip wheel -q --no-cache-dir --no-deps -w /wheels .

FROM python
# cuda: PyPI's torch wheel, with CUDA. cpu: the same version without CUDA, from TORCH_INDEX; a tenth of the size.
ARG TORCH=cuda
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
COPY constraints.txt /opt/finetune/constraints.txt
COPY --from=wheel /wheels /tmp/wheels
# constraints.txt pins the versions. The compiled bytecode stays, since the image's user could not write it later.
# hadolint ignore=DL3013
RUN if [ "$TORCH" = cpu ]; then \
      version=$(sed -n 's/^torch==//p' /opt/finetune/constraints.txt); \
      pip install -q --no-cache-dir -c /opt/finetune/constraints.txt \
        ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} "torch==$version+cpu"; \
    fi; \
    pip install -q --no-cache-dir -c /opt/finetune/constraints.txt "$(echo /tmp/wheels/*.whl)[ui,sweep,hybrid]"; \
    rm -rf /tmp/wheels /root/.cache /tmp/pip-*; \
    groupadd --gid 1000 finetune; \
    useradd --uid 1000 --gid 1000 --create-home --shell /bin/sh finetune; \
    mkdir -p /work/runs /work/recipes /cache; \
    chown -R 1000:1000 /work /cache
COPY --chmod=755 docker/entrypoint.sh docker/healthcheck.py /opt/finetune/bin/

ENV HF_HOME=/cache/huggingface FINETUNE_CACHE=/cache/finetune TRITON_CACHE_DIR=/cache/triton \
    TORCHINDUCTOR_CACHE_DIR=/cache/inductor HOME=/home/finetune PYTHONUNBUFFERED=1 DO_NOT_TRACK=1 \
    NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER 1000:1000
WORKDIR /work
VOLUME ["/cache", "/work/runs", "/work/recipes"]
EXPOSE 7860
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=30s --timeout=5s --start-period=60s CMD ["python", "/opt/finetune/bin/healthcheck.py"]
ENTRYPOINT ["tini", "--", "entrypoint.sh"]
CMD ["ui", "--host", "0.0.0.0"]
