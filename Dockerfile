# Two stages: the first installs the exact, hash-checked packages, the second holds nothing that builds.
FROM python:3.12-slim-bookworm AS build
WORKDIR /src
COPY requirements/runtime.txt requirements/build.txt requirements/
RUN python -m venv /opt/venv \
    && /opt/venv/bin/pip install --no-cache-dir --disable-pip-version-check --require-hashes -r requirements/runtime.txt \
    && python -m venv /opt/build \
    && /opt/build/bin/pip install --no-cache-dir --disable-pip-version-check --require-hashes -r requirements/build.txt
COPY pyproject.toml README.md LICENSE ./
COPY proxy proxy
COPY policies policies
RUN /opt/build/bin/python -m hatchling build -t wheel -d /tmp/dist \
    && /opt/venv/bin/pip install --no-cache-dir --disable-pip-version-check --no-deps /tmp/dist/*.whl \
    && /opt/venv/bin/python -c "from compaction_proxy.tokens import CL100K, O200K, load; assert load(O200K, None) and load(CL100K, None)"

FROM python:3.12-slim-bookworm
LABEL org.opencontainers.image.title="compaction-proxy" \
      org.opencontainers.image.description="An OpenAI-compatible reverse proxy that compacts long conversations" \
      org.opencontainers.image.licenses="MIT"
# glibc: large bodies are not mapped and unmapped anew for every copy.
ENV PATH=/opt/venv/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    XDG_STATE_HOME=/var/lib \
    MALLOC_MMAP_THRESHOLD_=33554432 \
    MALLOC_TRIM_THRESHOLD_=268435456 \
    MALLOC_TOP_PAD_=16777216
COPY --from=build /opt/venv /opt/venv
RUN useradd --system --uid 10001 --no-create-home compaction \
    && install -d -o compaction -g compaction -m 0700 /var/lib/compaction-proxy
USER 10001
VOLUME /var/lib/compaction-proxy
EXPOSE 8787
HEALTHCHECK --interval=10s --timeout=3s --start-period=10s \
    CMD ["python", "-c", "import urllib.request as u; u.urlopen('http://127.0.0.1:8787/healthz', timeout=2).close()"]
ENTRYPOINT ["compaction-proxy", "serve", "--host", "0.0.0.0"]
