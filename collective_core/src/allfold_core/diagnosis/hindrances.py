"""The culprits of a group's incidents, for errors that name them."""

from __future__ import annotations

from allfold_core.incident import LOST_SECONDS, Incident


class Hindrances:
    """The open incidents of one group, as its verdicts quote them. From any thread."""

    def __init__(self) -> None:
        self._open: dict[str, tuple[Incident, float]] = {}  # by id, and when it was heard

    def note(self, incident: Incident, now: float) -> None:
        """Note an incident, or that it is over.

        Args:
            now: monotonic.
        """
        if incident.is_open:
            self._open[incident.id] = incident, now
        else:
            self._open.pop(incident.id, None)

    def forget_lost(self, now: float) -> None:
        """Forget incidents that were not repeated for long: their reporter is gone."""
        for number, (_, heard) in list(self._open.items()):
            if now - heard > LOST_SECONDS:
                self._open.pop(number, None)

    def clear(self) -> None:
        """Forget all."""
        self._open.clear()

    def of_ranks(self) -> dict[int, str]:
        """Return what hinders each rank: a phrase such as "its process is stopped"."""
        return {
            incident.culprit.rank: f"its process {process}"
            for incident in self._incidents()
            if incident.culprit.rank is not None and (process := incident.evidence.get("process"))
        }

    def of_links(self) -> list[str]:
        """Return a sentence on each link that is slow or loses packets."""
        return [each.sentence for each in self._incidents() if each.culprit.kind == "link"]

    def _incidents(self) -> list[Incident]:
        return [incident for incident, _ in list(self._open.values())]
