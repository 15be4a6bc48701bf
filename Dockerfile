# The stock Triton container with what the emitted Python imports, installed once instead of at each start.
ARG TRITON_RELEASE=26.08
FROM nvcr.io/nvidia/tritonserver:${TRITON_RELEASE}-py3
ARG REQUIREMENTS=requirements.txt
ENV PIP_BREAK_SYSTEM_PACKAGES=1 ORT_DISABLE_TELEMETRY=1 DO_NOT_TRACK=1
COPY builder/runtime/${REQUIREMENTS} /opt/requirements.txt
RUN pip install --no-cache-dir --requirement /opt/requirements.txt \
    && install --directory --owner=1000 --group=1000 /engines
COPY builder/repository/liveness/repository /liveness
# triton-server, of the stock image
USER 1000:1000
