"""Certificates and node keys: who the server is for its clients, and who each client is for it.

    ca.key, ca.crt            the federation's own certificate authority; signs one certificate
    server.key, server.crt    what the server shows; valid for the names and addresses in it
    key, key.pub              a client's, as `flower-supernode` and `flwr supernode register` read

All on the NIST curve P-384, which Flower asks of node keys.
"""

from __future__ import annotations

import ipaddress
from datetime import UTC, datetime, timedelta
from typing import NamedTuple

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
    load_ssh_public_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from corefed.base.errors import UserError

CA_DAYS = 3650
SERVER_DAYS = 730
ALWAYS = ("localhost", "127.0.0.1", "::1")  # the operator's own commands use these
EARLIER = timedelta(hours=1)  # a client's clock may be behind


class KeyPair(NamedTuple):
    """A private key and what may be known of it, as files have them."""

    key: bytes
    public: bytes  # a certificate, or an OpenSSH public key


def make_authority(name: str, days: int = CA_DAYS) -> KeyPair:
    """A certificate authority that signs itself."""
    key = ec.generate_private_key(ec.SECP384R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    identity = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
    certificate = (
        _builder(subject, subject, key, days)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs_certificates=True), critical=True)
        .add_extension(identity, critical=False)
        .sign(key, hashes.SHA384())
    )
    return KeyPair(_pem(key), certificate.public_bytes(Encoding.PEM))


def sign_server(ca: KeyPair, host: str, days: int = SERVER_DAYS) -> KeyPair:
    """A certificate for `host`, and for this machine's own names, signed by the authority."""
    ca_key = load_pem_private_key(ca.key, None)
    assert isinstance(ca_key, ec.EllipticCurvePrivateKey)
    ca_certificate = x509.load_pem_x509_certificate(ca.public)
    issued_by = ca_certificate.extensions.get_extension_for_class(x509.SubjectKeyIdentifier)
    key = ec.generate_private_key(ec.SECP384R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, host[:64])])
    names = x509.SubjectAlternativeName([_name(each) for each in dict.fromkeys((host, *ALWAYS))])
    issuer = x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(issued_by.value)
    certificate = (
        _builder(subject, ca_certificate.subject, key, days)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs_certificates=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(names, critical=False)
        .add_extension(issuer, critical=False)
        .sign(ca_key, hashes.SHA384())
    )
    return KeyPair(_pem(key), certificate.public_bytes(Encoding.PEM))


def make_node_key() -> KeyPair:
    """A client's key in OpenSSH's format."""
    key = ec.generate_private_key(ec.SECP384R1())
    private = key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption())
    public = key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
    return KeyPair(private, public + b"\n")


def key_to_pem(public: bytes, where: str) -> bytes:
    """An OpenSSH public key as Flower names a node by it: PEM."""
    try:
        key = load_ssh_public_key(public)
    except (ValueError, UnsupportedAlgorithm):
        key = None
    nist = (ec.SECP256R1, ec.SECP384R1, ec.SECP521R1)
    if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, nist):
        raise UserError(
            f"{where} is no public key that Flower takes; make one with: "
            "ssh-keygen -t ecdsa -b 384 -N '' -f key"
        )
    return key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)


def days_left(certificate: bytes) -> float:
    """Days until a certificate ends; below zero afterwards."""
    end = x509.load_pem_x509_certificate(certificate).not_valid_after_utc
    return (end - datetime.now(UTC)) / timedelta(days=1)


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, days: int
) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - EARLIER)
        .not_valid_after(now + timedelta(days=days))
    )


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
