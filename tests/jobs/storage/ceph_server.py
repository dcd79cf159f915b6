"""A real S3 server of another kind on loopback: Ceph's radosgw, with a cluster of one disk in memory behind it."""

from __future__ import annotations

import shutil
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from uuid import uuid4

from botocore.session import Session

from tests.jobs.storage.s3_server import ACCESS_KEY, BUCKET, SECRET_KEY, S3Server

PROGRAMS = ("ceph", "ceph-authtool", "ceph-mon", "ceph-osd", "monmaptool", "radosgw", "radosgw-admin")
IS_INSTALLED = all(shutil.which(name) for name in PROGRAMS)
START_SECONDS = 120

CONFIG = """
[global]
fsid = {fsid}
mon_host = v2:127.0.0.1:{mon_port}
osd_objectstore = memstore
memstore_device_bytes = 1G
osd_pool_default_size = 1
osd_pool_default_min_size = 1
osd_pool_default_pg_num = 1
osd_pool_default_pg_autoscale_mode = off
osd_crush_chooseleaf_type = 0
mon_allow_pool_size_one = true
rgw_frontends = beast endpoint=127.0.0.1:{port}
mon_data = {folder}/mon
osd_data = {folder}/osd
rgw_data = {folder}/rgw
log_file = {folder}/$name.log
run_dir = {folder}
admin_socket = {folder}/$name.$pid.asok
keyring = {folder}/keyring
"""


@contextmanager
def running_ceph_server(folder: Path) -> Iterator[S3Server]:
    """Start the cluster in an empty folder, make a user and a bucket, and end it afterwards."""
    config, port, mon_port = folder / "ceph.conf", _free_port(), _free_port()
    fsid, disk = str(uuid4()), str(uuid4())
    for name in ("mon", "osd", "rgw"):
        (folder / name).mkdir()
    config.write_text(CONFIG.format(fsid=fsid, mon_port=mon_port, port=port, folder=folder))
    server = S3Server(f"127.0.0.1:{port}")

    def call(*command: str) -> None:
        subprocess.run([*command, "-c", str(config)], capture_output=True, timeout=START_SECONDS, check=True)

    with ExitStack() as stack:

        def start(*command: str) -> None:
            process = subprocess.Popen(
                [*command, "-f", "-c", str(config)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
            )
            stack.callback(process.wait)
            stack.callback(process.kill)

        monmap = str(folder / "monmap")
        call("monmaptool", "--create", "--addv", "a", f"[v2:127.0.0.1:{mon_port}]", "--fsid", fsid, monmap)
        keyring = str(folder / "keyring")
        call("ceph-authtool", "--create-keyring", keyring, "--gen-key", "-n", "mon.", "--cap", "mon", "allow *")
        rights = [word for kind in ("mon", "osd", "mgr") for word in ("--cap", kind, "allow *")]
        for name in ("client.admin", "osd.0"):
            call("ceph-authtool", keyring, "--gen-key", "-n", name, *rights)
        call("ceph-mon", "--mkfs", "-i", "a", "--monmap", monmap, "--keyring", keyring)
        start("ceph-mon", "-i", "a")
        call("ceph", "osd", "new", disk)
        call("ceph-osd", "-i", "0", "--mkfs", "--osd-uuid", disk)
        start("ceph-osd", "-i", "0")
        user = ("--uid=tester", "--display-name=tester", f"--access-key={ACCESS_KEY}", f"--secret-key={SECRET_KEY}")
        call("radosgw-admin", "user", "create", *user)
        start("radosgw", "-n", "client.admin")
        _wait_for(server.url)
        keys = {"aws_access_key_id": ACCESS_KEY, "aws_secret_access_key": SECRET_KEY, "region_name": "us-east-1"}
        Session().create_client("s3", endpoint_url=server.url, **keys).create_bucket(Bucket=BUCKET)
        yield server


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def _wait_for(url: str) -> None:
    until = time.monotonic() + START_SECONDS
    while True:
        try:
            return urllib.request.urlopen(url, timeout=5).close()
        except OSError:
            if time.monotonic() > until:
                raise
            time.sleep(0.2)
