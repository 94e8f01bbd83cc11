"""MLflow: the allow-listed view of a run.

A run is spooled first (`spool`), carried to MLflow in batches by a thread (`courier`, `delivery`), never waiting.
Only declared names get through (`declared`). MLflow is imported when a `Tracker` is made, not before.
"""

from dpray.platform.tracking.address import TrackingAddressError, check_uri, quiet_environment, shown
from dpray.platform.tracking.courier import replay
from dpray.platform.tracking.declared import (
    DECLARED,
    PUBLIC_METRICS,
    RELEASED_METRICS,
    Declared,
    UndeclaredMetric,
)
from dpray.platform.tracking.delivery import Unreachable, anchors
from dpray.platform.tracking.spend import privacy_metrics
from dpray.platform.tracking.tracker import Tracker
from dpray.platform.tracking.view import NullTracker, RunView, Status

__all__ = [
    "DECLARED",
    "PUBLIC_METRICS",
    "RELEASED_METRICS",
    "Declared",
    "NullTracker",
    "RunView",
    "Status",
    "Tracker",
    "TrackingAddressError",
    "UndeclaredMetric",
    "Unreachable",
    "anchors",
    "check_uri",
    "privacy_metrics",
    "quiet_environment",
    "replay",
    "shown",
]
