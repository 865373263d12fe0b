# Trainer: DeepSpeed engines for policy and critic. TORCH chooses the build of torch: the default is PyPI's (CUDA);
# TORCH=torch==2.13.0+cpu with TORCH_INDEX set to PyTorch's CPU wheel index makes a CPU image.
#   docker build -f deploy/docker/trainer.Dockerfile -t sao/trainer .
FROM python:3.11-slim
WORKDIR /app
COPY requirements/trainer.lock requirements/trainer.lock
ARG TORCH=torch==2.13.0
ARG TORCH_INDEX=
RUN pip install --no-cache-dir ${TORCH_INDEX:+--index-url ${TORCH_INDEX}} ${TORCH}
ENV DS_BUILD_OPS=0
RUN grep -v "^torch==" requirements/trainer.lock > /tmp/trainer.lock && pip install --no-cache-dir -r /tmp/trainer.lock
COPY pyproject.toml README.md LICENSE ./
COPY sao sao
COPY services services
RUN pip install --no-cache-dir --no-deps . && useradd --uid 10001 --create-home sao
USER 10001
ENV PYTHONUNBUFFERED=1 OMP_NUM_THREADS=1
CMD ["python", "-m", "services.trainer", "--config", "/etc/sao/run.toml"]
