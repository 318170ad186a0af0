"""Keeping credentials out of everything that is written down."""

from __future__ import annotations

import os
import re
from typing import Any

MASK = "***"
_SECRET_NAME = re.compile(
    r"(pass(word|wd)?|secret|token|api_?key|access_?key|private_?key|credential|auth)(s|$|_|\b)", re.IGNORECASE
)
_NOT_SECRET = re.compile(r"token(s|izer|_|$)", re.IGNORECASE)  # tokens of a language model
_URI_PASSWORD = re.compile(
    r"(?P<scheme>[a-z][a-z0-9+.-]*://)(?P<user>[^/\s:@]*):(?P<password>[^/\s@]+)@", re.IGNORECASE
)
_QUERY_SECRET = re.compile(r"(?P<key>[?&](?:token|sig|signature|password|access_key|api_key|secret)=)[^&\s'\"]+", re.I)
_SHORTEST_VALUE = 6


def mask(text: str) -> str:
    """`text` without passwords in URIs, secret query parameters and the values of secret environment variables."""
    text = _URI_PASSWORD.sub(rf"\g<scheme>\g<user>:{MASK}@", text)
    text = _QUERY_SECRET.sub(rf"\g<key>{MASK}", text)
    for value in _environment_secrets():
        text = text.replace(value, MASK)
    return text


def mask_mapping(value: Any, key: str = "") -> Any:
    """A copy of nested dicts and lists with secrets masked; whole values of keys that name a secret."""
    if isinstance(value, dict):
        return {name: mask_mapping(inner, str(name)) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [mask_mapping(inner, key) for inner in value]
    if isinstance(value, str):
        return MASK if value and names_secret(key) else mask(value)
    return value


def names_secret(name: str) -> bool:
    """Whether a key of this name holds a secret (`api_key`, `db_password`, `HF_TOKEN`; not `max_tokens`)."""
    if re.fullmatch(r"(?:.*_)?token", name, re.IGNORECASE):
        return True
    return bool(_SECRET_NAME.search(_NOT_SECRET.sub("", name)))


def has_credentials(uri: str) -> bool:
    """Whether masking would change `uri`."""
    return mask(uri) != uri


def _environment_secrets() -> list[str]:
    found = {value for name, value in os.environ.items() if names_secret(name) and len(value) >= _SHORTEST_VALUE}
    return sorted(found, key=len, reverse=True)  # a secret may contain another
