"""Passwords in the URLs of databases."""

from __future__ import annotations

from urllib.parse import parse_qsl, urlsplit

_PASSWORDS = {"password", "sslpassword"}


def has_password(url_or_path: str) -> bool:
    """Also where it cannot be read otherwise: rather one time too many."""
    if "://" not in url_or_path:
        return False
    try:
        parts = urlsplit(url_or_path)
        asked = {name.lower() for name, _ in parse_qsl(parts.query, keep_blank_values=True)}
    except ValueError:
        return "@" in url_or_path
    return ":" in parts.netloc.rpartition("@")[0] or bool(asked & _PASSWORDS)
