"""What a running proxy is made of: the long-lived parts that requests share, opened and closed together."""

from __future__ import annotations

from dataclasses import dataclass

from compaction_proxy.catalogue import Catalogue
from compaction_proxy.compaction import Result
from compaction_proxy.config.settings import Settings
from compaction_proxy.jobs import Jobs
from compaction_proxy.shaping import Shaper
from compaction_proxy.store import Records
from compaction_proxy.telemetry import Telemetry
from compaction_proxy.tokens import Counters
from compaction_proxy.upstream import Upstream


@dataclass(slots=True)
class Services:
    """See the module docstring. ``settings`` is replaced whole when the configuration changes."""

    settings: Settings
    upstream: Upstream
    records: Records
    counters: Counters
    catalogue: Catalogue
    jobs: Jobs[Result]
    shaper: Shaper
    telemetry: Telemetry
