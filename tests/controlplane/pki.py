"""Keys for one API server: a CA, a serving certificate for all its addresses, a service account key."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Pki:
    ca: Path
    certificate: Path
    key: Path
    service_account_key: Path
    service_account_public_key: Path


def create(folder: Path, addresses: Sequence[str]) -> Pki:
    folder.mkdir(parents=True, exist_ok=True)
    pki = Pki(folder / "ca.crt", folder / "server.crt", folder / "server.key", folder / "sa.key", folder / "sa.pub")
    names = ",".join([f"IP:{a}" for a in addresses] + ["DNS:localhost", "DNS:kubernetes", "DNS:kubernetes.default.svc"])
    curve = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    _openssl(
        "req",
        "-x509",
        *curve,
        "-days",
        "30",
        "-subj",
        "/CN=akp-test-ca",
        "-keyout",
        f"{folder}/ca.key",
        "-out",
        f"{pki.ca}",
    )
    _openssl("req", *curve, "-subj", "/CN=kube-apiserver", "-keyout", f"{pki.key}", "-out", f"{folder}/server.csr")
    extensions = folder / "server.ext"
    extensions.write_text(f"subjectAltName={names}\nextendedKeyUsage=serverAuth\n")
    _openssl(
        "x509",
        "-req",
        "-in",
        f"{folder}/server.csr",
        "-CA",
        f"{pki.ca}",
        "-CAkey",
        f"{folder}/ca.key",
        "-CAcreateserial",
        "-days",
        "30",
        "-extfile",
        f"{extensions}",
        "-out",
        f"{pki.certificate}",
    )
    _openssl(
        "genpkey", "-algorithm", "EC", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-out", f"{pki.service_account_key}"
    )
    _openssl("pkey", "-in", f"{pki.service_account_key}", "-pubout", "-out", f"{pki.service_account_public_key}")
    return pki


def _openssl(*argv: str) -> None:
    done = subprocess.run(["openssl", *argv], capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"openssl {argv[0]} failed: {done.stderr.strip()}")
