"""What a run has shown already, so that a resumed run does not show it twice.

A metric's point is (part, name, step): the first value stays. A parameter's first value stays. Tags and artefacts are
shown again when they change.
"""

from dpray.platform.tracking.spool import Entry


class Written:
    """Points, parameters, tags and artefacts so far, and which parts are open.

    Attributes:
        opened: when each part first began, in milliseconds.
        unfinished: parts that began and have not ended.
    """

    def __init__(self) -> None:
        self._points: dict[tuple[str, str], set[int]] = {}
        self._params: set[tuple[str, str]] = set()
        self._tags: dict[tuple[str, str], str] = {}
        self._artifacts: dict[tuple[str, str], str] = {}
        self.opened: dict[str, int] = {}
        self.unfinished: set[str] = set()

    def fresh(self, entry: Entry) -> Entry | None:
        """The part of an entry that is news; None if none of it is."""
        part, operation = entry["part"], entry["op"]
        if operation == "metrics":
            news = {k: v for k, v in entry["values"].items() if self._new_point(part, k, entry["step"])}
        elif operation == "params":
            news = {k: v for k, v in entry["values"].items() if (part, k) not in self._params}
            self._params.update((part, k) for k in news)
        elif operation == "tags":
            news = {k: v for k, v in entry["values"].items() if self._tags.get((part, k)) != v}
            self._tags.update({(part, k): v for k, v in news.items()})
        else:
            return entry if self._fresh_whole(entry) else None
        return {**entry, "values": news} if news else None

    def _fresh_whole(self, entry: Entry) -> bool:
        part, operation = entry["part"], entry["op"]
        if operation == "spend":
            return self._new_point(part, "privacy", entry["step"])
        if operation == "artifact":
            known = self._artifacts.get((part, entry["path"]))
            self._artifacts[part, entry["path"]] = entry["digest"]
            return bool(known != entry["digest"])
        if operation == "open":
            self.opened.setdefault(part, entry["time"])
            self.unfinished.add(part)
        elif operation == "finish":
            self.unfinished.discard(part)
        return True

    def _new_point(self, part: str, name: str, step: int) -> bool:
        steps = self._points.setdefault((part, name), set())
        new = step not in steps
        steps.add(step)
        return new
