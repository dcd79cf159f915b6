"""A real S3 server process (moto's) on loopback, and the environment that leads a run to it."""

from __future__ import annotations

import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

BUCKET = "swiftbatch"
ACCESS_KEY = "AKIDSWIFTBATCHTEST"
SECRET_KEY = "s3cr/t+SWIFTBATCHTEST"

# moto's own command tells nobody which free port it took, and asks at each request which of AWS's services is meant.
# What a request leaves behind is hardly worth the look for garbage among all that moto has imported.
# S3 checks `If-None-Match` and writes in one step. moto takes two, so one object is put at a time
PROGRAM = """
import gc, logging, threading
from moto.moto_server.werkzeug_app import MotoRequestHandler
from moto.s3.responses import S3Response
from moto.server import create_backend_app
from werkzeug.serving import make_server
logging.disable()
put_object, putting = S3Response.put_object, threading.Lock()
def put_alone(response):
    with putting:
        return put_object(response)
S3Response.put_object = put_alone
server = make_server("127.0.0.1", 0, create_backend_app("s3"), threaded=True, request_handler=MotoRequestHandler)
gc.freeze()
gc.set_threshold(20_000)
print(server.server_port, flush=True)
server.serve_forever()
"""


@dataclass(frozen=True)
class S3Server:
    """`address` is host:port. The bucket is there; any credentials are accepted."""

    address: str

    @property
    def url(self) -> str:
        return f"http://{self.address}"

    def uri(self, prefix: str) -> str:
        """A folder in the bucket; the endpoint comes from the environment."""
        return f"s3://{BUCKET}/{prefix}"

    def environment(self, url: str | None = None) -> dict[str, str]:
        """Return the variables by which a process reaches the server, through the proxy at `url` if one is given."""
        return {
            "AWS_ENDPOINT_URL": url or self.url,
            "AWS_REGION": "us-east-1",
            "AWS_ACCESS_KEY_ID": ACCESS_KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
            "AWS_EC2_METADATA_DISABLED": "true",
        }


@contextmanager
def running_s3_server() -> Iterator[S3Server]:
    """Start the server on a free port, make the bucket, and end it afterwards."""
    process = subprocess.Popen([sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE)
    try:
        server = S3Server(f"127.0.0.1:{int(process.stdout.readline())}")
        urllib.request.urlopen(urllib.request.Request(f"{server.url}/{BUCKET}", method="PUT"), timeout=60).close()
        yield server
    finally:
        process.kill()
        process.communicate()
