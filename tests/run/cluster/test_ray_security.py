"""Ray with TLS: a run joins with ``cluster_security=tls``, and a client without TLS is refused."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from ray.util import get_node_ip_address

from hwrl.run.demo import write_demo

CURVE = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")
CLUSTER = """
import ray
print(ray.init(address="local", include_dashboard=False).address_info["gcs_address"], flush=True)
input()
"""
JOIN = """
import sys
from pathlib import Path
import ray
from hwrl.errors import ConfigError
from hwrl.run.cluster.ray_session import ray_cluster
from hwrl.run.config import load_config
try:
    with ray_cluster(load_config(Path(sys.argv[1]), [f"cluster_security={sys.argv[2]}"]), log=print):
        print("the cluster answers", ray.get(ray.remote(num_cpus=0)(lambda: 6 * 7).remote()))
except ConfigError as exc:
    print(exc)
"""

pytestmark = [
    pytest.mark.extended,
    pytest.mark.long(80),
    pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not installed: it makes the certificates"),
]


def make_certificates(place: Path) -> dict[str, str]:
    """Make an authority, and a certificate of it for this machine; return Ray's variables for them."""

    def openssl(*words: str) -> None:
        subprocess.run(["openssl", *words], cwd=place, check=True, capture_output=True)

    (place / "names").write_text(f"subjectAltName=IP:127.0.0.1,IP:{get_node_ip_address()},DNS:localhost\n")
    openssl("req", "-x509", *CURVE, "-days", "2", "-keyout", "ca.key", "-out", "ca.crt", "-subj", "/CN=authority")
    openssl("req", *CURVE, "-keyout", "node.key", "-out", "node.csr", "-subj", "/CN=node")
    signed_by = ("-CA", "ca.crt", "-CAkey", "ca.key", "-CAcreateserial")
    openssl("x509", "-req", "-in", "node.csr", *signed_by, "-days", "2", "-out", "node.crt", "-extfile", "names")
    files = {"SERVER_CERT": "node.crt", "SERVER_KEY": "node.key", "CA_CERT": "ca.crt"}
    return {f"RAY_TLS_{name}": str(place / file) for name, file in files.items()}


@pytest.fixture
def client(tmp_path: Path) -> Iterator[dict[str, str]]:
    """Yield the variables of a client of a cluster with a token and TLS: its address, its token, its certificates."""
    known = {**os.environ, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "5" * 64, **make_certificates(tmp_path)}
    cluster = subprocess.Popen(
        [sys.executable, "-c", CLUSTER], env={**known, "RAY_USE_TLS": "1"}, text=True, stdin=-1, stdout=-1, stderr=-3
    )
    assert cluster.stdout is not None
    yield {**known, "RAY_ADDRESS": cluster.stdout.readline().strip()}
    cluster.communicate("\n", timeout=600)


def join(config: Path, security: str, env: dict[str, str]) -> str:
    command = [sys.executable, "-c", JOIN, str(config), security]
    return subprocess.run(command, env=env, text=True, capture_output=True, timeout=1000, check=True).stdout


def test_a_run_joins_with_tls_and_neither_without_it_nor_with_another_token(
    client: dict[str, str], tmp_path: Path
) -> None:
    config = write_demo(tmp_path / "demo", seed=1, prompts=16)
    assert "the cluster answers 42" in join(config, "tls", client)
    for security, env in (("token", client), ("tls", {**client, "RAY_AUTH_TOKEN": "6" * 64})):
        told = join(config, security, env)
        assert "there is no Ray cluster at" in told and "the cluster answers" not in told
