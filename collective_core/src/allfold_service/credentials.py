"""The credentials of a process: its join tokens, and its certificate."""

from __future__ import annotations

import hmac
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from allfold_core.errors import InvalidArgument, LocalError
from allfold_service.tls import TlsIdentity
from allfold_service.watched_files import WatchedFiles

# Not the padding of base64: "abc==" is a token without a name.
_NAMED = re.compile(r"([A-Za-z0-9._-]{1,128})=([^=]+=*)")


class Tokens:
    """The tokens of a service: the first is sent, all are accepted.

    So a token is changed without stopping anybody: ``old,new`` everywhere, then ``new,old``, then
    ``new``. A token may have a name, which is never sent: ``team-a=old,team-a=new``.

    Args:
        text: the tokens, separated by commas; without any, the file counts.
        file: path of a file that holds them in the same form, and is read again when it changes.
        variable: the environment variable that the text comes from, for errors.

    Raises:
        InvalidArgument: the file cannot be read, or holds no token that a header can carry.
    """

    def __init__(self, text: str = "", file: str = "", *, variable: str = "ALLFOLD_TOKEN") -> None:
        self._fixed = parse(text, variable)
        self._file: WatchedFiles[dict[str, str]] | None = None
        if file and not self._fixed:
            source = f"{variable}_FILE ({file})"
            self._file = WatchedFiles([Path(file)], lambda: _read(Path(file), source), source)

    @property
    def accepted(self) -> dict[str, str]:
        """All tokens, with their names; none where no token is asked for."""
        return self._file.content if self._file is not None else self._fixed

    @property
    def sent(self) -> str:
        """The token to send; empty without one."""
        return next(iter(self.accepted), "")

    def __bool__(self) -> bool:
        return bool(self.accepted)

    def headers(self) -> dict[str, str]:
        """Return the header of a request that brings the token."""
        return {"Authorization": f"Bearer {self.sent}"} if self else {}

    def sign(self, request: Any) -> Any:
        """Add the header to a request of httpx, whose ``auth`` this is."""
        request.headers.update(self.headers())
        return request

    def accept(self, authorization: str) -> bool:
        """Return True if a request with this ``Authorization`` header brings one of the tokens."""
        return self.name_of(authorization) is not None

    def name_of(self, authorization: str) -> str | None:
        """Return the name, which may be empty, of the token in an ``Authorization`` header.

        ``None`` where it is none of ours. It takes the same time for every wrong token, and does
        not say whether one is needed.
        """
        shown, known = bearer(authorization).encode(), self.accepted.items()
        fits = [name for token, name in known if hmac.compare_digest(shown, token.encode())]
        return fits[0] if fits else None


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


def bearer(authorization: str) -> str:
    """Return the token in an ``Authorization`` header; empty where there is none."""
    scheme, _, shown = authorization.partition(" ")
    return shown.strip() if scheme.lower() == "bearer" else ""


def no_token(service: str, authorization: str, **details: Any) -> LocalError:
    """Return the refusal of a request without one of a service's tokens.

    Args:
        service: what people call it.
        authorization: the header that the request brought; empty for none.
    """
    is_other = f"the token is not the {service}'s"
    return LocalError(
        f"{is_other if authorization else 'the request brought no token'}; send it as "
        "'Authorization: Bearer <token>', it is the value of ALLFOLD_TOKEN",
        **details,
    )


def parse(text: str, source: str) -> dict[str, str]:
    """Return the tokens in a text, each with its name, which is empty where it has none.

    Args:
        source: where it comes from, for the error, which does not show the tokens.

    Raises:
        InvalidArgument: a token has characters that no header can carry.
    """
    found = tuple(each.strip() for each in text.strip().split(","))
    if found == ("",):
        return {}
    if not all(each and all("!" <= character <= "~" for character in each) for each in found):
        raise InvalidArgument(
            f"{source} has blanks, line ends or other characters that no token can have; make one "
            "with `openssl rand -hex 24`, and write a comma between several"
        )
    named = [(each, _NAMED.fullmatch(each)) for each in found]
    return dict((match[2], match[1]) if match else (each, "") for each, match in named)


def _read(path: Path, source: str) -> dict[str, str]:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise InvalidArgument(f"{source} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise InvalidArgument(f"{source} is not text; it must hold the token") from error
    if not text.strip():
        raise InvalidArgument(f"{source} is empty; it must hold the token")
    return parse(text, source)
