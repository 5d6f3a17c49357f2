"""What a running proxy is made of: the long-lived parts that requests share, opened and closed together."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field

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
    """See the module docstring. ``settings`` is replaced whole when the configuration changes.

    ``spare_secret`` keys the tenants' hashes where the store has no key for them.
    """

    settings: Settings
    upstream: Upstream
    records: Records
    counters: Counters
    catalogue: Catalogue
    jobs: Jobs[Result]
    shaper: Shaper
    telemetry: Telemetry
    spare_secret: bytes = field(default_factory=lambda: secrets.token_bytes(32), repr=False)
