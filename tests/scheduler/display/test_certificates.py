"""An https receiver must have a valid certificate."""

from __future__ import annotations

import datetime
import ipaddress
import ssl
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from swiftbatch.scheduler.display.webhooks import PostError, Receiver, WebhookMessage, post
from tests.scheduler.display.receivers import receiver, status

END = WebhookMessage("run.ended", {"run_id": "run-1"})
SECONDS = 60.0


@pytest.fixture
def certificate(tmp_path: Path) -> Path:
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "receiver")])
    now = datetime.datetime.now(datetime.UTC)
    address = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    builder = x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
    builder = builder.not_valid_before(now - datetime.timedelta(1)).not_valid_after(now + datetime.timedelta(1))
    signed = builder.add_extension(address, critical=False).sign(key, hashes.SHA256())
    no_password = serialization.NoEncryption()
    pem = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, no_password)
    path = tmp_path / "receiver.pem"
    path.write_bytes(pem + signed.public_bytes(serialization.Encoding.PEM))
    return path


def test_a_certificate_is_trusted_where_its_file_is_named(certificate: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(certificate)
    with receiver(status(200), tls) as inbox:
        with pytest.raises(
            PostError, match=r"^its certificate was not accepted \(self.signed certificate\); .*SSL_CERT_FILE"
        ):
            post(Receiver.parse(inbox.url, None), END, SECONDS)
        assert inbox.requests == []
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
        post(Receiver.parse(inbox.url, None), END, SECONDS)
        assert [request.message["type"] for request in inbox.requests] == ["run.ended"]


def test_a_receiver_without_tls_is_told_as_one() -> None:
    with receiver(status(200)) as inbox, pytest.raises(PostError, match=r"^no TLS there"):
        post(Receiver.parse(inbox.url.replace("http:", "https:"), None), END, SECONDS)
