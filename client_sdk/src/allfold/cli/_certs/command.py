"""``allfold certs``: make the certificates of a deployment, renew them, change the authority."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

import click

from allfold.cli._certs.authority import days_left, general_name, names_of
from allfold.cli._certs.folder import BROWSERS, BROWSERS_PASSWORD, CertificateFolder
from allfold_core.errors import InvalidArgument
from allfold_service.tls import DEFAULT_NAME

_HOLDER = re.compile(r"(?![.-]|ca\.(crt|key)$)[A-Za-z0-9._-]{1,64}")


@click.command(short_help="Make certificates for TLS.")
@click.option(
    "--host", "hosts", multiple=True, metavar="NAME", help="A host name or address that the"
    " certificates are for, too. May be repeated. Without it, names of before are kept."
)  # fmt: skip
@click.option("--client", is_flag=True, help="For clients only: a browser, Prometheus.")
@click.option("--days", type=click.IntRange(1, 3650), default=365, help="Days for which they are"
    " valid (default: 365).")  # fmt: skip
@click.option("--new-authority", is_flag=True, help="Sign with a new authority from now on.")
@click.option("--forget-old-authorities", is_flag=True, help="Trust only the one that signs.")
@click.argument("folder", metavar="DIR")
@click.argument("holders", metavar="[NAME]...", nargs=-1)
def certs(
    folder: str,
    holders: Sequence[str],
    hosts: Sequence[str],
    days: int,
    *,
    client: bool,
    new_authority: bool,
    forget_old_authorities: bool,
) -> None:
    """Make a certificate for each NAME, in DIR/NAME, or renew it.

    DIR/NAME is what ALLFOLD_TLS_DIR of that orchestrator, agent or command names. The first call
    makes a certificate authority in DIR; its key, DIR/ca.key, stays there. Services take renewed
    files at once, without a restart.

    \b
    To change the authority, put DIR/NAME in place everywhere after each of these:
      allfold certs DIR --new-authority
      allfold certs DIR NAME...       (and clients: NAME... --client)
      allfold certs DIR --forget-old-authorities
    """
    for each in holders:
        if not _HOLDER.fullmatch(each):
            raise InvalidArgument(
                "NAME must be 1 to 64 letters, digits and . _ -, begin with none of . -, and be "
                f"neither ca.crt nor ca.key, got {each!r}"
            )
    if client and hosts:
        raise InvalidArgument("--client is for certificates that no host has: leave out --host")
    name = os.environ.get("ALLFOLD_TLS_NAME") or DEFAULT_NAME
    for each in (name, *hosts):  # before anything is made
        general_name(each)
    kept = CertificateFolder(Path(folder))
    if new_authority or kept.is_new():
        kept.add_authority()
        click.echo(f"{kept.path / 'ca.crt'}: a new authority, valid for 10 years")
    if forget_old_authorities:
        kept.forget_old_authorities()
        click.echo(f"{kept.path / 'ca.crt'}: only the authority that signs")
    for holder in holders:
        place = kept.path / holder
        if client:
            made = kept.issue_client(holder, days)
            click.echo(
                f"{place}: a client, {_span(made, days)}; browsers import {BROWSERS}, whose "
                f"password is {BROWSERS_PASSWORD}"
            )
        else:
            made = kept.issue(holder, hosts, name, days)
            click.echo(f"{place}: for {', '.join(names_of(made))}, {_span(made, days)}")


def _span(certificate: bytes, asked: int) -> str:
    days = days_left(certificate)
    why = f" (not {asked}: its authority ends then; see --new-authority)" if days < asked else ""
    return f"for {days} days{why}"
