"""A bucket in a stand-in for S3 on this machine."""

import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest


@contextmanager
def s3_bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The file system of a server with the empty bucket s3://bucket, which commands find by themselves."""
    server = pytest.importorskip("moto.server", reason="moto is not installed")
    pytest.importorskip("s3fs", reason="requirements-remote.txt is not installed")
    import s3fs

    thread = server.ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    thread.start()
    host, port = thread.get_host_and_port()
    urllib.request.urlopen(f"http://{host}:{port}/moto-api/reset", data=b"").close()  # what earlier ones had
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "test")
    s3fs.S3FileSystem.clear_instance_cache()  # of another server
    system = s3fs.S3FileSystem(skip_instance_cache=True)
    system.mkdir("bucket")
    try:
        yield system
    finally:
        thread.stop()
