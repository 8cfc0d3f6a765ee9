"""The HTTP interface of the control plane: REST, server-sent events, WebSockets. docs/api.md is its contract.

It translates: requests into calls of the `Plane`, what comes back into JSON, errors into problem details. Who may ask
is decided here (`auth`), what is possible is decided there.
"""

from stretto.api.app import create_app
from stretto.api.auth import Auth

__all__ = ["Auth", "create_app"]
