"""Who may PUT a worker list: the operator alone, by its projected ServiceAccount token, checked offline.

The cluster's public signing keys come from a mounted file that the operator keeps; it is re-read when it changes (key
rotation). Another pod of the cluster must not redirect traffic: its token has another subject.
"""

import json
import logging
from dataclasses import dataclass
from pathlib import Path

import jwt

log = logging.getLogger(__name__)

ALGORITHMS = ["RS256", "RS384", "RS512", "PS256", "ES256", "ES384", "ES512", "EdDSA"]
"""Public-key algorithms only: with a shared secret the reader of the key file could sign."""
LEEWAY_S = 10.0
"""Clock difference between nodes that expiry tolerates."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a caller was turned away: 401 (who are you), 403 (not you), 503 (can't tell yet)."""

    status: int
    message: str


class Verifier:
    """Checks bearer tokens against the keys in a file."""

    def __init__(self, keys_file: Path, *, audience: str, subject: str) -> None:
        self._file = keys_file
        self._audience = audience
        self._subject = subject
        self._stamp: tuple[int, int, int] | None = None
        self._keys: dict[str | None, jwt.PyJWK] = {}

    def refuse(self, authorization: str | None) -> Refusal | None:
        """Why the `Authorization` header is not good enough, or None if it is."""
        scheme, _, token = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not token.strip():
            return Refusal(401, "no bearer token: send the ServiceAccount token with audience " + self._audience)
        self._refresh()
        if not self._keys:
            return Refusal(503, f"no usable signing keys in {self._file} yet: the operator's ConfigMap is not mounted")
        try:
            key = self._key_for(jwt.get_unverified_header(token.strip()))
            if key is None:
                return Refusal(401, f"the token is signed with a key that is not in {self._file}")
            claims = jwt.decode(
                token.strip(),
                key,
                algorithms=ALGORITHMS,
                audience=self._audience,
                leeway=LEEWAY_S,
                options={"require": ["exp", "aud", "sub"]},
            )
        except jwt.PyJWTError as error:
            return Refusal(401, f"token refused: {error}")
        if claims["sub"] != self._subject:
            return Refusal(403, f"subject {str(claims['sub'])[:200]!r} may not change workers; only {self._subject!r}")
        return None

    def _key_for(self, header: dict[str, object]) -> jwt.PyJWK | None:
        kid = header.get("kid")
        if kid is None and len(self._keys) == 1:
            return next(iter(self._keys.values()))
        return self._keys.get(str(kid))

    def _refresh(self) -> None:
        """Read the key file again if it is another one; keep the last good keys if it is missing or broken."""
        try:
            stat = self._file.stat()
            stamp = (stat.st_ino, stat.st_mtime_ns, stat.st_size)
            if stamp == self._stamp:
                return
            entries = json.loads(self._file.read_text())["keys"]
            keys = {entry.get("kid"): jwt.PyJWK(entry) for entry in entries if entry.get("kty") != "oct"}
        except FileNotFoundError:
            return
        except (OSError, ValueError, KeyError, TypeError, AttributeError, jwt.PyJWTError) as error:
            log.warning("signing keys in %s are unusable, keeping the last ones: %s", self._file, error)
            return
        self._stamp, self._keys = stamp, keys
        log.info("loaded %d signing keys from %s", len(keys), self._file)
