"""What the alarms say, where people look: a gauge, and one log line at each change."""

from __future__ import annotations

from collections.abc import Mapping

from sao.preference import Preference
from sao.telemetry.logs import get_logger
from services.reward import metrics
from services.reward.alarms import Alarm, Alarms

log = get_logger(__name__)


class AlarmWatch:
    """Feeds the alarms and tells what changes."""

    def __init__(self, alarms: Alarms) -> None:
        self._alarms = alarms

    def active(self) -> list[Alarm]:
        """What to show now."""
        return self._alarms.active()

    def observe(self, values: Mapping[str, float], preference: Preference) -> None:
        """Take one scored trajectory."""
        for change in self._alarms.observe(values, preference):
            alarm = change.alarm
            metrics.HACKING.labels(alarm.rising, alarm.collapsing).set(int(change.raised))
            if change.raised:
                log.warning("reward hacking suspected: one component rises while another collapses", **_told(alarm))
            else:
                log.info("reward hacking is no longer suspected", **_told(alarm))


def _told(alarm: Alarm) -> dict[str, object]:
    return {key: round(value, 3) if isinstance(value, float) else value for key, value in alarm.model_dump().items()}
