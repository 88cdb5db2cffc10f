"""Certificates and kubeconfig files of one bed: one CA, short-lived, thrown away with the bed's state.

Keys are ECDSA P-256 (a bed needs a dozen certificates and starts in seconds). Private files have mode 0600.
"""

from __future__ import annotations

import base64
import datetime
import ipaddress
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

VALIDITY = datetime.timedelta(days=30)
CLOCK_SKEW = datetime.timedelta(minutes=5)
ADMINS = "system:masters"
NODES = "system:nodes"


@dataclass(frozen=True, slots=True)
class KeyPair:
    """A certificate and its private key, PEM files."""

    certificate: Path
    key: Path


def _write_private(path: Path, data: bytes) -> None:
    path.touch(mode=0o600)
    path.write_bytes(data)


def _pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    # SEC1 ("EC PRIVATE KEY"): the form that kube-apiserver's service account signer reads as well as Go's TLS.
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.TraditionalOpenSSL, serialization.NoEncryption()
    )


def _name(common_name: str, organizations: Sequence[str]) -> x509.Name:
    attributes = [x509.NameAttribute(NameOID.ORGANIZATION_NAME, organization) for organization in organizations]
    return x509.Name([*attributes, x509.NameAttribute(NameOID.COMMON_NAME, common_name)])


def _alternative_name(value: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(value))
    except ValueError:
        return x509.DNSName(value)


class Pki:
    """The bed's certificate authority, made new in ``directory``."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.directory = directory
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._subject = _name("sluice-bed-ca", ())
        usage = x509.KeyUsage(True, False, False, False, False, True, True, False, False)
        builder = (
            self._builder(self._subject, self._key.public_key())
            .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
            .add_extension(usage, critical=True)
        )
        self.ca = self._write("ca", builder.sign(self._key, hashes.SHA256()), self._key)
        self.service_account_key = directory / "service-account.key"
        self.service_account_public = directory / "service-account.pub"
        self._write_service_account_pair()

    def _builder(self, subject: x509.Name, public_key: ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:
        now = datetime.datetime.now(datetime.UTC)
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._subject)
            .public_key(public_key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - CLOCK_SKEW)
            .not_valid_after(now + VALIDITY)
        )

    def _write(self, name: str, certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> KeyPair:
        pair = KeyPair(self.directory / f"{name}.crt", self.directory / f"{name}.key")
        pair.certificate.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
        _write_private(pair.key, _pem(key))
        return pair

    def _write_service_account_pair(self) -> None:
        key = ec.generate_private_key(ec.SECP256R1())
        _write_private(self.service_account_key, _pem(key))
        public = key.public_key().public_bytes(
            serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
        )
        self.service_account_public.write_bytes(public)

    def _issue(self, file: str, subject: x509.Name, names: Sequence[str], usage: x509.ObjectIdentifier) -> KeyPair:
        key = ec.generate_private_key(ec.SECP256R1())
        builder = self._builder(subject, key.public_key()).add_extension(x509.ExtendedKeyUsage([usage]), critical=False)
        if names:
            alternatives = x509.SubjectAlternativeName([_alternative_name(name) for name in names])
            builder = builder.add_extension(alternatives, critical=False)
        return self._write(file, builder.sign(self._key, hashes.SHA256()), key)

    def server(self, file: str, common_name: str, names: Sequence[str]) -> KeyPair:
        """A serving certificate for these host names and IP addresses."""
        return self._issue(file, _name(common_name, ()), names, ExtendedKeyUsageOID.SERVER_AUTH)

    def client(self, file: str, common_name: str, organizations: Sequence[str] = ()) -> KeyPair:
        """A client certificate: user ``common_name``, in the groups ``organizations``."""
        return self._issue(file, _name(common_name, organizations), (), ExtendedKeyUsageOID.CLIENT_AUTH)

    def kubeconfig(self, file: str, server: str, user: str, organizations: Sequence[str] = ()) -> Path:
        """A self-contained kubeconfig (JSON is YAML) with a new client certificate for this user."""
        pair = self.client(file, user, organizations)
        path = self.directory / f"{file}.kubeconfig"

        def data(source: Path) -> str:
            return base64.b64encode(source.read_bytes()).decode()

        document = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [
                {"name": "bed", "cluster": {"server": server, "certificate-authority-data": data(self.ca.certificate)}}
            ],
            "users": [
                {
                    "name": user,
                    "user": {
                        "client-certificate-data": data(pair.certificate),
                        "client-key-data": data(pair.key),
                    },
                }
            ],
            "contexts": [{"name": "bed", "context": {"cluster": "bed", "user": user}}],
            "current-context": "bed",
        }
        _write_private(path, json.dumps(document, indent=1).encode())
        return path
