"""A certificate authority for one test bed, made with the `openssl` program."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from stretto.testing.kubernetes.processes import run

_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
_DAYS = ("-days", "365")


class Authority:
    """Signs the API server's certificate and those of its users; keys lie in one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True)
        self.certificate, self._key = folder / "ca.crt", folder / "ca.key"
        run(
            "openssl", "req", "-x509", *_KEY, "-keyout", str(self._key), "-subj", "/CN=stretto-test-authority",
            *_DAYS, "-out", str(self.certificate),
        )  # fmt: skip
        self.service_accounts = folder / "service-accounts.key"
        """Signs the tokens of ServiceAccounts."""
        run("openssl", "genrsa", "-out", str(self.service_accounts), "2048")

    def server(self, name: str, *, addresses: Sequence[str], names: Sequence[str]) -> tuple[Path, Path]:
        """Certificate and key of a server with these addresses and host names."""
        alternatives = [f"IP:{address}" for address in addresses] + [f"DNS:{host}" for host in names]
        return self._sign(name, f"/CN={name}", f"subjectAltName={','.join(alternatives)}")

    def client(self, name: str, groups: Sequence[str]) -> tuple[Path, Path]:
        """Certificate and key of a user: Kubernetes reads the name and the groups from its subject."""
        subject = "".join(f"/O={group}" for group in groups) + f"/CN={name}"
        return self._sign(name.replace(":", "-"), subject, "extendedKeyUsage=clientAuth")

    def _sign(self, file: str, subject: str, extension: str) -> tuple[Path, Path]:
        certificate, key, request, extensions = (
            self.folder / f"{file}.{suffix}" for suffix in ("crt", "key", "csr", "ext")
        )
        extensions.write_text(extension)
        run("openssl", "req", *_KEY, "-keyout", str(key), "-subj", subject, "-out", str(request))
        run(
            "openssl", "x509", "-req", "-in", str(request), "-CA", str(self.certificate), "-CAkey", str(self._key),
            "-CAcreateserial", *_DAYS, "-extfile", str(extensions), "-out", str(certificate),
        )  # fmt: skip
        return certificate, key
