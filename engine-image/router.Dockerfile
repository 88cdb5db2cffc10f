# sluice-router: smg from its wheel, and our launcher, which stands alone: nothing else of the package is needed here.
# Built with the repository's root as context.
# A release gives BASE as tag@digest; the test bed gives a stand-in under this name.
ARG BASE=python:3.11-slim

FROM ${BASE} AS build
WORKDIR /src
RUN python -m venv --without-pip /opt/sluice
# The two secrets let pip work behind a proxy or mirror.
COPY requirements/router.txt requirements/
RUN --mount=type=cache,target=/root/.cache/pip \
    --mount=type=secret,id=ca,target=/etc/ssl/certs/ca-certificates.crt,required=false \
    --mount=type=secret,id=pipconf,target=/etc/pip.conf,required=false \
    PIP_CERT=/etc/ssl/certs/ca-certificates.crt PIP_DISABLE_PIP_VERSION_CHECK=1 \
    pip --python /opt/sluice/bin/python install --require-hashes -r requirements/router.txt
# A name for the user: libraries ask for it.
RUN grep -v ':65532:' /etc/passwd > /src/passwd && echo 'sluice:x:65532:65532::/nonexistent:/usr/sbin/nologin' >> /src/passwd

FROM ${BASE}
ARG VERSION=dev
ARG REVISION=unknown
LABEL org.opencontainers.image.title="sluice-router" \
      org.opencontainers.image.description="Router of Sluice: smg with its launcher" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"
COPY --from=build /src/passwd /etc/passwd
COPY --from=build /opt/sluice /opt/sluice
COPY operator/sluice/router/launcher.py /opt/sluice/launcher.py
# The root file system is read-only: no byte code, no home directory.
ENV PATH=/opt/sluice/bin:/usr/local/bin:/usr/bin:/bin HOME=/nonexistent PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1
USER 65532:65532
ENTRYPOINT ["/opt/sluice/bin/python", "/opt/sluice/launcher.py"]
