"""Only the operator's token changes workers."""

import json
import time
from pathlib import Path
from typing import Any

import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric import ec, rsa

from sluice.router.auth import Verifier

OPERATOR = "system:serviceaccount:sluice-system:sluice-operator"
RSA_KEY = rsa.generate_private_key(public_exponent=65537, key_size=2048)
EC_KEY = ec.generate_private_key(ec.SECP256R1())
STRANGER = rsa.generate_private_key(public_exponent=65537, key_size=2048)


def _jwk(key: Any, kid: str) -> dict[str, Any]:
    maker = jwt.algorithms.RSAAlgorithm if isinstance(key, rsa.RSAPrivateKey) else jwt.algorithms.ECAlgorithm
    return {**json.loads(maker.to_jwk(key.public_key())), "kid": kid, "use": "sig"}


def _token(key: Any = RSA_KEY, kid: str | None = "one", algorithm: str = "RS256", **claims: Any) -> str:
    now = time.time()
    payload = {"sub": OPERATOR, "aud": ["sluice-router"], "iat": now, "nbf": now, "exp": now + 600, **claims}
    payload = {name: value for name, value in payload.items() if value is not None}
    return "Bearer " + jwt.encode(payload, key, algorithm=algorithm, headers={"kid": kid} if kid else {})


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    path = tmp_path / "jwks.json"
    path.write_text(json.dumps({"keys": [_jwk(RSA_KEY, "one"), _jwk(EC_KEY, "two")]}))
    return path


def _status(keys: Path, header: str | None) -> int | None:
    refusal = Verifier(keys, audience="sluice-router", subject=OPERATOR).refuse(header)
    return refusal.status if refusal else None


@pytest.mark.parametrize("token", [_token(), _token(EC_KEY, "two", "ES256")])
def test_operators_token_is_accepted(keys: Path, token: str) -> None:
    assert _status(keys, token) is None


@pytest.mark.parametrize(
    ("token", "status"),
    [
        (None, 401),
        ("", 401),
        ("Basic abc", 401),
        ("Bearer not.a.token", 401),
        (_token(STRANGER, "one"), 401),
        (_token(STRANGER, "three"), 401),
        (_token(kid=None), 401),
        (_token(aud=["https://kubernetes.default.svc"]), 401),
        (_token(exp=time.time() - 3600), 401),
        (_token(exp=None), 401),
        (_token(nbf=time.time() + 3600), 401),
        (_token(sub="system:serviceaccount:default:default"), 403),
        (_token(sub=OPERATOR + "-2"), 403),
        ("Bearer " + jwt.encode({"sub": OPERATOR, "aud": "sluice-router"}, "", algorithm="none"), 401),
        (_token("secret" * 8, "one", "HS256"), 401),
    ],
)
def test_every_other_token_is_refused(keys: Path, token: str | None, status: int) -> None:
    assert _status(keys, token) == status


def test_a_shared_secret_in_the_key_file_signs_nothing(keys: Path) -> None:
    keys.write_text(
        json.dumps({"keys": [{"kty": "oct", "k": "c2VjcmV0c2VjcmV0c2VjcmV0c2VjcmV0c2VjcmV0c2VjcmV0", "kid": "o"}]})
    )
    assert _status(keys, _token("secret" * 6, "o", "HS256")) == 503


def test_rotated_keys_are_read_again_and_a_broken_file_keeps_the_last(keys: Path) -> None:
    verifier = Verifier(keys, audience="sluice-router", subject=OPERATOR)
    assert verifier.refuse(_token()) is None
    new = keys.with_suffix(".new")
    new.write_text(json.dumps({"keys": [_jwk(STRANGER, "three")]}))
    new.replace(keys)
    assert verifier.refuse(_token(STRANGER, "three")) is None
    assert verifier.refuse(_token()) is not None
    keys.write_text("{")
    assert verifier.refuse(_token(STRANGER, "three")) is None
    keys.unlink()
    assert verifier.refuse(_token(STRANGER, "three")) is None


def test_without_keys_nobody_can_be_judged(tmp_path: Path) -> None:
    assert _status(tmp_path / "absent.json", _token()) == 503
