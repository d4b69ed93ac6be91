"""The cluster's own certificate authority, the API server's certificate, and the service-account key."""

import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

LIFETIME = timedelta(days=365)
CLOCK_SKEW = timedelta(hours=1)
KEY_MODE = 0o600
MASTERS = "system:masters"
AUTHORITY = "dlrm-test-ca"
PublicKey = ec.EllipticCurvePublicKey | rsa.RSAPublicKey


@dataclass(frozen=True, kw_only=True)
class Certificates:
    """Files of one cluster, all PEM."""

    ca: Path
    ca_key: Path
    server_cert: Path
    server_key: Path
    kubelet_client_cert: Path
    """Who the API server is to a kubelet."""
    kubelet_client_key: Path
    service_account_key: Path


def write_certificates(folder: Path, hosts: Sequence[str], authority: str = AUTHORITY) -> Certificates:
    """Make a new authority and what it signs; ``hosts`` are the server's names and IP addresses."""
    # The authority's key is RSA: cert-controller, by which Kueue keeps its certificates, reads no other kind.
    ca_key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    server_key, client_key, account_key = (ec.generate_private_key(ec.SECP256R1()) for _ in range(3))
    ca_name = _name(authority)
    ca = (
        _builder(ca_name, ca_name, ca_key.public_key(), ca_key.public_key())
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_key_usage(signs_certificates=True), critical=True)
        .add_extension(x509.SubjectAlternativeName([_host(authority)]), critical=False)
        .sign(ca_key, hashes.SHA256())
    )
    server = (
        _leaf(_name("kube-apiserver"), ca_name, server_key.public_key(), ca_key.public_key())
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.SubjectAlternativeName([_host(host) for host in hosts]), critical=False)
        .sign(ca_key, hashes.SHA256())
    )
    client = (
        _leaf(_name("kube-apiserver", MASTERS), ca_name, client_key.public_key(), ca_key.public_key())
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.CLIENT_AUTH]), critical=False)
        .sign(ca_key, hashes.SHA256())
    )
    return Certificates(
        ca=_write(folder / "ca.crt", ca.public_bytes(serialization.Encoding.PEM)),
        ca_key=_write(folder / "ca.key", _pem(ca_key)),
        server_cert=_write(folder / "apiserver.crt", server.public_bytes(serialization.Encoding.PEM)),
        server_key=_write(folder / "apiserver.key", _pem(server_key)),
        kubelet_client_cert=_write(folder / "kubelet-client.crt", client.public_bytes(serialization.Encoding.PEM)),
        kubelet_client_key=_write(folder / "kubelet-client.key", _pem(client_key)),
        service_account_key=_write(folder / "service-account.key", _pem(account_key)),
    )


def _builder(
    subject: x509.Name, issuer: x509.Name, key: PublicKey, issuer_key: rsa.RSAPublicKey
) -> x509.CertificateBuilder:
    """Return a certificate with both key identifiers, which Python 3.13's strict verification requires."""
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - CLOCK_SKEW)
        .not_valid_after(now + LIFETIME)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_key), critical=False)
    )


def _leaf(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, issuer_key: rsa.RSAPublicKey
) -> x509.CertificateBuilder:
    """Return a certificate that is not a CA."""
    return (
        _builder(subject, issuer, key, issuer_key)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_key_usage(signs_certificates=False), critical=True)
    )


def _key_usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=True,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        encipher_only=False,
        decipher_only=False,
    )


def _name(common: str, group: str = "") -> x509.Name:
    """Kubernetes takes the organization for the user's group."""
    groups = [x509.NameAttribute(NameOID.ORGANIZATION_NAME, group)] if group else []
    return x509.Name([*groups, x509.NameAttribute(NameOID.COMMON_NAME, common)])


def _host(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _pem(key: ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey) -> bytes:
    """Return the older PEM form, which Kubernetes accepts for service-account keys."""
    encoding, form = serialization.Encoding.PEM, serialization.PrivateFormat.TraditionalOpenSSL
    return key.private_bytes(encoding, form, serialization.NoEncryption())


def _write(path: Path, content: bytes) -> Path:
    path.touch(mode=KEY_MODE)
    path.write_bytes(content)
    return path
