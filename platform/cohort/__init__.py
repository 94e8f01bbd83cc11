"""Clients on Ray actors: what they hold, what they can be asked, and sums of their answers."""

from dpray.platform.cohort.check import check_records_alone
from dpray.platform.cohort.client import ClientTask, Records, Site, Stack
from dpray.platform.cohort.cohort import Cohort
from dpray.platform.cohort.covariance import CovarianceSum
from dpray.platform.cohort.errors import ClientsRefused, CohortError, QuorumLost
from dpray.platform.cohort.handle import CohortHandle
from dpray.platform.cohort.local_steps import LocalDescent
from dpray.platform.cohort.partition import partition
from dpray.platform.cohort.queries import ClientUpdate, GradientSum, Query, Votes
from dpray.platform.cohort.sampled import Sampled
from dpray.platform.cohort.sums import ClientSum

__all__ = [
    "ClientSum",
    "ClientTask",
    "ClientUpdate",
    "ClientsRefused",
    "Cohort",
    "CohortError",
    "CohortHandle",
    "CovarianceSum",
    "GradientSum",
    "LocalDescent",
    "Query",
    "QuorumLost",
    "Records",
    "Sampled",
    "Site",
    "Stack",
    "Votes",
    "check_records_alone",
    "partition",
]
