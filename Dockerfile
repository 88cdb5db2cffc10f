# sluice-operator: the operator and the command line. Built with the repository's root as context.
# A release gives BASE as tag@digest; the test bed gives a stand-in under this name.
ARG BASE=python:3.11-slim

FROM ${BASE} AS build
WORKDIR /src
RUN python -m venv --without-pip /opt/sluice
# Dependencies change seldom: they come before the source. The two secrets let pip work behind a proxy or mirror.
COPY requirements/build.txt requirements/operator.txt requirements/
RUN --mount=type=cache,target=/root/.cache/pip \
    --mount=type=secret,id=ca,target=/etc/ssl/certs/ca-certificates.crt,required=false \
    --mount=type=secret,id=pipconf,target=/etc/pip.conf,required=false \
    PIP_CERT=/etc/ssl/certs/ca-certificates.crt PIP_DISABLE_PIP_VERSION_CHECK=1 \
    pip --python /opt/sluice/bin/python install --require-hashes -r requirements/operator.txt \
    && PIP_CERT=/etc/ssl/certs/ca-certificates.crt PIP_DISABLE_PIP_VERSION_CHECK=1 \
    pip install --require-hashes --target /opt/build -r requirements/build.txt
# 60 MB of byte code that never runs: the operator sends plain documents, not the client's generated models.
RUN cd /opt/sluice/lib/python3.11/site-packages/kubernetes \
    && rm -r client/api/__pycache__ client/models/__pycache__ aio/client/api/__pycache__ aio/client/models/__pycache__
COPY LICENSE README.md pyproject.toml ./
COPY operator operator
COPY engine-image/sluice_sim engine-image/sluice_sim
# Into a directory of its own, so that a change of source changes one small layer. Programs of other images leave again.
RUN PYTHONPATH=/opt/build pip --python /opt/sluice/bin/python install --no-index --no-deps --no-build-isolation \
    --prefix /opt/program . \
    && cd /opt/program/bin && rm sluice-agent sluice-router-sidecar sluice-sim
# A name for the user: libraries ask for it.
RUN grep -v ':65532:' /etc/passwd > /src/passwd && echo 'sluice:x:65532:65532::/nonexistent:/usr/sbin/nologin' >> /src/passwd

FROM ${BASE}
ARG VERSION=dev
ARG REVISION=unknown
LABEL org.opencontainers.image.title="sluice-operator" \
      org.opencontainers.image.description="Kubernetes operator for serving large language models without losing a request" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"
COPY --from=build /src/passwd /etc/passwd
COPY --from=build /opt/sluice /opt/sluice
COPY --from=build /opt/program /opt/sluice
# The root file system is read-only: no byte code, no home directory.
ENV PATH=/opt/sluice/bin:/usr/local/bin:/usr/bin:/bin HOME=/nonexistent PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1
USER 65532:65532
ENTRYPOINT ["/opt/sluice/bin/sluice-operator"]
