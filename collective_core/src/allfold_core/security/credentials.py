"""The credentials of a process: its join tokens and its certificate."""

from __future__ import annotations

from dataclasses import dataclass, field

from allfold_core.security.tls import TlsIdentity
from allfold_core.security.tokens import Tokens


@dataclass(frozen=True, slots=True)
class Credentials:
    """The join tokens, and the certificate.

    Attributes:
        tokens: empty where no token is asked for.
        tls: ``None`` where connections are plain.
    """

    tokens: Tokens = field(default_factory=Tokens)
    tls: TlsIdentity | None = None

    @property
    def scheme(self) -> str:
        """The scheme of the URLs of services: ``http`` or ``https``."""
        return "http" if self.tls is None else "https"
