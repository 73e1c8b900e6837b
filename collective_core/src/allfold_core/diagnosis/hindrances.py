"""What is known of the culprits of a group's incidents, for errors that name them."""

from __future__ import annotations

from allfold_core.incident import Incident


class Hindrances:
    """The open incidents of one group, as its verdicts quote them. From any thread."""

    def __init__(self) -> None:
        self._open: dict[str, Incident] = {}

    def note(self, incident: Incident) -> None:
        """Note an incident, or that it is over."""
        if incident.is_open:
            self._open[incident.id] = incident
        else:
            self._open.pop(incident.id, None)

    def clear(self) -> None:
        """Forget all."""
        self._open.clear()

    def of_ranks(self) -> dict[int, str]:
        """Return what hinders each rank: a phrase such as "its process is stopped"."""
        return {
            incident.culprit.rank: f"its process {process}"
            for incident in list(self._open.values())
            if incident.culprit.rank is not None and (process := incident.evidence.get("process"))
        }

    def of_links(self) -> list[str]:
        """Return a sentence on each link that is slow or loses packets."""
        return [each.sentence for each in list(self._open.values()) if each.culprit.kind == "link"]
