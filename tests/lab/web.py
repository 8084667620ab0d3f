"""A real web server, nginx, without privileges, in whatever network namespace it is started in."""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from .record import LabError

START_WITHIN = 60.0
_CONFIG = """\
daemon off;
pid {directory}/nginx.pid;
error_log {directory}/error.log;
worker_processes 1;
events {{ worker_connections 1024; }}
http {{
    client_body_temp_path {directory}/body;
    proxy_temp_path {directory}/proxy;
    fastcgi_temp_path {directory}/fastcgi;
    uwsgi_temp_path {directory}/uwsgi;
    scgi_temp_path {directory}/scgi;
    log_format plain '$server_port $request_method $uri $status $body_bytes_sent';
    access_log {directory}/access.log plain;
    root {directory}/www;
    server {{
        listen {address}:{port};
        location /reports/ {{ dav_methods PUT; }}
        location /slow/ {{ alias {directory}/www/; limit_rate 16k; }}
        location /no-validators/ {{
            alias {directory}/www/;
            etag off;
            add_header Last-Modified "";
            if_modified_since off;
        }}
        location /dates/ {{ alias {directory}/www/; etag off; }}
    }}
    server {{
        listen {address}:{proxy_port};
        location / {{ proxy_pass http://$http_host$uri; proxy_set_header If-None-Match $http_if_none_match; }}
    }}
    {tls}
}}
"""
_TLS = """\
server {{
        listen {address}:{tls_port} ssl;
        ssl_certificate {directory}/server.pem;
        ssl_certificate_key {directory}/server.key;
        ssl_client_certificate {directory}/ca.pem;
        ssl_verify_client on;
    }}"""


class WebServer:
    """Serves `www`; takes PUTs below /reports/. Port 8080 is plain, 8443 wants client certificates, 8081 is a proxy."""

    PORT, PROXY_PORT, TLS_PORT = 8080, 8081, 8443

    def __init__(self, enter: Sequence[str] = (), address: str = "127.0.0.1", *, tls: bool = False) -> None:
        # Not below a directory of pytest: those are closed to other users.
        self.directory = Path(tempfile.mkdtemp(prefix="akp-web-"))
        self.directory.chmod(0o755)
        self.www = self.directory / "www"
        self.address = address
        self.url = f"http://{address}:{self.PORT}"
        values = {
            "directory": self.directory,
            "address": address,
            "port": self.PORT,
            "proxy_port": self.PROXY_PORT,
            "tls_port": self.TLS_PORT,
        }
        user = pwd.getpwnam("nobody")
        (self.www / "reports").mkdir(parents=True)
        if tls:
            self._make_certificates()
        text = _CONFIG.format(**values, tls=_TLS.format(**values) if tls else "")
        (self.directory / "nginx.conf").write_text(text)
        for each in (self.directory, self.www / "reports", *self.directory.glob("*.key")):
            os.chown(each, user.pw_uid, user.pw_gid)
        argv = [*enter, "setpriv", f"--reuid={user.pw_uid}", f"--regid={user.pw_gid}", "--clear-groups"]
        argv += ["nginx", "-e", str(self.directory / "error.log"), "-c", str(self.directory / "nginx.conf")]
        self._process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd="/")
        self._wait()

    def _wait(self) -> None:
        """Until it serves: nginx writes its pid once it listens."""
        deadline = time.monotonic() + START_WITHIN
        while not (self.directory / "nginx.pid").exists() or not (self.directory / "nginx.pid").read_text().strip():
            if self._process.poll() is not None or time.monotonic() > deadline:
                log = self.directory / "error.log"
                raise LabError(f"nginx does not start:\n{log.read_text() if log.exists() else ''}")
            time.sleep(0.01)

    def _make_certificates(self) -> None:
        """A CA, a certificate of the server and one of a client."""

        def openssl(*arguments: str) -> None:
            subprocess.run(["openssl", *arguments], cwd=self.directory, check=True, capture_output=True)

        key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")
        openssl("req", "-x509", *key, "-keyout", "ca.key", "-out", "ca.pem", "-subj", "/CN=test CA", "-days", "2")
        for name, subject in (("server", f"IP:{self.address}"), ("client", "DNS:n1")):
            openssl("req", *key, "-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", f"/CN={name}")
            (self.directory / f"{name}.ext").write_text(f"subjectAltName={subject}\n")
            signing = ("-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-days", "2")
            openssl("x509", "-req", "-in", f"{name}.csr", *signing, "-extfile", f"{name}.ext", "-out", f"{name}.pem")

    def requests(self) -> list[str]:
        """Lines `PORT METHOD PATH STATUS BYTES` since the last time somebody asked."""
        log = self.directory / "access.log"
        lines = log.read_text().splitlines()
        with log.open("w"):
            pass  # nginx appends, so it goes on at the start
        return lines

    def close(self) -> None:
        self._process.terminate()
        self._process.wait()
        shutil.rmtree(self.directory)

    def __enter__(self) -> WebServer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
